"""Names of version 0.1 that are gone are told in one sentence, wherever they were used."""

import ast
import json
import re
from dataclasses import fields
from typing import Any

import pytest

import lightning_muon
from lightning_muon.cli.main import main
from lightning_muon.config import MuonConfig
from lightning_muon.engine.options import Options, build
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.removed import REMOVED

KINDS = (MuonConfig, FlexDeMoConfig, Options)
LIVING = {field.name for kind in KINDS for field in fields(kind)}
COMMANDS = [name for name in REMOVED if name.startswith("lightning-muon ")]
VALUES = [name for name in REMOVED if "=" in name]
OF_CLASSES = [name for name in REMOVED if " of " in name]
EXPORTED = [name for name in REMOVED if name not in (*COMMANDS, *VALUES, *OF_CLASSES) and name != name.lower()]
OPTIONS = [name for name in REMOVED if name not in (*COMMANDS, *VALUES, *OF_CLASSES, *EXPORTED)]
OPTIMIZER = "--trainer.strategy=lightning_muon.ParallelMuonStrategy", "--trainer.strategy.init_args.optimizer"


def _told(name: str) -> str:
    return rf"{re.escape(name)} went in version 0\.2: "


def _class(name: str, **options: Any) -> str:
    return json.dumps({"class_path": f"lightning_muon.{name}", "init_args": options})


def test_what_is_said_to_be_gone_is_gone() -> None:
    assert not LIVING & REMOVED.keys()
    assert not set(lightning_muon.__all__) & REMOVED.keys()
    assert all(text[0].islower() and text[-1] not in "." for text in REMOVED.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_gone(name: str) -> None:
    for kind in KINDS:
        with pytest.raises(TypeError, match=_told(name)):
            kind(**{name: True})
    with pytest.raises(ValueError, match=rf"side\.yaml: optimizer .*{_told(name)}"):
        Options.from_mapping({"optimizer": {name: True}}, source="side.yaml")


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_gone(name: str) -> None:
    key, _, text = name.partition("=")
    value = ast.literal_eval(text.replace("...", "0.9, 1.1"))
    takers = [kind for kind in KINDS if key in {field.name for field in fields(kind)}]
    assert takers
    for kind in takers:
        for each in (value, list(value)) if isinstance(value, tuple) else (value,):
            with pytest.raises(ValueError, match=_told(name)):
                kind(**{key: each})
            with pytest.raises(ValueError, match=rf"side\.yaml: {_told(name)}"):
                build(kind, {key: each}, where="side.yaml")


@pytest.mark.parametrize("name", [*OF_CLASSES, *EXPORTED])
def test_an_option_of_one_class_or_a_name_that_is_gone(name: str) -> None:
    option, _, kind = name.partition(" of ")
    with pytest.raises(TypeError if kind else ImportError, match=_told(name)):
        exec(f"lightning_muon.{kind}({option}=True)" if kind else f"from lightning_muon import {name}")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([*OPTIMIZER, _class("MuonConfig", hyperball=True)], "hyperball"),
        ([*OPTIMIZER, _class("MuonConfig", ns_quality=[0.9, 1.1])], "ns_quality=(...)"),
        ([*OPTIMIZER, _class("FlexDeMoConfig", value_format="int8")], "value_format='int8'"),
        ([*OPTIMIZER, _class("FlexDeMoConfig", overlap="step")], "overlap of FlexDeMoConfig"),
        ([f"--trainer.callbacks=[{_class('MuonMonitor', peak_flops=1.0)}]"], "peak_flops of MuonMonitor"),
        # Both classes are tried for an option: one knows it, and one does not.
        ([OPTIMIZER[0], f"{OPTIMIZER[1]}.init_args.overlap", "backward"], "overlap='backward'"),
        ([OPTIMIZER[0], f"{OPTIMIZER[1]}.init_args.overlap", "sideways"], None),
    ],
)
def test_lightning_cli(words: list[str], name: str | None, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence stands in place of all that jsonargparse says."""
    monkeypatch.setattr("sys.argv", ["lightning-muon", "fit", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    text = capsys.readouterr().err
    assert re.search(rf"^lightning-muon fit: {_told(name)}.*\n$", text) if name else "went in" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_gone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split()[1:])
    assert re.search(rf"^lightning-muon[ a-z]*: {_told(command)}.*\n$", capsys.readouterr().err)
