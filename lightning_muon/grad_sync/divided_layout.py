"""Replicated parameters whose gradients and optimizer state are divided: the layout of ZeRO-2."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_muon.grad_sync.holdings import Holdings
from lightning_muon.grad_sync.reduce_to_holders import ReduceToHolders
from lightning_muon.grad_sync.reducer import GradientReducer
from lightning_muon.grad_sync.return_parameters import ParameterReturn
from lightning_muon.grad_sync.state_layout import to_owners, to_rows
from lightning_muon.params.layout import AxisPlacement, OwnedBy


class DividedLayout:
    """Tells an optimizer to update the calling rank's parts only, and sends them to the other ranks.

    See :class:`~lightning_muon.params.layout.Layout` for the methods.

    Args:
        holdings: Who updates what.
        reducer: Gradients come from here, ...
        gradients: ... through this.
        returns: Sends new values.
    """

    def __init__(
        self, holdings: Holdings, reducer: GradientReducer, gradients: ReduceToHolders, returns: ParameterReturn
    ) -> None:
        self.arrives_late = False
        self._updating: Collection[Tensor] = ()
        self._holdings, self._reducer, self._gradients, self._returns = holdings, reducer, gradients, returns

    def finish_gradients(self) -> None:
        """Every gradient has been sent; see :meth:`GradientReducer.finish`.

        Collective over the mesh; every rank must call it.
        """
        self._reducer.finish()
        self.arrives_late = self._holdings.mesh.size() > 1

    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh, tuple[AxisPlacement, ...]]:
        """As in ``Layout``."""
        return self._holdings.mesh, self._holdings.placements(parameter)

    def local(self, parameter: Tensor) -> Tensor:
        """As in ``Layout``."""
        return self._holdings.local(parameter)

    def has_gradient(self, parameter: Tensor) -> bool:
        """As in ``Layout``; the same on all ranks."""
        return self._reducer.is_present(parameter)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """As in ``Layout``."""
        return self._gradients.reduced(parameter)

    def forget(self, parameters: Collection[Tensor]) -> None:
        """As in ``Layout``."""
        self._reducer.forget(parameters)

    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """As in ``Layout``; waits for what the last step has sent. A step can be given up until its first update."""
        self._updating = parameters
        self._returns.begin(parameters)

    def in_order(self, parameters: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """As in ``Layout``: by buckets."""
        wanted = set(parameters)
        batches = [[p for p in bucket.parameters if p in wanted] for bucket in self._reducer.buckets]
        return [batch for batch in batches if batch]

    def updated(self, parameters: Collection[Tensor]) -> None:
        """As in ``Layout``."""
        self._returns.updated(parameters)

    def end_step(self) -> None:
        """As in ``Layout``; the gradients are used up. Collective over the shard axis; every rank must call it."""
        self._returns.finish_updates()
        self.forget(self._updating)

    def zeros_like(self, parameter: Tensor) -> Tensor:
        """As in ``Layout``: a DTensor where rows are divided, a plain tensor on its owner, empty elsewhere."""
        local = torch.zeros_like(self.local(parameter))
        return self._as_rows(parameter, local) if self._has_rows(parameter) else local

    def saved(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """As in ``Layout``. Collective over the shard axis; every rank must call it."""
        result = [state for _, state in states]
        owned = self._owned(states)
        rows = to_rows([states[index][1] for index in owned], [states[index][0] for index in owned], self._holdings)
        for index, state in zip(owned, rows, strict=True):
            result[index] = state
        return result

    def loaded(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """As in ``Layout``. Collective over the shard axis; every rank must call it."""
        result = [self._part_of_whole(parameter, state) for parameter, state in states]
        owned = [index for index in self._owned(states) if isinstance(result[index], DTensor)]
        parts = to_owners([result[index] for index in owned], [states[index][0] for index in owned], self._holdings)
        for index, state in zip(owned, parts, strict=True):
            result[index] = state
        return result

    def _owned(self, states: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Positions of the states of parameters that lie on one rank as a whole."""
        return [i for i, (p, _) in enumerate(states) if isinstance(self._holdings.placements(p)[-1], OwnedBy)]

    def _has_rows(self, parameter: Tensor) -> bool:
        return isinstance(self._holdings.placements(parameter)[-1], Shard)

    def _part_of_whole(self, parameter: Tensor, state: Tensor) -> Tensor:
        """The calling rank's part where ``state`` is a whole plain tensor."""
        if isinstance(state, DTensor):
            return state
        part = self._holdings.local(parameter, state.contiguous()).clone()
        return self._as_rows(parameter, part) if self._has_rows(parameter) else part

    def _as_rows(self, parameter: Tensor, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self._holdings.mesh,
            self._holdings.placements(parameter),
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
