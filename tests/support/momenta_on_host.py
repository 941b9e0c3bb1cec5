"""``offload="momentum"`` on CPU parameters, where it has no effect otherwise: what it copies has the same bits."""

from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def momenta_on_host() -> Generator[None]:
    """Inside, parameters on a CPU count as those of a device."""
    with mock.patch("lightning_muon.optim.momentum.offloads", lambda config, device: config.offload == "momentum"):
        yield
