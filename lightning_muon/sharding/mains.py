"""Float32 copies of 16-bit weights: what the owner of a weight updates, and what checkpoints have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.compat import foreach
from lightning_muon.compat.hooks import ModuleHook
from lightning_muon.params.layout import Layout, PlacedState, local_tensor
from lightning_muon.sharding.weights import JOINS_STATE_DICTS


def main_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a weight is updated: of 32 bits at least."""
    return torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else weight.dtype


def has_main(weight: Tensor) -> bool:
    """Whether a weight is the rounding of what is updated."""
    return main_dtype(weight) != weight.dtype


class MainWeights:
    """Float32 copies of a module's 16-bit weights, of which each rank has the parts that it updates.

    The weights of the module are their roundings; a copy follows what the program writes there. The copies stay when a
    training ends, so that the module can be saved, and trained again on the same ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._parts: dict[Tensor, Tensor] = {}  # Equal keys on all ranks.
        self._layout, self._own = Layout(), cast(Callable[..., Tensor], local_tensor)
        self._hooks = ExitStack()

    @classmethod
    def of(cls, module: nn.Module, mesh: DeviceMesh) -> MainWeights:
        """Those that an earlier training on these ranks has left, or new ones; local."""
        known = _KNOWN.pop(module, None)
        if known is not None:
            known._hooks.close()
        if known is None or known._mesh != mesh:
            known = cls(mesh)
        _KNOWN[module] = known
        held = set(module.parameters())  # Modules may have been replaced since.
        known._parts = {weight: part for weight, part in known._parts.items() if weight in held}
        for child in (each for each in module.modules() if any(map(has_main, each.parameters(recurse=False)))):
            known._hooks.enter_context(child.register_state_dict_post_hook(ModuleHook(known._save, "nothing")))
            known._hooks.enter_context(child.register_load_state_dict_pre_hook(ModuleHook(known._load, "nothing")))
        return known

    def divide(self, layout: Layout, own: Callable[..., Tensor]) -> None:
        """Let each rank have the parts that ``layout`` says. Collective over the mesh.

        ``own(weight)`` is the calling rank's part, ``own(weight, whole)`` that of a whole tensor of its shape.
        """
        weights = list(filter(has_main, self._parts))
        placed = [PlacedState(*each, tuple(each[0].shape)) for each in zip(weights, self._saved(weights), strict=True)]
        self._layout, self._own = layout, own
        self._parts = dict(zip(weights, map(local_tensor, layout.loaded(placed)), strict=True))
        for weight in weights:
            _sum_gradients_in(weight, main_dtype(weight))

    def part(self, weight: Tensor) -> Tensor | None:
        """What the calling rank updates of a weight that has a copy."""
        return self._parts.get(weight)

    @torch.no_grad()
    def follow(self, weights: Iterable[Tensor]) -> None:
        """Take weights that are no roundings of their copies; those without a copy get one. Local."""
        for weight in filter(has_main, weights):
            if weight in self._parts:
                self._parts[weight].copy_(self._exact(weight))
            else:
                self._parts[weight] = self._exact(weight)
                _sum_gradients_in(weight, main_dtype(weight))

    @torch.no_grad()
    def round(self, weights: Iterable[Tensor]) -> None:
        """Write the rounded parts of the calling rank into these weights; local."""
        if pairs := [(self._own(each), self._parts[each]) for each in weights if each in self._parts]:
            foreach.copy_([own for own, _ in pairs], [part for _, part in pairs])

    def close(self) -> None:
        """End the training; local."""
        for weight in self._parts:
            _sum_gradients_in(weight, weight.dtype)

    def _saved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Main weights as a checkpoint has them. Collective over the mesh."""
        placed: list[PlacedState] = []
        for weight in weights:
            exact, part = self._exact(weight), self._parts.get(weight)
            # The part itself needs no memory.
            exact = part if part is not None and torch.equal(part, exact) else exact
            placed.append(PlacedState(weight, exact, tuple(weight.shape)))
        return self._layout.saved(placed) if placed else []

    def _exact(self, weight: Tensor) -> Tensor:
        """The calling rank's part as it is where the weight is its rounding, elsewhere the weight."""
        own, part = self._own(weight), self._parts.get(weight)
        if part is None:
            return own.to(main_dtype(weight))
        own = own.to(part.device)
        return torch.where(part.to(own.dtype) == own, part, own)

    def _save(self, child: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        held = {prefix + name: each for name, each in child._parameters.items() if each is not None and has_main(each)}
        held = {name: each for name, each in held.items() if name in state and JOINS_STATE_DICTS.get()}
        state.update(zip(held, self._saved(list(held.values())), strict=True))

    @torch.no_grad()
    def _load(self, child: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, weight in child._parameters.items():
            value = state.get(prefix + name)
            if weight is None or not has_main(weight) or not isinstance(value, Tensor) or value.shape != weight.shape:
                continue
            value = state[prefix + name] = value.full_tensor() if isinstance(value, DTensor) else value
            if value.dtype == weight.dtype:
                continue  # The copy will follow the weight.
            if weight in self._parts:
                self._parts[weight].copy_(self._own(weight, value))
            elif not torch.equal(value.to(weight.dtype).to(value.dtype), value):
                self._parts[weight] = self._own(weight, value).to(weight.device, main_dtype(weight), copy=True)


def _sum_gradients_in(weight: Tensor, dtype: torch.dtype) -> None:
    """Let backward sum gradients of micro-batches in ``dtype``: in 16 bits small ones would be lost. Local."""
    gradient, weight.grad = weight.grad, None
    weight.grad_dtype = dtype
    weight.grad = None if gradient is None else gradient.to(dtype)


_KNOWN = WeakKeyDictionary[nn.Module, MainWeights]()
