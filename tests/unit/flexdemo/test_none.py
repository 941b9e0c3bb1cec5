"""Nothing is sent."""

from __future__ import annotations

from lightning_muon.flexdemo.replicator import LocalSteps, Replicator
from lightning_muon.flexdemo.replicators import NoReplication


def test_nothing_travels() -> None:
    assert NoReplication().bits_per_parameter() == 0


def test_it_takes_local_steps_and_has_nothing_to_encode() -> None:
    assert isinstance(NoReplication(), LocalSteps) and not isinstance(NoReplication(), Replicator)
    assert NoReplication() == NoReplication()
