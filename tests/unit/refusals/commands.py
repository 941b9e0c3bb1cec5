"""Files and the command line."""

from __future__ import annotations

import contextlib
import io
import json
from argparse import Namespace
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.launch import launch_command, run_by_us, split_config
from lightning_muon.cli.main import main
from lightning_muon.cli.plan_model import read_config
from lightning_muon.params.shapes import read_shapes
from tests.unit.refusals import Table


class _EndedError(Exception):
    """What the command has said before it ended."""


@contextlib.contextmanager
def _named(*beginnings: str) -> Generator[None]:
    """Context whose errors begin with the name of a file."""
    try:
        yield
    except (ValueError, _EndedError) as error:
        if not str(error).startswith(beginnings):
            raise LookupError(f"no file is named in: {error}") from error
        raise


def _shapes(*entries: Any, text: str = "", **other: Any) -> None:
    Path("m.json").write_text(text or json.dumps({"name": "model", "parameters": entries, **other}))
    with _named("m.json"):
        read_shapes(Path("m.json"))


_WEIGHT = {"name": "a.weight", "shape": [4, 2], "kind": "matrix"}
FILES = {
    "a file of shapes": Table(
        _shapes,
        [
            (({**_WEIGHT, "shap": [1]},), r"no option 'shap'; did you mean 'shape'\?"),
            (({**_WEIGHT, "kind": "matrx"},), r"parameter 'a.weight': kind must be one of .*, got 'matrx'"),
            (({**_WEIGHT, "shape": "4x2"},), "sizes must be an integer of at least 0, got '4'"),
            (({**_WEIGHT, "shape": [4]},), r"\(4,\) is 1-D and cannot be of kind 'matrix'"),
            (({**_WEIGHT, "splits": [1, 2]},), "do not sum to dimension 0"),
            (({**_WEIGHT, "shard_dim": 2},), r"parameter 'a.weight': shard_dim must be one of range\(0, 2\), got 2"),
            (({**_WEIGHT, "frozen": "no"},), "frozen must be True or False, got 'no'"),
            (({"repeat": 2, "parameters": [_WEIGHT]},), "need {i} in their names"),
            (({"repeat": 2},), "there is no key 'parameters'"),
            ((), "parameters is empty"),
            ({"text": "{"}, "Expecting property name"),
            ({"sourc": "x"}, "there is no option 'sourc'; did you mean 'source'"),
        ],
    )
}


def _config_of_plan(text: str) -> None:
    Path("broken.yaml").write_text(text)
    with _named("broken.yaml"):
        read_config(Path("broken.yaml"))


FILES["a config of plan"] = Table(
    _config_of_plan,
    [
        ("model: [unclosed\n  a: b\n", "is no YAML file"),
        ("model: nothing.Here\n", "No module named 'nothing'"),
        ("trainer: {}\n", "model"),
        ("trainer: {devicez: 2}\n", "did you mean 'devices'"),
    ],
)
NET = """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn


class Net(BoringModel):
    configure_optimizers = pl.LightningModule.configure_optimizers

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Sequential(nn.Linear(32, width), nn.Linear(width, width), nn.Linear(width, 2))

    def test_step(self, batch, batch_idx):
        self.log("loss", self.loss(self(batch)), sync_dist=True)
"""
CONFIG = """
model: {class_path: refused_net.Net, init_args: {width: 6}}
data: lightning.pytorch.demos.boring_classes.BoringDataModule
trainer: {accelerator: cpu, devices: 2, max_epochs: 1, enable_progress_bar: false}
"""
STRATEGY = """
trainer:
  strategy:
    class_path: lightning_muon.ParallelMuonStrategy
    init_args:
      replicate_size: 2
      save_distributed_checkpoint: false
      wrap_policy: [Linear]
      optimizer: {lr: 0.02, adamw_patterns: ["layer.0.*"]}
"""
LAUNCHED = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 1
num_processes: 2
main_process_port: 0
lightning_muon:
  shard_size: 2
  optimizer: {momentum: 0.8}
"""


def _command(*words: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(list(words))
        except SystemExit as end:
            raise _EndedError(f"{said.getvalue()}{end.code}") from None


def _fit(*words: str) -> None:
    _command("fit", "--config", "config.yaml", *words, "--print_config")


def _fit_by(text: str) -> None:
    Path("wrong.yaml").write_text(text)
    # Names of options are checked when all files have been read.
    with _named("lightning-muon fit: wrong.yaml: ", "lightning-muon: "):
        _fit("--config=wrong.yaml")


def _launch(old: str, new: str, *words: str) -> None:
    Path("both.yaml").write_text(LAUNCHED.replace(old, new))
    try:
        launch_command(["--config_file", "both.yaml", *words])
    except SystemExit as end:
        raise _EndedError(str(end.code)) from None


def _split() -> None:
    Path("both.yaml").write_text(LAUNCHED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LIGHTNING_MUON_CONFIG", "side.yaml")
        split_config("both.yaml").__enter__()


COMMANDS = {
    "lightning-muon": Table(
        _command,
        [
            ((), "required: COMMAND"),
            (("pln",), r"there is no command 'pln'; did you mean 'plan'\?"),
            (("doctor", "--replicate-size", "0"), "--replicate-size: must be at least 1, got 0"),
            (("launch", "--num_proceses", "2", "script.py"), r"--num_proceses; did you mean --num_processes\?"),
            (("launch", "--cpu", "--num_processes", "2", "missing.py"), r"launch: there is no script missing\.py"),
            (("verify", "nowhere"), "^lightning-muon verify: there is no nowhere"),
            (("plan", "--shaps", "10b"), r"--shaps; did you mean --shapes\?"),
            (("plan", "--shapes", "10b", "--rank-memory", "0"), "--rank-memory: must be finite and above 0, got 0.0"),
            (("plan", "--shapes", "lama3-8b"), r"no shape file lama3-8b \(did you mean 'llama3-8b'\?\)"),
            (("plan", "--shapes", "10b", "--shard-size", "64", "--replicate-size", "9"), "576 ranks are more than 512"),
            (("plan", "--shapes", "10b", "--draw", "plan.txt"), "plan.txt: a picture is a .png, .svg or .pdf"),
            (("plan", "--shapes", "vector.json"), "vector has no matrices that are trained"),
            (("plan", "--config", "nothing.yaml"), "there is no file nothing.yaml; --config takes one"),
            (("plan", "--shapes", "10b", "--cost", "cost.json"), "cost.json: CostModel: .* 'flops_per_secnd'"),
            (("plan", "--shapes", "10b", "--rows", "3", "--length", "9"), "--rows, --length means nothing without"),
            (("plan", "--shapes", "10b", "--ranks", "4", "--shard-size", "2"), "--shard-size goes without --ranks"),
        ],
        _EndedError,
    ),
    "lightning-muon fit": Table(
        _fit,
        [
            ("--trainer.max_epochz=2", r"mean --trainer.max_epochs\?"),
            ("--model.widt=2", "given class_path 'refused_net.Net':\n        Option 'widt' is not accepted\n"),
            (("--trainer.strategy=parallel_muon", "--trainer.strategy.overlap=none"),
             "For options give --trainer.strategy lightning_muon.ParallelMuonStrategy first"),
        ],
        _EndedError,
    ),
    "a file of fit": Table(
        _fit_by,
        [
            ("trainer: {max_stepps: 3}", "Group 'trainer' does not accept option 'max_stepps'"),
            ("trainer: [", "Problems parsing config: "),
            (STRATEGY.replace("0.02", "fast"), "Expected a <class 'float'>. Got value: fast"),
            (STRATEGY.replace("size: 2", "size: x"), r"Expected a typing.Literal\['auto'\]"),
            ("model: {class_path: refused_net.Net, init_args: {widt: 3}}",
             "refused_net.Net: there is no option 'widt'; did you mean"),
            (STRATEGY.replace("wrap_policy", "wrap_polici"), r"'wrap_polici'; did you mean 'wrap_policy'\?"),
            (STRATEGY.replace("wrap_policy", "momentum"), "'momentum'; it is one of MuonConfig"),
        ],
        _EndedError,
    ),
    "lightning-muon launch": Table(
        _launch,
        [
            (("use_cpu", "num_proceses: 2\nuse_cpu", __file__), r"both\.yaml(.|\n)*num_proceses"),
            (("use_cpu", "mixed_precision: bf61\nuse_cpu", __file__), r"both\.yaml(.|\n)*bf61"),
            (("num_processes: 2", "num_processes: two", "script.py"), "num_processes must be a whole number, got .two"),
            (("shard_size: 2", "shard_size: 3", "--num_processes", "4", "script.py"), r"both\.yaml: .*shard_size=3"),
        ],
        _EndedError,
    ),
    "two files with our options": Table(_split, [((), r"LIGHTNING_MUON_CONFIG names side\.yaml")]),
    "a program that is no Python": Table(
        run_by_us, [(Namespace(no_python=True, training_script="a.sh"), r"--no_python starts a\.sh itself")]
    ),
}  # fmt: skip
