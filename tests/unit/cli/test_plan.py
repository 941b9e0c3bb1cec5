"""``lightning-muon plan`` and ``trace``, run through the command."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan import WIDTH
from lightning_muon.schedule.shapes import read_shapes


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, by the command or by the parser of its arguments."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    return f"{capsys.readouterr().err} {caught.value}"


def test_the_10b_model_on_8_ranks_hides_its_communication(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, "--shapes", "10b", "--shard-size", "8", "--flops", "150e12", "--bandwidth", "40e9")
    assert len(plan["model"]["matrices"]) == 160
    assert plan["strategies"]["redundant"]["owners"] == "all ranks"
    best = plan["strategies"]["lpt+pipeline"]
    assert sorted(set(best["owners"])) == list(range(8))
    assert best["load"]["max_over_bound"] <= 1.02
    assert best["idle"] <= 0.05
    assert best["hidden"] >= 0.95
    times = {name: strategy["makespan_seconds"] for name, strategy in plan["strategies"].items()}
    assert times["lpt+pipeline"] < times["lpt"] < times["redundant"]
    assert plan["strategies"]["lpt"]["hidden"] == pytest.approx(0, abs=1e-9)


def test_thousands_of_ranks_are_planned_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    plan = _plan(capsys, "--shapes", "deepseek-v3", "--replicate-size", "8", "--shard-size", "512")
    # 10 seconds is what the command promises; twice that leaves room for a slower machine.
    assert time.process_time() - started < 20
    assert plan["mesh"]["ranks"] == 4096
    for strategy in plan["strategies"].values():
        assert strategy["load"]["max_over_bound"] >= 0.999
        assert 0 <= strategy["hidden"] <= 1 and 0 <= strategy["idle"] <= 1


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cost = {"flops_per_second": 1e12, "memory_bytes_per_second": 1e11, "bandwidth": 1e9}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    plan = _plan(
        capsys,
        *("--shapes", "t5-small", "--replicate-size", "2", "--shard-size", "2", "--ns-steps", "4", "--wire-bytes", "4"),
        *("--chunk-bytes", "1000000", "--look-ahead", "4"),
        *("--cost", str(tmp_path / "cost.json"), "--inter-bandwidth", "5e8", "--latency", "1e-3"),
        *("--memory-bandwidth", "2e11", "--fused", "*SelfAttention.q.weight=8", "--fused", "*wi.weight=1024,1024"),
    )
    machine = {
        "flops_per_second": 1e12,
        "memory_bytes_per_second": 2e11,
        "bandwidth": [1e9, 5e8],
        "op_seconds": 0.0,
        "latency_seconds": [1e-3],
    }
    expected = {"ns_steps": 4, "chunk_bytes": 1_000_000, "look_ahead": 4, "wire_itemsize": 4, "cost": machine}
    assert plan["options"].items() >= expected.items() and plan["options"]["machine"].endswith("cost.json")
    assert len(plan["model"]["matrices"]) == 96 + 12 * 7 + 12
    assert "lpt+pipeline, owner grid" in plan["strategies"]
    # Older spellings of the sizes.
    machine = ("--shapes", "t5-small", "--shard", "2", "--replicate", "1", "--machine", "h100")
    cost = _plan(capsys, *machine, "--bandwidth", "1e11", "--latency", "1e-3")["options"]["cost"]
    assert (cost["bandwidth"], cost["latency_seconds"]) == ([1e11, 40e9], [1e-3, 40e-6]), "within a replica"


def test_text_pictures_and_shapes_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "plan.svg", tmp_path / "plan.png"]
    shapes = tmp_path / "shapes.json"
    words = ["--draw", *map(str, pictures), "--write-shapes", str(shapes)]
    main(["plan", "--shapes", "t5-small", "--shard-size", "2", *words])
    assert "T5-small on 1 x 2 = 2 ranks (replicate x shard)" in capsys.readouterr().out
    assert all(picture.stat().st_size > 1000 for picture in pictures)
    assert read_shapes(shapes) == read_shapes("t5-small")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    def text(name: str, replicate: int, shard: int, *words: str) -> str:
        main(["plan", "--shapes", name, "--replicate-size", str(replicate), "--shard-size", str(shard), *words])
        return capsys.readouterr().out

    return text


def test_all_sections_are_there_and_every_line_fits_a_terminal(shown: Any) -> None:
    text, many = shown("10b", 1, 8), shown("t5-base", 2, 128)
    for plan in (text, many, shown("t5-base", 1, 1)):
        for title in ("Parameters", "Owners (lpt+pipeline)", "Bytes on the wire", "Predicted"):
            assert title in plan
        assert max(map(len, plan.splitlines())) <= WIDTH
        assert plan.isascii()
    # Names are whole, and nothing is frozen.
    names = shown("t5-small", 1, 8).partition("Owners")[0]
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight " in names and "frozen" not in names
    assert "https://huggingface.co/tiiuae/Falcon3-10B-Base" in text and "machine reference: 150 TFLOP/s" in text
    assert "that own nothing" not in text
    # The most expensive matrix is 46080 x 3072: 2 * (2 * 46080 * 3072 + 2 * 3072 * 3072) bytes.
    assert "without the working memory of Newton-Schulz, 576 MiB for the most expensive matrix in 16 bits." in text
    assert "MiB per owner on average" in text and " * " not in text.partition("Predicted")[2]


def test_owners_of_many_ranks_are_summarized(shown: Any) -> None:
    few = shown("t5-small", 1, 4).partition("Owners (lpt+pipeline)")[2].splitlines()
    rows = [line.split() for line in few[3:7]]
    assert [row[:2] for row in rows] == [["rank", str(rank)] for rank in range(4)]
    assert sum(int(row[2]) for row in rows) == 96
    many = shown("t5-small", 1, 128)
    assert "busiest rank" in many and "idlest rank" in many
    assert "Ranks that own nothing: divide fused weights (--fused" in many


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Writes a file of ``lightning-muon fit`` with a strategy, and returns the arguments that name it."""
    pytest.importorskip("jsonargparse")
    pytest.importorskip("lightning.pytorch")
    (tmp_path / "planned_module.py").write_text(
        "import lightning.pytorch as pl\nfrom torch import nn\n\n\nclass Net(pl.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(strategy: str, trainer: str = "devices: 6") -> tuple[str, str]:
        text = f"model: planned_module.Net\ntrainer: {{accelerator: cpu, {trainer}, strategy: {strategy}}}\n"
        (tmp_path / "config.yaml").write_text(text if strategy else "model: planned_module.Net\n")
        return "--config", str(tmp_path / "config.yaml")

    return written


def _strategy(options: str) -> str:
    return f"{{class_path: lightning_muon.ParallelMuonStrategy, init_args: {{{options}}}}}"


def test_a_config_file_is_planned_for_its_own_mesh(
    capsys: pytest.CaptureFixture[str], config: Callable[..., tuple[str, str]]
) -> None:
    path = config(_strategy("replicate_size: 2"))
    plan = _plan(capsys, *path)
    assert plan["mesh"] == {"replicate": 2, "shard": 3, "ranks": 6}
    assert plan["model"]["matrices"] == ["layers.0.weight", "layers.1.weight"]
    assert _plan(capsys, *path, "--replicate-size", "1", "--shard-size", "4")["mesh"]["ranks"] == 4
    # Small matrices are not worth sending to the other replica.
    assert (plan["config"]["row"], plan["config"]["num_shared"]) == ("lpt+pipeline", 0)
    assert plan["options"]["wire_itemsize"] == 2
    assert plan["options"]["machine"] == "cpu" and plan["options"]["cost"]["flops_per_second"] < 1e12
    assert _plan(capsys, *path, "--machine", "h100")["options"]["machine"] == "h100"
    main(["plan", *path])
    assert "lpt+pipeline *" in (text := " ".join(capsys.readouterr().out.split()))
    assert "machine cpu: 0.56 TFLOP/s" in text
    assert "dedupe=auto (replicas share 0 of 2 matrices): the row 'lpt+pipeline' (*)." in text
    path = config(_strategy("replicate_size: 2, optimizer: {compute_dtype: float32, overlap: 'off'}"))
    plan = _plan(capsys, *path)
    assert (plan["config"]["row"], plan["options"]["wire_itemsize"]) == ("lpt", 4)
    path = config(_strategy("optimizer: {compute_dtype: float32, wire_dtype: bfloat16, assignment: round_robin}"))
    plan = _plan(capsys, *path)
    assert (plan["config"]["row"], plan["options"]["wire_itemsize"]) == (None, 2)
    assert "does not say how many ranks there are; add --shard-size" in _error(capsys, *config(""))


def test_a_config_file_of_flexdemo_is_planned(
    capsys: pytest.CaptureFixture[str], config: Callable[..., tuple[str, str]]
) -> None:
    replicator = "{class_path: lightning_muon.DCTTopK, init_args: {top_k: 4}}"
    init_args = f"{{base: adamw, replicator: {replicator}}}"
    strategy = _strategy(f"optimizer: {{class_path: lightning_muon.FlexDeMoConfig, init_args: {init_args}}}")
    for text, row in (("flexdemo", "DCTTopK(64, 32)"), (strategy, "DCTTopK(64, 4)")):
        path = config(text, "devices: 1, num_nodes: 2")
        plan = _plan(capsys, *path)
        assert plan["mesh"] == {"replicate": 2, "shard": 1, "ranks": 2}
        assert plan["flexdemo"]["rows"][0]["name"] == row and plan["config"] is None
        # The words change what the file says.
        changed = _plan(capsys, *path, "--flexdemo", "top_k=2")
        assert changed["flexdemo"]["rows"][0]["name"] == "DCTTopK(64, 2)"
    assert plan["strategies"] == {}
    assert {parameter["algorithm"] for parameter in plan["model"]["parameters"]} == {"adamw"}
    main(["plan", *path, "--compute-seconds", "0.5"])
    text = capsys.readouterr().out
    assert "FlexDeMo: what nodes send each other" in text and "Newton-Schulz" not in text


def test_flexdemo_with_muon_shows_newton_schulz_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--shapes", "t5-small", "--replicate-size", "3", "--shard-size", "2", "--flexdemo", "base=muon")
    plan = _plan(capsys, *arguments)
    alone = _plan(capsys, "--shapes", "t5-small", "--replicate-size", "1", "--shard-size", "2")
    assert plan["flexdemo"]["nodes"] == 3 and plan["mesh"]["ranks"] == 6
    assert plan["strategies"] == alone["strategies"] and alone["flexdemo"] is None
    main(["plan", *arguments])
    text = capsys.readouterr().out
    assert text.index("Parameters\n") < text.index("FlexDeMo:") < text.index("Owners")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "lama3-8b"), "no shape file lama3-8b (did you mean 'llama3-8b'?)"),
        (("--shapes", "10b", "--shard-size", "0"), "--shard-size/--shard: must be at least 1, got 0"),
        (("--shapes", "10b", "--shard-size", "512", "--replicate-size", "9"), "4608 ranks are more than 4096"),
        (("--shapes", "10b", "--flops", "inf"), "--flops: must be finite and above 0, got inf"),
        (("--shapes", "10b", "--draw", "plan.txt"), "plan.txt: a picture is a .png, .svg or .pdf"),
        (("--config", "nothing.yaml"), "there is no file nothing.yaml; --config takes one"),
        (("--shapes", "10b", "--flexdemo", "--draw", "plan.png"), "which FlexDeMo has with base=muon only"),
        (("--shapes", "10b", "--cost", "wrong.json"), "wrong.json: CostModel: there is no option 'flops_per_secnd'"),
        (("--shapes", "10b", "--fused", "*qkv*"), "'*qkv*' is not PATTERN=NUMBER"),
    ],
)
def test_a_mistake_is_explained(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"flops_per_secnd": 1}')
    assert message in _error(capsys, *arguments)
