"""Parameters whose gradients are averaged inside of a node only: their state, and weights that all nodes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.comm.agreement import fail_together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.params.layout import AxisPlacement, Decoupled, Layout, local_tensor
from lightning_muon.sharding.weights import mesh_device

AXES = ("replicate", "shard")
# What another number of nodes gets of what each saved node had, see `shared_among`.
Rule = Literal["sum", "mean"]
_NOT_SHARDED = (
    ". FSDP2 does not average the gradients of parameters that it does not shard (0-d ones, ignored_params): do it "
    "before step(), over the ranks of each node"
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NodeLayout(Layout):
    """DTensors on ``mesh["shard"]`` and plain tensors, seen on the whole mesh: each node has its own gradients."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self._nodes = mesh
        # The parameters in the order in which their updates arrive, those together that arrive together.
        self.arrival_order: Sequence[Sequence[Tensor]] = ()

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh, tuple[AxisPlacement, ...]]:
        return self._nodes, (Decoupled(), *self._inside(parameter))

    @override
    def in_order(self, parameters: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        wanted = set(parameters)
        groups = [[tensor for tensor in group if tensor in wanted] for group in self.arrival_order]
        known = {tensor for group in groups for tensor in group}
        return [group for group in (*groups, [tensor for tensor in parameters if tensor not in known]) if group]

    def of_all_nodes(self, parameter: Tensor, local: Tensor) -> DTensor:
        """A tensor of each node, laid out like ``parameter``, as one DTensor (R, *parameter.shape).

        ``local`` is the calling rank's part of that of its node; shares memory.
        """
        inside = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in self._inside(parameter)]
        shape = torch.Size((self._nodes.size(0), *parameter.shape))
        return DTensor.from_local(
            local.unsqueeze(0),
            self._nodes,
            (Shard(0), *inside),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _inside(self, parameter: Tensor) -> tuple[Placement, ...]:
        """Placement along the ranks of a node."""
        if not isinstance(parameter, DTensor):
            # FSDP2 takes no 0-d parameters; their gradients are averaged by whoever trains the model.
            if parameter.ndim and parameter.requires_grad and self._nodes.size(1) > 1:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not sharded, but a node has "
                    f"{self._nodes.size(1)} ranks, which would train it apart from each other; call "
                    "fully_shard(module, mesh=mesh['shard']) on the whole module, after its parts"
                )
            return (Replicate(),)
        if parameter.device_mesh != self._nodes["shard"]:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} lies on {parameter.device_mesh}, but FlexDeMo averages "
                f"between the nodes of {self._nodes} itself; shard the model inside of a node only: "
                "fully_shard(module, mesh=mesh['shard'])"
            )
        return tuple(parameter.placements)


def require_node_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh; raises unless its axes are those of FlexDeMo."""
    if mesh.mesh_dim_names != AXES:
        raise ValueError(
            f"FlexDeMo takes a mesh with the axes {AXES} (nodes, ranks of a node), got {mesh.mesh_dim_names}; for "
            f"example init_device_mesh(device_type, (num_nodes, ranks_per_node), mesh_dim_names={AXES})"
        )
    return mesh


def local_of_nodes(value: Tensor, parameter: Tensor, layout: NodeLayout | None, *, rule: Rule) -> Tensor:
    """The calling rank's part of a saved ``value`` (R, *parameter.shape), float32, for the nodes that there are now.

    The same number of nodes takes over what each had; see :func:`shared_among` for another number. Collective over the
    mesh for a DTensor; every rank must call it.
    """
    local = local_tensor(parameter)
    if value.shape[1:] != parameter.shape:
        raise ValueError(
            f"what was saved of each node for a parameter of shape {tuple(parameter.shape)} has the shape "
            f"{tuple(value.shape)}; expected (number of nodes, *shape)"
        )
    if layout is None:
        num_nodes = 1
        own = (value.full_tensor() if isinstance(value, DTensor) else value).to(local.device)
    else:
        target = layout.of_all_nodes(parameter, torch.empty(local.shape, device=local.device))
        num_nodes = target.shape[0]
        axis = target.placements[0] if value.shape[0] == num_nodes else Replicate()
        own = _redistributed(value, target.device_mesh, (axis, *target.placements[1:]))
    if value.shape[0] == num_nodes:
        return own[0].float().clone()
    return shared_among(own.float(), num_nodes, rule)[0]


def shared_among(saved: Tensor, num_nodes: int, rule: Rule) -> Tensor:
    """(saved nodes, *shape) -> (num_nodes, *shape), the same for all of these nodes, in the dtype of ``saved``.

    ``"sum"`` is the sum over the saved nodes, divided by the number of nodes now: the sum over the nodes stays what it
    was. ``"mean"`` is the mean over the saved nodes.
    """
    share = saved.float().sum(0, keepdim=True) / (num_nodes if rule == "sum" else saved.shape[0])
    return share.to(saved.dtype).expand(num_nodes, *share.shape[1:]).contiguous()


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    """The calling rank's part of a saved ``value`` of the parameter's shape: whole, or laid out like the parameter.

    Collective over the mesh of the parameter for a DTensor; every rank must call it.
    """
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    return _redistributed(value, parameter.device_mesh, parameter.placements)


def _redistributed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The local part of a DTensor, or of a whole tensor that every rank has, with other placements."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value.to(mesh_device(mesh)), mesh, (Replicate(),) * mesh.ndim, run_check=False)
    return value.redistribute(mesh, placements).to_local()


def check_equal(tensors: Sequence[tuple[str, Tensor]], *, nodes: AxisGroup, everyone: AxisGroup) -> None:
    """Raise on all ranks if a tensor has other bits on one node, or a plain one on any rank, than on the first.

    Collective over ``everyone``; every rank must call it.

    Args:
        tensors: By name, in the same order on all ranks.
        nodes: The ranks that hold the same shards; for tensors in the memory of the host.
        everyone: All ranks of all nodes; likewise.
    """
    sharded = [(name, tensor) for name, tensor in tensors if isinstance(tensor, DTensor)]
    plain = [(name, tensor) for name, tensor in tensors if not isinstance(tensor, DTensor)]
    drifted = [f"{name} (node {ranks})" for name, ranks in _differing(sharded, nodes)]
    not_sharded = [f"{name} (rank {ranks} of all nodes)" for name, ranks in _differing(plain, everyone)]
    drifted += not_sharded
    error: RuntimeError | None = None
    if drifted:
        error = RuntimeError(
            f"{len(drifted)} parameters are not what they are on node 0: {', '.join(drifted[:5])}. The nodes have "
            "begun with different weights, or their learning rates differ (a scheduler that follows the loss of one "
            "rank), or something has changed weights on some of them only, such as a callback that runs on rank 0; let "
            "it be the same on all ranks, and load the last checkpoint" + (_NOT_SHARDED if not_sharded else "")
        )
    fail_together(error, everyone.group)


def _differing(tensors: Sequence[tuple[str, Tensor]], ranks: AxisGroup) -> list[tuple[str, str]]:
    """Names of the tensors that differ from those of the first rank, and where.

    Collective over ``ranks``; every rank must call it.
    """
    if ranks.group is None or not tensors:
        return []
    mine = checksums([tensor for _, tensor in tensors]).cpu()
    of_ranks = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(of_ranks, mine, group=ranks.group)
    found = [
        (name, [rank for rank, sums in enumerate(of_ranks) if sums[index] != of_ranks[0][index]])
        for index, (name, _) in enumerate(tensors)
    ]
    return [(name, ", ".join(map(str, where))) for name, where in found if where]


def checksums(parameters: Sequence[Tensor]) -> Tensor:
    """Sum of the bits of each local shard, read as integers, times odd numbers: (num_parameters,) int64."""
    sums: list[Tensor] = []
    for parameter in parameters:
        local = local_tensor(parameter).detach().reshape(-1)
        bits = local.view(_INTEGERS[local.element_size()]).to(torch.int64, copy=True)
        # A factor for each place, so that elements that have changed places show.
        sums.append(bits.mul_(torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)).sum())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")
