"""Options, files that hold them, and the sizes of the mesh."""

import json
import re
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_muon import DCTTopK, FlexDeMoConfig, MuonConfig, Options
from lightning_muon.engine.mesh_sizes import MeshSizes
from tests.support.processes import ProcessPool

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


@pytest.mark.parametrize(
    ("sizes", "nodes", "devices", "expected"),
    [
        ({}, 3, 8, (3, 8)),
        ({"replicate_size": 2}, 1, 4, (2, 2)),
        ({"shard_size": 2}, 2, 4, (4, 2)),
        ({"context_size": 2, "tensor_size": 2}, 3, 8, (3, 2)),
        ({"tensor_size": 3}, 3, 4, (1, 4)),
        ({"shard_size": 2, "context_size": 2}, 1, 12, (3, 2)),
        # Stages on different nodes, replicas between those that are left.
        ({"pipeline_size": 2}, 1, 8, (1, 4)),
        ({"pipeline_size": 2}, 2, 4, (1, 4)),
        ({"pipeline_size": 2}, 4, 4, (2, 4)),
        ({"pipeline_size": 2}, 3, 4, (1, 6)),
        ({"pipeline_size": 2, "replicate_size": 2}, 1, 8, (2, 2)),
        ({"pipeline_size": 2, "shard_size": 1, "replicate_size": 4}, 1, 8, (4, 1)),
    ],
)
def test_what_is_not_given_follows(sizes: Any, nodes: int, devices: int, expected: Any) -> None:
    assert MeshSizes(**sizes).resolve(num_nodes=nodes, num_processes=devices) == expected


def _timeouts(**sizes: int) -> set[timedelta]:
    meshes = MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=4)
    groups: Any = [dist.group.WORLD, *meshes.user.get_all_groups()]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_all_axes_have_the_timeout_of_the_run(gloo: ProcessPool) -> None:
    found = gloo.run(_timeouts, timeout=100.0, context_size=2, tensor_size=2)
    assert found == [{timedelta(seconds=75)}] * 4
