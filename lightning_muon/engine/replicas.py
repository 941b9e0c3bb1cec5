"""Silent corruption: bits that differ between replicas, and arithmetic that differs between ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.groups import AxisGroup, axis_group, host_group
from lightning_muon.flexdemo.node_state import checksums
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.math.methods import NewtonSchulzOptions
from lightning_muon.optim.momentum import StoredMomentum
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.logical import Box, logical_matrices
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.weights import names_of

_Ranks = tuple[DeviceMesh, tuple[int, ...]]  # Those that differ from this one only along some axes of a mesh.


class ReplicaCheck:
    """After every ``every``-th step compares what several ranks must have alike, by sums of the bits.

    Weights, and the state of the optimizer, on the ranks that hold the same part of them. And the result of
    Newton-Schulz for one matrix of the model, drawn anew each time, on all ranks that share its weights.
    """

    def __init__(self, module: nn.Module, mode: ShardingMode, *, every: int) -> None:
        self._module, self._mode, self._every = module, mode, every
        self._num_steps = Counter[torch.optim.Optimizer]()

    @torch.no_grad()
    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and compare. Collective over all ranks; every rank must call it, and all raise."""
        self._num_steps[optimizer] += 1
        num_steps = self._num_steps[optimizer]
        if num_steps % self._every:
            return
        self._mode.finish_parameters()
        found = [*self._differing_copies(optimizer), *self._differing_arithmetic(optimizer)]
        everywhere = sorted(set(chain.from_iterable(gather(found, None))))
        if everywhere:
            more = f" and {len(everywhere) - 5} more" if len(everywhere) > 5 else ""
            raise RuntimeError(
                f"silent corruption: what several ranks must have alike differs after step {num_steps}: "
                f"{'; '.join(everywhere[:5])}{more}. Something has changed bits on some ranks only: broken memory, a "
                "broken device, or a program that changes weights on one rank. Load a checkpoint from before, and "
                "leave out the machine if it is named again"
            )

    def _differing_copies(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """What differs between this rank and those with the same parts. Collective as :meth:`step_has_ended` is."""
        copies: dict[tuple[_Ranks, torch.device], list[tuple[str, Tensor]]] = {}
        trains_alone = _trains_alone(optimizer)
        for name, parameter in names_of(self._module).items():
            if not trains_alone:
                place = self._ranks_of_weights(parameter), parameter.device
                copies.setdefault(place, []).append((name, parameter))
            state = {} if self._mode.options.decoupled_nodes else optimizer.state.get(parameter, {})
            for key, value in state.items():
                for each in value.tensors() if isinstance(value, StoredMomentum) else [value]:
                    if isinstance(each, Tensor) and each.ndim:
                        place = self._ranks_of_state(parameter), each.device
                        copies.setdefault(place, []).append((f"{key} of {name}", each))
        found: list[str] = []
        for ((mesh, axes), _), named in copies.items():
            if axes:
                group = axis_group(mesh, axes)
                everyone = gather(checksums([tensor for _, tensor in named]).tolist(), host_group(group))
                for (name, _), values in zip(named, zip(*everyone, strict=True), strict=True):
                    found += _odd_ones(name, values, group)
        return found

    def _differing_arithmetic(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The ranks on which Newton-Schulz gives other bits. Collective as :meth:`step_has_ended` is."""
        if not isinstance(optimizer, PlannedOptimizer):
            return []
        grouped = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        matrices = [
            (parameter, group, matrix)
            for (parameter, group), route in zip(grouped, optimizer.routes, strict=True)
            for matrix in (logical_matrices(tuple(parameter.shape), route) if route.algorithm != "adamw" else ())
        ]
        if not matrices:
            return []
        parameter, group, matrix = random.Random(self._num_steps[optimizer]).choice(matrices)
        whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        part = whole[matrix.box.slices_in(Box((0,) * whole.ndim, tuple(whole.shape)))]
        arithmetic = optimizer.arithmetic(whole.device)
        choice = NewtonSchulzOptions.of(group).choice(matrix.rows, matrix.cols, arithmetic)
        update = choice.orthogonalize(
            part.reshape(matrix.rows, matrix.cols), eps=group["eps"], is_transposed=matrix.is_transposed
        )
        has_own_mesh = isinstance(parameter, DTensor) and (
            not self._mode.options.decoupled_nodes or _trains_alone(optimizer)
        )
        mesh: DeviceMesh = parameter.device_mesh if has_own_mesh else self._mode.mesh
        ranks = axis_group(mesh, tuple(range(mesh.ndim)))
        # Other kinds of devices may add in another order.
        kind = torch.cuda.get_device_name(whole.device) if whole.is_cuda else torch.backends.cpu.get_cpu_capability()
        everyone = gather((kind, int(checksums([update]))), host_group(ranks))
        of_kind = [value if other == kind else None for other, value in everyone]
        return _odd_ones(f"Newton-Schulz of {matrix.name}", of_kind, ranks)

    def _ranks_of_weights(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the weights; local."""
        mesh = self._mode.mesh
        if self._mode.options.decoupled_nodes and isinstance(parameter, DTensor):
            return mesh, (0,) if mesh.size(0) > 1 else ()
        if isinstance(parameter, DTensor):
            return _replicas(parameter.device_mesh, parameter.placements)
        return _replicas(mesh, [Replicate()] * mesh.ndim)

    def _ranks_of_state(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the optimizer's state; local."""
        mesh, placements = self._mode.layout.mesh_and_placements(parameter)
        return self._ranks_of_weights(parameter) if mesh is None else _replicas(mesh, placements)


def _trains_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each node has weights of its own."""
    return isinstance(optimizer, FlexDeMo) and isinstance(optimizer.config.replicator, LocalSteps)


def _replicas(mesh: DeviceMesh, placements: Sequence[object]) -> _Ranks:
    """The ranks of a mesh with the same part; local."""
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate)]
    return mesh, tuple(axis for axis in axes if mesh.size(axis) > 1)


def _odd_ones(name: str, values: Sequence[Hashable], group: AxisGroup) -> list[str]:
    """Says which ranks have another value than most, if any has; ``None`` does not count. Local."""
    counts = Counter(value for value in values if value is not None)
    if len(counts) < 2:
        return []
    assert group.group is not None
    ranks = dist.get_process_group_ranks(group.group)
    (usual, most), (_, next_most) = counts.most_common(2)
    known = [(rank, value) for rank, value in zip(ranks, values, strict=True) if value is not None]
    if most == next_most:
        return [f"{name} (between ranks {', '.join(str(rank) for rank, _ in known)})"]
    return [f"{name} (on rank {', '.join(str(rank) for rank, value in known if value != usual)})"]
