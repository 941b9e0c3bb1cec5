"""Exceptions that callers may want to catch by type."""

from __future__ import annotations


class NonFiniteGradientError(RuntimeError):
    """A gradient has a NaN or an Inf. Weights and optimizer state are unchanged; every rank raises it."""
