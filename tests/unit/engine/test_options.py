"""Options, and files that hold them."""

import json
import re
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_muon import DCTTopK, FlexDeMoConfig, MuonConfig, Options
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.pipeline import SCHEDULES
from tests.unit.schedule.pipeline.problems import BUILT_IN, STAGES_PER_RANK

_YAML = """
replicate_size: 2
wrap_policy: [Block]
timeout: "0:00:30"
optimizer:
  class_path: lightning_muon.FlexDeMoConfig
  init_args:
    lr: 1e-3
    muon_lr_factor: 2.5
    betas: [0.5, 0.25]
    fused: {"*.qkv.weight": 3}
    replicator:
      class_path: lightning_muon.DCTTopK
      init_args: {top_k: 4}
"""


def _expected() -> Options:
    replicator = DCTTopK(top_k=4)
    optimizer = FlexDeMoConfig(
        lr=1e-3, muon_lr_factor=2.5, betas=(0.5, 0.25), fused={"*.qkv.weight": 3}, replicator=replicator
    )
    return Options(replicate_size=2, wrap_policy=["Block"], optimizer=optimizer, timeout=timedelta(seconds=30))


def test_a_file_has_the_forms_of_lightning(tmp_path: Path) -> None:
    path = tmp_path / "side.yaml"
    path.write_text(_YAML)
    assert Options.from_file(path) == _expected()
    section = "".join(f"  {line}\n" for line in _YAML.splitlines())
    path.write_text(f"mixed_precision: bf16\nlightning_muon:{section}")
    assert Options.from_file(path) == _expected()
    path.write_text("lightning_muon:\n")
    assert Options.from_file(path) == Options()


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
def test_lightning_reads_the_same_from_the_same_file(tmp_path: Path) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    lines = "".join(f"      {line}\n" for line in _YAML.splitlines() if line)
    (tmp_path / "fit.yaml").write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n"
        f"    class_path: lightning_muon.ParallelMuonStrategy\n    init_args:\n{lines}"
    )
    arguments = ["--config", str(tmp_path / "fit.yaml"), "--model", "lightning.pytorch.demos.BoringModel"]
    made = cli.LightningCLI(args=arguments, run=False, save_config_callback=None)
    theirs, ours = made.trainer.strategy.options, _expected()
    # jsonargparse makes other sequences of some; what they hold is equal.
    assert {key: str(value) for key, value in asdict(theirs).items()} == {k: str(v) for k, v in asdict(ours).items()}


def test_a_bug_in_a_class_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MuonConfig, "__post_init__", lambda _: 1 < "2")
    with pytest.raises(TypeError, match="'<' not supported"):
        Options.from_mapping({"optimizer": {"momentum": 0.5}}, source="side.yaml")


def test_keys_of_a_config_need_no_class_path() -> None:
    assert Options.from_mapping({"optimizer": {"momentum": 0.5}}) == Options(optimizer=MuonConfig(momentum=0.5))
    assert Options.from_mapping({"optimizer": {"lr": 0.5}}).optimizer == MuonConfig(lr=0.5)
    assert Options.from_mapping({"optimizer": {"base": "adamw"}}).optimizer == FlexDeMoConfig(base="adamw")
    config = MuonConfig(lr=0.25)
    assert Options.from_mapping({"optimizer": config}).optimizer is config
    assert Options.from_mapping({"optimizer": "keep"}).optimizer == "keep"


def test_the_documentation_has_every_option_and_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text()
    rows = [line.split("|") for line in page[: page.index("## Where")].splitlines() if line.startswith("| `")]
    documented = {name: row[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    expected = {key: json.dumps(value) for key, value in vars(Options()).items() if key != "timeout"}
    words = {"true": "True", "false": "False", "null": "None", str(25 * 2**20): "25 MiB"}
    expected = {key: words.get(value, value) for key, value in expected.items()} | {"timeout": "30 minutes"}
    assert {name: value.replace("`", "") for name, value in documented.items()} == expected


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_defaults_go_with_every_schedule(name: str, num_ranks: int) -> None:
    options = PipelineOptions(pipeline_schedule=name)
    options.check_pipeline(num_ranks)
    assert options.num_microbatches(num_ranks) == 4 * num_ranks
    assert options.stages_per_rank == {"interleaved_1f1b": 2, "zb_1p": 1}.get(name, STAGES_PER_RANK.get(name))
    assert set(BUILT_IN) <= set(SCHEDULES)
