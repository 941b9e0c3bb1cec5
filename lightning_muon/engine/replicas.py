"""Silent corruption: bits of weights and optimizer state that differ between ranks that must have them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import AxisGroup, axis_group, host_group
from lightning_muon.config import join_names
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.math.checksum import checksums
from lightning_muon.params.layout import local_tensor, replicated_axes
from lightning_muon.sharding.base import ShardingMode, names_of
from lightning_muon.sharding.guards import Guard

_Ranks = tuple[DeviceMesh, tuple[int, ...]]  # The ranks that differ from this one only along these axes of the mesh.


class ReplicaCheck(Guard):
    """Compares weights and optimizer state after every ``every``-th step, by checksums of the bits.

    Compared are ranks that hold the same part of a tensor. What no other rank holds is not, nor is arithmetic: a wrong
    result of an owner that all ranks get is no difference.
    """

    def __init__(self, module: nn.Module, mode: ShardingMode, *, every: int) -> None:
        self._module, self._mode, self._every = module, mode, every
        self._num_steps = Counter[torch.optim.Optimizer]()

    @override
    @torch.no_grad()
    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and compare. Collective over all ranks, and all raise."""
        self._num_steps[optimizer] += 1
        num_steps = self._num_steps[optimizer]
        if num_steps % self._every:
            return
        self._mode.finish_parameters()
        everywhere = sorted(set(chain.from_iterable(gather(self._differing_copies(optimizer), None))))
        if everywhere:
            raise RuntimeError(
                f"silent corruption: what several ranks must have alike differs after step {num_steps}: "
                f"{join_names(everywhere, separator='; ')}. Something has changed bits on some ranks only: broken "
                "memory, a broken device, or a program that changes weights on one rank. Load a checkpoint from "
                "before, and leave out the machine if it is named again"
            )

    def _differing_copies(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of what differs on ranks with the same parts. Collective as :meth:`step_has_ended` is."""
        copies: dict[tuple[_Ranks, torch.device], list[tuple[str, Tensor]]] = {}
        # Each node may have weights of its own.
        trains_alone = isinstance(optimizer, FlexDeMo) and isinstance(optimizer.config.replicator, LocalSteps)
        for name, parameter in names_of(self._module).items():
            if not trains_alone:
                place = self._ranks_of_weights(parameter), parameter.device
                copies.setdefault(place, []).append((name, parameter))
            state = {} if self._mode.options.decoupled_nodes else optimizer.state.get(parameter, {})
            if (main := self._mode.layout.local(parameter)).dtype != parameter.dtype:
                state = {**state, "main weight": main}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    place = self._ranks_of_state(parameter), value.device
                    copies.setdefault(place, []).append((f"{key} of {name}", value))
        found: list[str] = []
        for ((mesh, axes), _), named in copies.items():
            if axes:
                group = axis_group(mesh, axes)
                everyone = gather(checksums([local_tensor(tensor) for _, tensor in named]).tolist(), host_group(group))
                for (name, _), values in zip(named, zip(*everyone, strict=True), strict=True):
                    found += _odd_ones(name, values, group)
        return found

    def _ranks_of_weights(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the weights; local."""
        mesh = self._mode.mesh
        if self._mode.options.decoupled_nodes and isinstance(parameter, DTensor):
            return mesh, (0,) if mesh.size(0) > 1 else ()
        if isinstance(parameter, DTensor):
            return parameter.device_mesh, replicated_axes(parameter.device_mesh, parameter.placements)
        return mesh, replicated_axes(mesh, [Replicate()] * mesh.ndim)

    def _ranks_of_state(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the optimizer's state; local."""
        mesh, placements = self._mode.layout.mesh_and_placements(parameter)
        return self._ranks_of_weights(parameter) if mesh is None else (mesh, replicated_axes(mesh, placements))


def _odd_ones(name: str, values: Sequence[int], group: AxisGroup) -> list[str]:
    """Say which ranks have another value than most, if any has; local."""
    counts = Counter(values)
    if len(counts) == 1:
        return []
    assert group.group is not None
    ranks = dist.get_process_group_ranks(group.group)
    (usual, most), (_, next_most) = counts.most_common(2)
    if most == next_most:
        return [f"{name} (between ranks {', '.join(map(str, ranks))})"]
    odd = [str(rank) for rank, value in zip(ranks, values, strict=True) if value != usual]
    return [f"{name} (on rank {', '.join(odd)})"]
