"""Nothing is sent."""

from __future__ import annotations

from lightning_muon.replicators.local_steps import LocalSteps
from lightning_muon.replicators.none import NoReplication
from lightning_muon.replicators.replicator import Replicator


def test_nothing_travels() -> None:
    assert NoReplication().bits_per_parameter() == 0


def test_it_takes_local_steps_and_has_nothing_to_encode() -> None:
    assert isinstance(NoReplication(), LocalSteps) and not isinstance(NoReplication(), Replicator)
    assert NoReplication() == NoReplication()
