"""``lightning-muon plan --ranks``: rows computed by hand, and config files with which trainings start."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_flexdemo import node_traffic
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.engine.options import Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK
from lightning_muon.schedule.shapes import read_shapes
from tests.reference.muon import newton_schulz_flops
from tests.support.browser import BROWSER, PHONE, probe_page
from tests.support.programs import program_environment, run_program
from tests.support.warm_python import warm_python
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
    # What other nodes get comes behind the sums within a node, and behind the whole backward with --bandwidth 1.
    slow = _plan(capsys, *arguments, "--modes", "flexdemo", "--bandwidth", "1", "--flexdemo", "top_k=1")["flexdemo"]
    mesh = Mesh(slow["replicate_size"], slow["shard_size"])
    config = FlexDeMoConfig(base="muon", replicator=DCTTopK(top_k=1))
    sent = node_traffic(read_shapes(arguments[2]).parameters, mesh, config).sent / mesh.shard
    transforms = 2 * 4 * 64 * _NUMEL / _FLOPS
    assert mesh == (4, 1) and slow["step_seconds"] == pytest.approx(_FORWARD + sent + transforms, rel=1e-6)


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


def test_flexdemo_that_alone_fits_is_not_recommended_unasked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", "--shapes", "llama3-8b", "--machine", "h100", "--ranks", "16", "--rows", "64", "--modes", "none"]
    words += ["flexdemo", "--write-config", str(tmp_path / "out.yaml")]
    match = "only flexdemo fits into 72 GiB per rank, .* Add --flexdemo to have it recommended, or take more ranks"
    with pytest.raises(SystemExit, match=match):
        main(words)
    with pytest.raises(SystemExit, match=match):
        main([*words, "--json"])
    fits = {each["mode"]: each["fits"] for each in json.loads(capsys.readouterr().out.splitlines()[-1])["modes"]}
    assert fits == {"flexdemo": True, "none": False} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--write-config", "out.yaml"], "--write-config would be ignored without --ranks or --splits; add --ranks N$"),
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


@pytest.mark.parametrize("mode", _MODES)
def test_a_file_for_accelerate_has_the_sizes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path, mode: str
) -> None:
    pytest.importorskip("accelerate")
    path, words = tmp_path / "out.yaml", ["--flexdemo", "top_k=4"] if mode == "flexdemo" else []
    (planned,) = _plan(capsys, *arguments, "--modes", mode, "--write-config", str(path), *words).values()
    options, stock = Options.from_file(path), yaml.safe_load(path.read_text())
    assert stock["num_processes"] == (1 if mode == "none" else 4)
    assert options.sharding == (mode if mode in ("none", "ddp", "zero2") else "fsdp")
    if "parallelism_config" in stock:
        sizes = stock["parallelism_config"]
        found = [sizes[f"parallelism_config_dp_{axis}_size"] for axis in ("replicate", "shard")]
        assert stock["fsdp_config"]["fsdp_reshard_after_forward"] is not planned["weights_stay_whole"]
    else:
        found = [options.replicate_size, options.shard_size]
    if mode != "none":
        assert (options.pipeline_size, *found) == tuple(
            planned[f"{axis}_size"] for axis in ("pipeline", "replicate", "shard")
        )
    if mode == "flexdemo":
        assert isinstance(options.optimizer, FlexDeMoConfig)
        assert (options.optimizer.base, options.optimizer.replicator.top_k) == ("muon", 4)
    with pytest.raises(SystemExit, match=r"out\.yaml exists and is not overwritten; remove it"):
        main([*arguments, "--modes", mode, "--write-config", str(path), *words])


@pytest.mark.parametrize("mode", ["hsdp", "pipeline"])
def test_a_page_names_matrices_their_owners_and_their_cost(arguments: list[str], tmp_path: Path, mode: str) -> None:
    main([*arguments, "--modes", mode, "none", "--html", str(tmp_path / "plan.html")])
    text = (tmp_path / "plan.html").read_text()
    (chosen,) = re.findall("<tr class=chosen>.*?>(.*?)</td>", text)
    assert chosen == mode and ">none</td>" in text
    steps = [
        title for title in re.findall("<title>(.*?)</title>", text, re.DOTALL) if title.startswith("newton_schulz")
    ]
    named = re.findall(r"^(layers\.\d\.weight) 8 x 8: rank (\d), ([\d.e-]+) GFLOP$", "\n".join(steps), re.MULTILINE)
    matrices = [f"layers.{number}.weight" for number in range(4)]  # The first stage has all of them.
    assert sorted({name for name, _, _ in named}) == matrices and len({rank for _, rank, _ in named}) > 1
    assert {float(cost) for _, _, cost in named} == {newton_schulz_flops(8, 8, 5) / 1e9}
    assert ("stage 1, micro-batch 1" in text) == (mode == "pipeline")
    if BROWSER is not None:
        probe = probe_page(text, tmp_path)
        assert probe["loaded"] == [] and probe["scrolled"] <= probe["width"] == PHONE and probe["smallest"] >= 7
        assert any(matrices[0] in title for title in probe["shown"])


_MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(pl.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 16)

    def training_step(self, tokens, index):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(hidden).square().mean()

    def train_dataloader(self):
        return DataLoader(torch.arange(64).remainder(16).view(16, 4), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)
"""
_CONFIG = """
model: {class_path: trained_net.Net, init_args: {width: 12}}
trainer:
  accelerator: cpu
  devices: 4
  max_steps: 3
  enable_progress_bar: false
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_muon.ParallelMuonStrategy
    init_args: {sharding: zero2, bucket_bytes: 1000, optimizer: {momentum: 0.8}}
"""


@pytest.mark.parametrize("mode", ["fsdp", "flexdemo"])
def test_a_training_starts_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("lightning.pytorch")
    (tmp_path / "trained_net.py").write_text(_MODULE)
    (tmp_path / "own.yaml").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--ranks", "2", "--modes", mode, "pipeline", "--length", "4", "--write-config", "out.yaml"]
    main(["plan", "--config", "own.yaml", *words, *(["--flexdemo"] if mode == "flexdemo" else [])])
    assert "pipeline is left out: Net cannot be cut into stages" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        SystemExit, match=r"plan: Net cannot be cut into stages: it holds embed, layers, head, .*\n    def "
    ):
        main(["plan", "--config", "own.yaml", "--ranks", "2", "--modes", "pipeline", "--length", "4"])
    with pytest.raises(
        SystemExit, match=r"pipeline is left out: Net .* in which order they run; hsdp is left out: 2 ranks"
    ):
        main(["plan", "--config", "own.yaml", "--ranks", "2", "--modes", "pipeline", "hsdp", "--length", "4"])
    written = yaml.safe_load(Path("out.yaml").read_text())["trainer"]
    given = written["strategy"]["init_args"]
    assert (written["devices"], written["num_nodes"], written["max_steps"]) == (2, 1, 3)
    assert not {"sharding", "bucket_bytes"} & set(given) and (given["optimizer"] == {"momentum": 0.8}) == (
        mode == "fsdp"
    )
    text = run_program("-m", "lightning_muon", "fit", "--config", "out.yaml", directory=tmp_path, num_ranks=2)
    assert "`Trainer.fit` stopped: `max_steps=3` reached" in text
    assert f"AdamW -> {'ParallelMuon' if mode == 'fsdp' else 'FlexDeMo'}" in text


_SCRIPT = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 5), nn.Linear(5, 3))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    accelerator.backward(model(torch.arange(7)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
assert type(optimizer.optimizer).__name__ == "ParallelMuon" and accelerator.num_processes == 2
open(f"{accelerator.process_index}.done", "w").close()
"""


@pytest.mark.slow
def test_a_program_of_accelerate_starts_with_the_file(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(_SCRIPT)
    arguments[arguments.index("--ranks") + 1] = "2"
    main([*arguments, "--machine", "cpu", "--modes", "zero2", "--write-config", str(tmp_path / "out.yaml")])
    kept = {key: value for key, value in program_environment().items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    command = [warm_python(), "-m", "lightning_muon", "launch", "--config_file", "out.yaml"]
    options: Any = {"cwd": tmp_path, "env": kept, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--main_process_port", "0", "script.py"], **options, timeout=150.0, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.done")) == ["0.done", "1.done"]
