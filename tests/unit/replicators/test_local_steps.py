"""What nodes that do not exchange momenta have in common."""

from __future__ import annotations

import pytest

from lightning_muon.replicators.diloco import DiLoCo
from lightning_muon.replicators.local_steps import LocalSteps
from lightning_muon.replicators.none import NoReplication


def test_each_says_how_much_it_sends() -> None:
    with pytest.raises(TypeError, match="bits_per_parameter"):
        LocalSteps()
    ways: list[LocalSteps] = [NoReplication(), DiLoCo(period=64)]
    assert [way.bits_per_parameter() for way in ways] == [0, 0.5]
