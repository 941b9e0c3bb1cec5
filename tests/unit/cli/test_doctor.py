"""What `lightning-muon doctor` says of this machine, of wrong versions, and of links that do not work."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_muon.cli import doctor
from lightning_muon.cli import main as command
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, run_program

# As where the package is installed.
_REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def _links(replicate_size: int, broken: bool = False) -> list[tuple[Any, ...]]:
    start = doctor.start_all_to_all

    def broken_start(sent: Any, to: Any, got: Any, source: Any, group: Any) -> Any:
        works = start(sent, to, got, source, group)
        for work in works:
            work.wait()
        got[: group.rank] = 0
        return works

    doctor.start_all_to_all = broken_start if broken else start
    try:
        links = doctor.exchange("cpu", replicate_size)
    finally:
        doctor.start_all_to_all = start
    assert all(milliseconds > 0 for *_, milliseconds, _ in links)
    return [(axis, ranks, is_right) for axis, ranks, _, is_right in links]


def test_each_axis_is_tried_and_wrong_numbers_on_one_rank_are_known_to_all(gloo: ProcessPool) -> None:
    assert gloo.run(_links, 2, world_size=4) == [[("shard", 2, True), ("replicate", 2, True)]] * 4
    assert gloo.run(_links, 1, True, world_size=2) == [[("shard", 2, False)]] * 2


def test_ranks_of_a_launcher_try_an_exchange(tmp_path: Any) -> None:
    text = run_program("-m", "lightning_muon", "doctor", directory=tmp_path, num_ranks=2)
    assert text.count("Nothing is broken.") == 1 and " ".join(text.split()).count("MiB shard 2 ") == 1


def _doctor(*words: str) -> Any:
    try:
        command.main(["doctor", *words])
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("is_installed", [True, False])
def test_packages_devices_and_network_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool
) -> None:
    monkeypatch.setattr(doctor, "requires", mock.Mock(side_effect=None if is_installed else PackageNotFoundError))
    doctor.requires.return_value = _REQUIRED
    assert _doctor() == 0
    text = capsys.readouterr().out
    assert ("to know: lightning-muon is not installed" in text) != is_installed
    assert f"torch {torch.__version__.partition('+')[0]}" in " ".join(text.split())
    assert all(word in text for word in ("cores", "gloo", "interfaces", "no exchange was tried", "Nothing is broken."))


def test_what_is_broken_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = doctor.version
    monkeypatch.setattr(doctor, "requires", lambda _: _REQUIRED)
    monkeypatch.setattr(doctor, "version", lambda name: "2.9.1" if name == "torch" else known(name))
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    assert _doctor() == 1
    text = capsys.readouterr().out
    assert "broken: torch 2.9.1 is installed; this package is tested with <2.15,>=2.11" in text
    assert "broken: the exchange of 3 ranks failed: " in text and "nowhere" in text


def test_one_queue_of_a_card_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: True)
    assert _doctor() == 0
    assert "to know: CUDA_DEVICE_MAX_CONNECTIONS=1 lets all streams" in capsys.readouterr().out
