"""Exceptions that callers may want to catch by type."""

from __future__ import annotations


class UnknownOptionError(ValueError):
    """An option that does not exist; the message names the nearest one that does."""


class NonFiniteGradientError(RuntimeError):
    """A gradient has a NaN or an Inf. Weights and optimizer state are unchanged; every rank raises it."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is not as it was written; the message names each bad file. Nothing was loaded, on any rank."""
