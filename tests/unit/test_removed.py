"""Names of version 0.1 that are gone are told in one sentence, wherever they were used."""

import ast
from dataclasses import fields

import pytest

import lightning_muon
from lightning_muon.cli.main import main
from lightning_muon.config import MuonConfig
from lightning_muon.engine.options import Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.removed import REMOVED

KINDS = (MuonConfig, FlexDeMoConfig, Options)
LIVING = {field.name for kind in KINDS for field in fields(kind)}
COMMANDS = [name for name in REMOVED if name.startswith("lightning-muon ")]
VALUES = [name for name in REMOVED if "=" in name]
EXPORTED = [name for name in REMOVED if name not in (*COMMANDS, *VALUES) and name != name.lower()]
OPTIONS = [name for name in REMOVED if name not in (*COMMANDS, *VALUES, *EXPORTED)]


def test_what_is_said_to_be_gone_is_gone() -> None:
    assert not LIVING & REMOVED.keys()
    assert not set(lightning_muon.__all__) & REMOVED.keys()
    assert all(text[0].islower() and text[-1] not in "." for text in REMOVED.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_gone(name: str) -> None:
    for kind in KINDS:
        with pytest.raises(TypeError, match=rf"{name} went in version 0\.2: "):
            kind(**{name: True})
    with pytest.raises(ValueError, match=rf"side\.yaml: optimizer .*{name} went in version 0.2: "):
        Options.from_mapping({"optimizer": {name: True}}, source="side.yaml")


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_gone(name: str) -> None:
    key, _, value = name.partition("=")
    takers = [kind for kind in KINDS if key in {field.name for field in fields(kind)}]
    assert takers
    for kind in takers:
        with pytest.raises(ValueError, match=r"went in version 0\.2: "):
            kind(**{key: ast.literal_eval(value)})


@pytest.mark.parametrize("name", EXPORTED)
def test_a_name_that_is_gone(name: str) -> None:
    with pytest.raises(ImportError, match=rf"{name} went in version 0\.2: "):
        exec(f"from lightning_muon import {name}")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_gone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split()[1:])
    assert f"{command} went in version 0.2: " in capsys.readouterr().err
