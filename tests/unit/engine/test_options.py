"""Options, and files that hold them."""

import json
import re
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_muon import DCTTopK, FlexDeMoConfig, MuonConfig, Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 30}, "timeout must be a datetime.timedelta of more than 0 seconds, got 30"),
        ({"timeout": timedelta(-1)}, "timeout must be a .* of more than 0 seconds, got .*days=-1"),
        ({"early_all_gather": "no"}, "early_all_gather must be True or False, got 'no'"),
        ({"optimizer": 3}, "a MuonConfig or a FlexDeMoConfig, got 3"),
        ({"shard_size": 0}, "shard_size must be 'auto' or an integer of at least 1, got 0"),
        ({"process_group_backend": 3}, "process_group_backend must be None or a name such as 'nccl', got 3"),
        *(({"wrap_policy": value}, "wrap_policy must be 'auto', a sequence of") for value in ("Block", [3], Path)),
        ({"optimizer": {"momentun": 0.5}}, r"^optimizer \(MuonConfig\): .*did you mean 'momentum'"),
        ({"sharding": "zero3"}, r"sharding must be one of .*'zero2'.*got 'zero3'"),
        ({"loss_scaling": "sum"}, r"loss_scaling must be one of \('mean', 'tokens'\), got 'sum'"),
        ({"clip_groups": "muon"}, r"clip_groups must be one of \('all', 'elementwise'\), got 'muon'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be 'auto' or an integer of at least 1, got 0"),
        ({"optimizer": FlexDeMoConfig(), "sharding": "zero2"}, "needs sharding='fsdp', got 'zero2'"),
        ({"optimizer": FlexDeMoConfig(), "tensor_parallel_size": 2}, "needs the axes replicate .* without tensor_size"),
        ({"optimizer": FlexDeMoConfig(), "data_parallel_size": 4}, "data_parallel_size; give replicate_size and"),
        ({"sharding": "ddp", "tensor_size": 2}, "tensor_size=2 needs sharding='fsdp', got 'ddp'"),
        ({"sharding": "ddp", "reshard_after_forward": False}, "reshard_after_forward=False means nothing"),
        ({"bucket_bytes": 1000}, r"bucket_bytes=1000 means nothing with sharding='fsdp'; .*\['zero2', 'ddp'\]"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("momentum", r"^Options: there is no option 'momentum'; it belongs in optimizer=MuonConfig\(\.\.\.\)$"),
        ("learning_rate", r"did you mean 'lr'\? It belongs in optimizer=MuonConfig\("),
        ("replicator", r"it belongs in optimizer=FlexDeMoConfig\(\.\.\.\)$"),
    ],
)
def test_a_wrong_keyword_is_told_where_it_belongs_in_python(key: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Options(**{key: 1})


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


# A file of a stranger.
_POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "exit 1", "shell": True}}
_CALLABLE = {"class_path": "sympy.Lambda", "init_args": {"signature": "x", "expr": "exit(1)"}}
_MAPPING = {"class_path": "shelve.DbfilenameShelf", "init_args": {"filename": "made_by_a_stranger"}}


def test_keys_of_a_config_need_no_class_path() -> None:
    assert Options.from_mapping({"optimizer": {"momentum": 0.5}}) == Options(optimizer=MuonConfig(momentum=0.5))
    assert Options.from_mapping({"optimizer": {"lr": 0.5}}).optimizer == MuonConfig(lr=0.5)
    assert Options.from_mapping({"optimizer": {"base": "adamw"}}).optimizer == FlexDeMoConfig(base="adamw")
    config = MuonConfig(lr=0.25)
    assert Options.from_mapping({"optimizer": config}).optimizer is config
    assert Options.from_mapping({"optimizer": "keep"}).optimizer == "keep"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"optimizer": {"base": "sgd", "decy": 0}}, r"FlexDeMoConfig\): .*'decy'; did you mean 'decay'"),
        ({"learning_rate": 1}, "^side.yaml: .*'learning_rate'; did you mean 'lr'. It belongs under optimizer:"),
        ({"replicator": {}}, "^side.yaml: there is no option 'replicator'; it belongs under optimizer:"),
        ({1: 2}, "^side.yaml: there is no option 1; the options are replicate_size, shard_size, .*optimizer, "),
        (
            {"optimizer": {"look_ahead": 2, "base": "adamw"}},
            r"optimizer \(MuonConfig\): there is no option 'base'; it belongs to FlexDeMoConfig",
        ),
        *(
            ({"optimizer": config}, rf"^side.yaml: optimizer{key}: class_path 'subprocess.Popen' names no {names}$")
            for config, key, names in (
                (_POPEN, "", "MuonConfig or FlexDeMoConfig"),
                ({"replicator": _POPEN}, ".*: replicator", "Replicator or LocalSteps"),
                ({"decay": _POPEN}, ".*: decay", "class that this option takes"),
            )
        ),
        ({"optimizer": {"orthogonalize": _CALLABLE}}, "orthogonalize: class_path 'sympy.Lambda' names no class that"),
        ({"optimizer": {"fused": _MAPPING}}, "fused: class_path 'shelve.DbfilenameShelf' names no class that"),
        ({"wrap_policy": _CALLABLE}, "^side.yaml: wrap_policy: .* names no class that"),
        ({"wrap_policy": None}, "^side.yaml: wrap_policy must be 'auto', .* got None"),
        ({"wrap_policy": "os.system"}, "^side.yaml: wrap_policy: 'os.system' is a function of Python itself"),
        ({"optimizer": {"orthogonalize": "subprocess.getoutput"}}, "orthogonalize: 'subprocess.getoutput' is a fun"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.from_mapping(mapping, source="side.yaml")


def test_the_documentation_has_every_option_and_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text()
    rows = [line.split("|") for line in page[: page.index("## Where")].splitlines() if line.startswith("| `")]
    documented = {name: row[2].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    expected = {key: json.dumps(value) for key, value in vars(Options()).items() if key != "timeout"}
    words = {"true": "True", "false": "False", "null": "None", str(25 * 2**20): "25 MiB"}
    expected = {key: words.get(value, value) for key, value in expected.items()} | {"timeout": "30 minutes"}
    assert {name: value.replace("`", "") for name, value in documented.items()} == expected
