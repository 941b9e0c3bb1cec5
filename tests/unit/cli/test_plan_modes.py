"""``lightning-muon plan --ranks``: rows computed by hand, and config files with which trainings start."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_flexdemo import node_traffic
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK
from lightning_muon.schedule.shapes import read_shapes
from tests.unit.cli.tiny_shapes import LENGTH, SHAPES, WIDTH, WORDS

# Embedding, four layers of a matrix and a vector, and head: 256, 4 * 72 and 264 elements.
_NUMEL, _MATRICES = 808, 256
_FLOPS, _BANDWIDTH = 1e4, 1e6
_FORWARD = 2 * (256 + 256) * LENGTH / _FLOPS  # Seconds of one row.
_MODES = ["none", "ddp", "zero2", "fsdp", "hsdp", "pipeline", "flexdemo"]
_GIB = 2**30


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPES))
    cost = {"flops_per_second": 1e12, "memory_bytes_per_second": 1e12, "bandwidth": [_BANDWIDTH]}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    files = ["--shapes", str(tmp_path / "tiny.json"), "--cost", str(tmp_path / "cost.json")]
    options = ["--model-flops", str(_FLOPS), "--activations", "kept", "--precision", "32-true", "--schedules", "1f1b"]
    return ["plan", *files, "--ranks", "4", "--rows", "4", "--length", str(LENGTH), *options]


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    main([*arguments, "--json"])
    return {each["mode"]: each for each in json.loads(capsys.readouterr().out)["modes"]}


def test_memory_of_whole_weights_by_hand(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = _plan(capsys, *arguments)
    assert set(found) == set(_MODES)
    state = 4 * (_MATRICES + 2 * (_NUMEL - _MATRICES))
    # Backward begins with activations, the logits' probabilities and two gradients of theirs, of one row or of four.
    row = LENGTH * 4 * (4 * 2 * WIDTH + WORDS + WIDTH + 3 * WORDS)
    assert found["none"]["peak_bytes"] == 4 * _NUMEL + state + 4 * row
    # Each rank owns one of four matrices and sends it to three others, in bfloat16.
    ddp = found["ddp"]["memory_bytes"]
    wire = 2 * WIDTH**2 * (3 + 3)
    assert found["ddp"]["peak_bytes"] == 4 * _NUMEL + state + wire + row
    assert (ddp["weights"], ddp["gradients"], ddp["optimizer"]) == (4 * _NUMEL, 4 * _NUMEL, state)
    # Gradients and state of one matrix and a quarter of all else; nothing travels for Newton-Schulz.
    own = WIDTH**2 + (_NUMEL - _MATRICES) // 4
    zero2 = found["zero2"]["memory_bytes"]
    assert (zero2["weights"], zero2["optimizer"]) == (4 * _NUMEL, 4 * (WIDTH**2 + 2 * (_NUMEL - _MATRICES) // 4))
    # All there is makes one bucket: as it arrives, as it is sent, and the shares of three ranks. In the step, the sums.
    assert zero2["gradients"] == 4 * own
    assert zero2["buffers"] == 4 * _NUMEL * (2 + 3 / 4)


def test_seconds_by_hand(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = _plan(capsys, *arguments)
    rest = {mode: each["step_seconds"] - each["optimizer_seconds"] for mode, each in found.items()}
    assert rest["none"] == pytest.approx(4 * 3 * _FORWARD)
    # Sums hide behind backward, but for those of the embedding: two rings of four ranks.
    embedding = 4 * 256 * 3 / 4 / _BANDWIDTH
    assert rest["ddp"] == pytest.approx(3 * _FORWARD + 2 * embedding)
    # There and back, in one bucket.
    assert rest["zero2"] == pytest.approx(3 * _FORWARD + 2 * embedding, rel=1e-4)
    assert rest["fsdp"] == pytest.approx(3 * _FORWARD + 2 * embedding)
    # What other nodes get comes behind the whole backward.
    slow = _plan(capsys, *arguments, "--modes", "flexdemo", "--bandwidth", "1", "--flexdemo", "top_k=1")["flexdemo"]
    mesh = Mesh(slow["replicate_size"], slow["shard_size"])
    config = FlexDeMoConfig(base="muon", replicator=DCTTopK(top_k=1))
    sent = node_traffic(read_shapes(arguments[2]).parameters, mesh, config).sent / mesh.shard
    transforms = 2 * 4 * 64 * _NUMEL / _FLOPS
    assert mesh == (4, 1) and slow["step_seconds"] == pytest.approx(3 * _FORWARD + sent + transforms, rel=1e-6)


def test_rows_are_ranked_and_the_excess_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = _plan(capsys, *arguments)
    peaks = {mode: each["peak_bytes"] for mode, each in found.items()}
    limit = sorted(peaks.values())[3]
    main([*arguments, "--rank-memory", f"{(limit + 0.5) / _GIB:.17f}"])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[0] in _MODES and " x " in line}
    assert set(rows) == set(_MODES)
    fitting = [mode for mode in rows if "+" not in rows[mode]]
    assert sorted(fitting) == sorted(mode for mode, peak in peaks.items() if peak <= limit)
    # The fastest of them is marked, and FlexDeMo only where it is asked for.
    exact = [mode for mode in fitting if mode != "flexdemo"]
    assert exact == sorted(exact, key=lambda mode: found[mode]["step_seconds"]) and " * " in rows[exact[0]]
    flexdemo = _plan(capsys, *arguments, "--modes", "flexdemo", "none")
    assert not flexdemo["flexdemo"]["recommended"] and flexdemo["none"]["recommended"]
    assert _plan(capsys, *arguments, "--modes", "flexdemo", "--flexdemo")["flexdemo"]["recommended"]
    assert _plan(capsys, *arguments, "--modes", "flexdemo")["flexdemo"]["recommended"]
    main([*arguments, "--modes", "none", "none", "--json"])
    assert len(json.loads(capsys.readouterr().out)["modes"]) == 1
    smallest = {mode: each["peak_bytes"] for mode, each in _plan(capsys, *arguments, "--rank-memory", "1e-6").items()}
    least = min(smallest, key=lambda mode: smallest[mode])
    needed, excess = (f"{size / 2**10:.1f} KiB" for size in (smallest[least], smallest[least] - 1e-6 * _GIB))
    match = f"nothing fits into 1e-06 GiB per rank; {least} needs least, {needed} with .*, which is {excess} too much"
    with pytest.raises(SystemExit, match=match):
        main([*arguments, "--rank-memory", "1e-6"])
    main([*arguments, "--machine", "cpu", "--modes", "hsdp", "none", "--ranks", "3"])
    out = capsys.readouterr().out
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 3 / _GIB
    assert f" {share:.2f}".rstrip("0") in out and "hsdp is left out: 3 ranks cannot be divided so\n" in out
    with pytest.raises(SystemExit, match="--ranks goes without --shard-size"):
        main([*arguments, "--shard-size", "2"])


def test_an_excess_below_the_digits_of_the_table_is_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    peak = _plan(capsys, *arguments, "--modes", "flexdemo")["flexdemo"]["peak_bytes"]
    with pytest.raises(
        SystemExit, match=r"flexdemo needs least, 16\.\d MiB with 1 x \d x \d, which is 1 bytes too much"
    ):
        main([*arguments, "--modes", "flexdemo", "--rank-memory", f"{(peak - 1) / _GIB:.17f}"])
    assert re.search(r"^flexdemo +1 x \d x \d +\+<0\.1 .* 16\.\d$", capsys.readouterr().out, re.MULTILINE)


def test_flexdemo_that_alone_fits_is_not_recommended_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--shapes", "llama3-8b", "--machine", "h100", "--ranks", "16", "--rows", "64", "--modes", "none"]
    words += ["flexdemo"]
    match = "only flexdemo fits into 72 GiB per rank, .* Add --flexdemo to have it recommended, or take more ranks"
    with pytest.raises(SystemExit, match=match):
        main(words)
    capsys.readouterr()
    main([*words, "--json"])
    fits = {each["mode"]: each["fits"] for each in json.loads(capsys.readouterr().out.splitlines()[-1])["modes"]}
    assert fits == {"flexdemo": True, "none": False}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--rows", "3", "--schedules", "zb_v"], "--rows, --schedules would be ignored without --ranks or --splits"),
        (["--length", "4096", "--activations", "auto"], "--length, --activations would be ignored"),
        (["--modes", "ddp"], "--modes would be ignored without --ranks; add --ranks N$"),
        (["--microbatches", "2"], "--microbatches would be ignored without --ranks or --splits or --pipeline"),
        (["--stage-costs", "1,1,1,0", "--ranks", "2"], "--stage-costs would be ignored without --pipeline; add"),
        (["--splits", "4", "--modes", "ddp"], "--splits goes without --modes"),
        (["--ranks", "4", "--compute-seconds", "1"], "--ranks goes without --compute-seconds"),
    ],
)
def test_an_option_that_would_be_ignored_is_an_error(words: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        main(["plan", "--shapes", "llama3-8b", *words])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ("--modes", "hsdp", "--ranks", "3"),
            "plan: hsdp is left out: 3 ranks cannot be divided so. Take another number",
        ),
        (("--modes", "pipeline", "--ranks", "7"), "into at most 6 stages. Take another"),
        (("--modes", "ddp", "--rows", "1"), "1 rows are too few for the data ranks of 4. Take a larger --rows"),
    ],
)
def test_where_no_mode_is_left_the_advice_is_of_use(arguments: list[str], words: tuple[str, ...], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        main([*arguments, *words])
