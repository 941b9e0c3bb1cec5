"""The file that the command writes, read back by Accelerate and by us."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_muon import FlexDeMoConfig, MuonConfig, Options
from lightning_muon.cli.main import main
from lightning_muon.engine.options import SECTION
from lightning_muon.engine.parsing import read_yaml

_config_args = pytest.importorskip("accelerate.commands.config.config_args")


def _written(directory: Path, *words: str) -> Path:
    path = directory / "both.yaml"
    main(["config", "--output", str(path), *words])
    return path


def _stock(path: Path) -> Any:
    """What Accelerate reads; raises for a key that it does not know."""
    import yaml

    content = read_yaml(path)
    content.pop(SECTION)
    (path.parent / "stock.yaml").write_text(yaml.safe_dump(content))
    return _config_args.load_config_from_file(str(path.parent / "stock.yaml"))


def test_accelerate_reads_its_part(tmp_path: Path) -> None:
    path = _written(tmp_path, "--replicate-size", "3", "--shard-size", "4", "--num-machines", "3")
    stock = _stock(path)
    assert (stock.distributed_type.value, stock.num_processes, stock.num_machines) == ("FSDP", 12, 3)
    assert stock.mixed_precision == "bf16" and not stock.use_cpu
    assert stock.fsdp_config["fsdp_version"] == 2
    sizes = {"parallelism_config_dp_replicate_size": 3, "parallelism_config_dp_shard_size": 4}
    assert stock.parallelism_config == sizes
    assert Options.from_file(path) == Options()


@pytest.mark.parametrize("optimizer", ["muon", "flexdemo"])
def test_what_stands_there_as_a_comment_is_the_default(tmp_path: Path, optimizer: str) -> None:
    path = _written(tmp_path, "--optimizer", optimizer)
    expected = {"muon": MuonConfig(), "flexdemo": FlexDeMoConfig()}[optimizer]
    assert Options.from_file(path) == (Options() if optimizer == "muon" else Options(optimizer=expected))
    live = re.sub(r"^( *)# (?=[a-z_0-9]+:|  )", r"\1", path.read_text(), flags=re.MULTILINE)
    path.write_text(live)
    written = read_yaml(path)[SECTION]
    assert written.keys() == vars(Options()).keys()
    assert written["optimizer"]["init_args"].keys() == vars(expected).keys()
    options = Options.from_file(path)
    assert options.optimizer == expected
    assert Options.from_mapping({**written, "optimizer": "auto"}) == Options()


@pytest.mark.parametrize(
    ("words", "kind", "options"),
    [
        (("--cpu", "--num-processes", "4"), "MULTI_CPU", {"replicate_size": 1, "shard_size": 4}),
        (("--cpu",), "NO", {}),
        (("--sharding", "zero2", "--num-processes", "2"), "MULTI_GPU", {"sharding": "zero2"}),
        (
            ("--sharding", "zero2", "--replicate-size", "2", "--shard-size", "4"),
            "MULTI_GPU",
            {"sharding": "zero2", "replicate_size": 2, "shard_size": 4},
        ),
        (("--sharding", "none", "--num-processes", "1"), "NO", {"sharding": "none"}),
        # Accelerate refuses FSDP where nothing is divided.
        (("--replicate-size", "2", "--shard-size", "1"), "MULTI_GPU", {"replicate_size": 2, "shard_size": 1}),
        (("--shard-size", "2", "--num-processes", "6"), "FSDP", {}),
        # Accelerate knows no ranks of a pipeline, so the sizes are ours.
        (
            ("--pipeline-size", "2", "--replicate-size", "3", "--shard-size", "1"),
            "FSDP",
            {"pipeline_size": 2, "replicate_size": 3, "shard_size": 1},
        ),
        (("--cpu", "--pipeline-size", "2"), "MULTI_CPU", {"pipeline_size": 2, "replicate_size": 1, "shard_size": 1}),
        (
            ("--sharding", "none", "--pipeline-size", "2", "--num-processes", "2"),
            "MULTI_GPU",
            {"sharding": "none", "pipeline_size": 2},
        ),
    ],
)
def test_our_section_has_the_sizes_without_fsdp(
    tmp_path: Path, words: tuple[str, ...], kind: str, options: dict[str, Any]
) -> None:
    path = _written(tmp_path, *words)
    stock = _stock(path)
    assert stock.distributed_type.value == kind and stock.use_cpu is ("--cpu" in words)
    assert bool(stock.fsdp_config) is (kind == "FSDP")
    assert bool(stock.parallelism_config) is (kind == "FSDP" and "pipeline_size" not in options)
    assert Options.from_file(path) == Options(**options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-machines", "3", "--num-processes", "4"), "4 must be a multiple of --num-machines 3"),
        (("--optimizer", "flexdemo", "--sharding", "ddp"), "needs sharding='fsdp', got 'ddp'"),
        (("--sharding", "none", "--num-processes", "2"), "one process, got 2; add --num-processes 1, or use"),
        (("--shard-size", "3", "--num-processes", "4"), "the number of processes .*--num-processes of a launcher"),
    ],
)
def test_what_cannot_be_is_an_error(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=f"^lightning-muon config: .*{message}"):
        _written(tmp_path, *words)
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path, "--num-processes", "2")
    with pytest.raises(SystemExit, match=r"both\.yaml exists and is not overwritten"):
        _written(tmp_path)
    main(["config", "--num-processes", "2"])
    assert capsys.readouterr().out == path.read_text().replace(str(path), "FILE")
