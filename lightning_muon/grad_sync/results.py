"""Remembers which gradients are results of a reduction already."""

from __future__ import annotations

import weakref

from torch import Tensor

from lightning_muon.compat.torch import version


class Results:
    """Gradients that were reduced or divided; backward adds to them in place until ``zero_grad`` drops them. Local."""

    def __init__(self) -> None:
        # Weak, so that zero_grad frees the memory.
        self._kept: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}

    def keep(self, parameter: Tensor) -> None:
        """``parameter.grad`` is a result as it is now."""
        assert parameter.grad is not None
        self._kept[parameter] = weakref.ref(parameter.grad), version(parameter.grad)

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, to which backward may have added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is not None and kept[0]() is parameter.grad

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, with nothing added or changed since."""
        return self.holds(parameter) and self._kept[parameter][1] == version(parameter.grad)
