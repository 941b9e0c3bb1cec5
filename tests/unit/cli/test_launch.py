"""One file for Accelerate and for us, and scripts that know of neither of its halves."""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lightning_muon import MuonConfig
from lightning_muon.cli import launch
from lightning_muon.cli.launch import split_config
from lightning_muon.engine.options import Options
from tests.support.programs import ROOT
from tests.unit.refusals.commands import LAUNCHED

_VARIABLE = "LIGHTNING_MUON_CONFIG"


def test_a_file_is_split_for_as_long_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_VARIABLE, raising=False)
    both = tmp_path / "both.yaml"
    both.write_text(LAUNCHED)
    with split_config(str(both)) as rest:
        assert rest is not None
        side = os.environ[_VARIABLE]
        assert Options.from_file(side) == Options(shard_size=2, optimizer=MuonConfig(momentum=0.8))
        content = yaml.safe_load(LAUNCHED)
        del content["lightning_muon"]
        assert yaml.safe_load(Path(rest).read_text()) == content
    assert _VARIABLE not in os.environ
    assert not Path(rest).exists()


def test_the_example_has_every_option_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_VARIABLE, raising=False)
    path = ROOT / "examples" / "accelerate.yaml"
    with split_config(str(path)) as rest:
        stock = load_config_from_file(rest)
        assert (stock.distributed_type.value, stock.num_processes) == ("FSDP", 8)
        assert Options.from_file(os.environ[_VARIABLE]) == Options()
    live = re.sub(r"^  # (?=\w+: )", "  ", path.read_text().partition("lightning_muon:\n")[2], flags=re.MULTILINE)
    written = yaml.safe_load(live)
    assert written.keys() == vars(Options()).keys()
    assert Options.from_mapping(written) == Options()


_SCRIPT = """
import sys
from pathlib import Path
import neighbour
Path(sys.argv[1]).write_text(f"{__name__} {neighbour.VALUE} {sys.argv[2:]}")
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_finds_its_neighbours_and_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    replaced: list[str] = []  # The Accelerator's being replaced would outlast the test.
    monkeypatch.setattr(launch, "replace_accelerator", lambda: replaced.append("accelerate"))
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "scripts"), *sys.path] if is_module else list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    given = Namespace(
        no_python=False,
        module=is_module,
        training_script="train" if is_module else str(folder / "train.py"),
        training_script_args=[str(tmp_path / "out"), "--lr", "1"],
    )
    launch.run_by_us(given)
    assert (given.module, given.training_script) == (True, launch.RUNNER)
    launch.run_script(given.training_script_args)
    assert (tmp_path / "out").read_text() == "__main__ 5 ['--lr', '1']"
    assert replaced == ["accelerate"]
