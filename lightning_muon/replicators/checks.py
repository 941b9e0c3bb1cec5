"""Checks of the options of replicators."""

from __future__ import annotations


def require_count(options: object, name: str) -> None:
    """Raise unless the option is a whole number of at least 1."""
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(options).__name__}: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{type(options).__name__}: {name} must be at least 1, got {value}")


def require_rate(options: object) -> None:
    """Raise unless ``rate`` is a part of the elements, in (0, 1]."""
    rate = getattr(options, "rate")  # noqa: B009
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f"{type(options).__name__}: rate must be a number, got {rate!r}")
    if not 0 < rate <= 1:
        raise ValueError(
            f"{type(options).__name__}: rate must be in (0, 1], the part of the elements that is sent, got {rate}"
        )


def period(rate: float) -> int:
    """Of how many elements, or turns, one is sent: ``round(1 / rate)``."""
    return max(1, round(1 / rate))
