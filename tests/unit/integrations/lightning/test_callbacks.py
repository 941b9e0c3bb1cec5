"""Refused callbacks; whole runs are in tests/integration/test_callbacks.py."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.callbacks import refuse_callbacks
from tests.integration.training import PACKAGES


@pytest.mark.parametrize("name", PACKAGES)
def test_subclasses_are_refused_and_others_pass(name: Any) -> None:
    callbacks = pytest.importorskip(f"{name}.callbacks")
    package = LightningPackage(name)

    class Own(callbacks.StochasticWeightAveraging):
        pass

    with pytest.raises(ValueError, match=r"Own does not work.*average their 'state_dict' entries"):
        refuse_callbacks([callbacks.Timer(), Own(1e-3)], package)
    refuse_callbacks([callbacks.Timer(), callbacks.EarlyStopping("loss"), callbacks.ModelCheckpoint()], package)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_names_of_the_refused_callbacks_exist(name: Any) -> None:
    from lightning_muon.integrations.lightning.callbacks import _REFUSED

    callbacks = pytest.importorskip(f"{name}.callbacks")
    assert all(isinstance(getattr(callbacks, refused), type) for refused in _REFUSED)
