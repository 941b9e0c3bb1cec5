"""Shards a whole model with FSDP2: blocks as units, the rest as the root, the same weights on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import require_equal, together
from lightning_muon.comm.collectives import AxisGroup, axis_group
from lightning_muon.compat.torch import init_fsdp_root, make_shardable, shards_over_one_rank
from lightning_muon.params.layers import clean_name, parameter_uses
from lightning_muon.sharding.base import ModeOptions, broadcast_initial_state, groups_beside, mesh_device
from lightning_muon.sharding.units import (
    WrapPolicy,
    callable_children,
    dtype_name,
    dtype_units,
    find_units,
    fsdp_modules,
    fsdp_roots,
    own_places,
    owners,
)


def shard_model(module: nn.Module, mesh: DeviceMesh, options: ModeOptions) -> None:
    """Shard ``module`` in place over the last axis of ``mesh``, replicated over the first if there are two.

    Collective over ``mesh`` and the axes of tensor parallelism. The first rank's weights and buffers are broadcast;
    tensors on the meta device stay there. Modules that the user sharded are left alone, DTensors of
    ``parallelize_module`` are sharded further. 0-d parameters, which FSDP2 does not take, stay plain.

    Without ``options.shard_root`` each child is a root: FSDP2 reduces the gradients of a root only in a backward
    pass that starts from what its forward returned, which is not so where backward runs inside
    ``training_step`` (manual optimization). Parameters that belong to no single child then stay plain, too. With
    ``decoupled_nodes`` FSDP2 shards over the last axis only.
    """
    shard_root, decoupled_nodes = options.shard_root, options.decoupled_nodes
    inner_mesh = mesh["shard"] if decoupled_nodes else mesh

    def plan() -> list[nn.Module]:
        for name, parameter in module.named_parameters() if decoupled_nodes else ():
            if isinstance(parameter, DTensor) and parameter.device_mesh != inner_mesh:
                raise ValueError(
                    f"{name} is a DTensor on {parameter.device_mesh}, but with decoupled nodes parameters lie on the "
                    f"shard axis of a node, {inner_mesh}; shard it with fully_shard(module, "
                    "mesh=self.device_mesh['shard']), or do not shard it yourself"
                )
        return plan_units(module, options.wrap_policy, shard_root=shard_root)

    everyone = axis_group(mesh, tuple(range(mesh.ndim)))
    units = agree_on_units(module, plan, [everyone, *groups_beside(module, mesh)])
    broadcast_initial_state(module, mesh)
    if decoupled_nodes and any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        # A DTensor that is sharded inside of a node already has no axis of nodes.
        broadcast_initial_state(module, mesh["replicate"])

    policy, reshard_after_forward = options.mp_policy or MixedPrecisionPolicy(), options.reshard_after_forward
    plain = _prepare_parameters(module, mesh) | (set() if shard_root else _of_no_child(module, units))
    shard = partial(fully_shard, mesh=inner_mesh, ignored_params=plain)
    for each in (*units, module):
        make_shardable(type(each))
    roots = [module] if shard_root else units
    inside = {child for root in roots for child in root.modules() if child is not root}
    for unit in units:
        # Only roots cast their output.
        unit_policy = replace(policy, output_dtype=None) if unit in inside else policy
        shard(unit, reshard_after_forward=reshard_after_forward, mp_policy=unit_policy)
    if shard_root and not isinstance(module, FSDPModule):
        # None, not True: FSDP2 then keeps the root's weights from the end of forward to the start of backward.
        root_reshard = None if reshard_after_forward is True else reshard_after_forward
        shard(module, reshard_after_forward=root_reshard, mp_policy=policy)


def agree_on_units(
    module: nn.Module, plan: Callable[[], list[nn.Module]], groups: Iterable[AxisGroup]
) -> list[nn.Module]:
    """Return what ``plan`` returns, the same on all ranks; raise on all of them if it fails or differs.

    Collective over each of ``groups``.
    """
    what = f"the model {type(module).__name__}"
    return together(plan, groups, lambda units, ranks: require_equal(describe_model(module, units), ranks, what))


def plan_units(module: nn.Module, wrap_policy: WrapPolicy = "auto", *, shard_root: bool = True) -> list[nn.Module]:
    """Return the modules that :func:`shard_model` shards below the root, inner ones first; checks them, local."""
    check_meta(module)
    parameter_uses(module)  # Raises for lazy modules, whose elements cannot be counted.
    if isinstance(module, FSDPModule):
        return []
    units = find_units(module, wrap_policy)
    if not shard_root:
        children = dict.fromkeys(callable_children(module))
        held = Counter(inner for child in children for inner in child.modules())
        # A module that several children hold is called by each, so it cannot be a root; its parameters stay plain.
        units = [unit for unit in units if held[unit] < 2]
        units += [
            child
            for child in children
            if child not in units and held[child] < 2 and not isinstance(child, FSDPModule) and [*child.parameters()]
        ]
        torn = _of_no_child(module, units)
        for name, parameter in module.named_parameters():
            if parameter in torn and parameter.is_meta:
                raise ValueError(
                    f"{name} is on the meta device, and is held by {type(module).__name__} itself or shared by several "
                    "of its children, which are sharded one by one with manual optimization; create it on a real device"
                )
    return [*dtype_units(module, units), *units]


def _of_no_child(module: nn.Module, units: Collection[nn.Module]) -> set[nn.Parameter]:
    """Parameters that lie in none of the ``units``, or in several of them that are not inside of each other."""
    holders = owners(module, units)
    return {p for p in module.parameters() if not isinstance(p, DTensor) and (holders[p][1:] or module in holders[p])}


def _prepare_parameters(module: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Make parameters contiguous, and return those that FSDP2 cannot take, moved to the device."""
    ignored: set[nn.Parameter] = set()
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            continue
        # FSDP2 refuses 0-d parameters, and its reduce-scatter refuses gradients without elements.
        if parameter.ndim == 0 or parameter.numel() == 0:
            ignored.add(parameter)
            if not parameter.is_meta:
                parameter.data = parameter.data.to(mesh_device(mesh))
        elif not parameter.is_contiguous():
            # channels_last convolutions and transposed weights: FSDP2 shards contiguous tensors only.
            parameter.data = parameter.data.contiguous()
    return ignored


def describe_model(module: nn.Module, units: Collection[nn.Module]) -> list[tuple[str, str]]:
    """Return lines that are equal on all ranks if all hold the same model, cut into the same units."""
    lines: list[tuple[str, str]] = []
    for uses in parameter_uses(module):
        parameter = uses[0].parameter
        frozen = "" if parameter.requires_grad else ", frozen"
        ties = "".join(f", tied to {use.name}" for use in uses[1:])
        lines.append((uses[0].name, f"{_describe(parameter)}{frozen}{ties}"))
    lines.extend((clean_name(name), f"buffer {_describe(buffer)}") for name, buffer in module.named_buffers())
    known = set(units)
    lines.extend((clean_name(name), "FSDP2 unit") for name, child in module.named_modules() if child in known)
    return lines


def _describe(tensor: Tensor) -> str:
    kind = ""
    if isinstance(tensor, DTensor):
        kind = f"DTensor {tensor.placements} on {tuple(tensor.device_mesh.shape)} ranks "
    return f"{kind}{tuple(tensor.shape)} {dtype_name(tensor.dtype)}{' on meta' if tensor.is_meta else ''}"


def check_meta(module: nn.Module) -> None:
    """Raise for a module partly on the meta device: materializing it would overwrite the tensors that have values."""
    for name, child in module.named_modules():
        tensors = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        on_meta = [key for key, tensor in tensors if tensor.is_meta]
        others = [key for key, tensor in tensors if not tensor.is_meta]
        if on_meta and others:
            raise ValueError(
                f"{clean_name(name) or type(child).__name__}: {', '.join(on_meta)} on the meta device, but "
                f"{', '.join(others)} not; create all tensors of a module on the same side"
            )


def check_tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` if no layer is divided over the tensor axis; local, alike on all ranks."""
    ranks = set(mesh.mesh.flatten().tolist())
    meshes = {tensor.device_mesh for tensor in module.parameters() if isinstance(tensor, DTensor)}
    if not any(ranks.issubset(each.mesh.flatten().tolist()) for each in meshes):
        raise ValueError(
            f"tensor_size={mesh.size()}, but no layer of {type(module).__name__} is divided over the "
            f"{mesh.size()} tensor ranks, which would all compute the same; call parallelize_module(..., "
            f"self.device_mesh[{mesh.mesh_dim_names[0]!r}], plan) in configure_model, or set tensor_size=1"  # type: ignore[index]
        )


def initialize_roots(module: nn.Module) -> None:
    """Make the outermost FSDP2 modules roots, after their weights are materialized; local.

    Otherwise a block that runs before its root (``generate`` of an inner model) would become one. Units in which every
    parameter is frozen get their dtypes here as well, so that they can be unfrozen later under mixed precision.
    """
    for root in fsdp_roots(module):
        frozen: list[nn.Parameter] = []
        for unit in fsdp_modules(root):  # type: ignore[arg-type]
            own = [getattr(owner, attribute) for owner, attribute in own_places(unit)]
            dtypes = {parameter.dtype for parameter in own}
            if not any(p.requires_grad for p in own) and len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
                frozen += own
        for parameter in frozen:
            parameter.requires_grad_(True)
        init_fsdp_root(root)
        for parameter in frozen:
            parameter.requires_grad_(False)


def set_gradient_divisor(module: nn.Module, divisor: float | None) -> None:
    """Let the reducing backward passes compute (sum of the gradients over all ranks of the mesh) / ``divisor``.

    ``None`` restores the mean over these ranks. Local. The division follows the communication, in the dtype of the
    reduction, because every backend has sums.
    """
    for unit in fsdp_modules(module):
        unit.set_force_sum_reduction_for_comms(divisor is not None)
        factor = divisor
        if shards_over_one_rank(unit):
            # FSDP2 would divide by its factor once before and once after the replicas' sum.
            unit.set_all_reduce_hook(None if divisor is None else lambda reduced: reduced.div_(divisor))  # type: ignore[arg-type]
            factor = None if divisor is None else 1.0
        unit.set_gradient_divide_factor(factor)  # type: ignore[arg-type]
