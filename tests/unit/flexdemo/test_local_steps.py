"""What nodes that do not exchange momenta have in common."""

from __future__ import annotations

import pytest

from lightning_muon.flexdemo.replicator import LocalSteps
from lightning_muon.flexdemo.replicators import DiLoCo, NoReplication


def test_each_says_how_much_it_sends() -> None:
    with pytest.raises(TypeError, match="bits_per_parameter"):
        LocalSteps()
    ways: list[LocalSteps] = [NoReplication(), DiLoCo(period=64)]
    assert [way.bits_per_parameter() for way in ways] == [0, 0.5]
