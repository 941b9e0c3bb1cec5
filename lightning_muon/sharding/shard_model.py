"""Shards a whole model with FSDP2: blocks as units, the rest as the root, the same weights on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.comm.groups import axis_group, require_backend
from lightning_muon.sharding.units import WrapPolicy, check_meta, describe_model, dtype_units, find_units, owners
from lightning_muon.sharding.weights import broadcast_initial_state, groups_beside, mesh_device


def shard_model(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    wrap_policy: WrapPolicy = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    forward_methods: Sequence[str] = (),
    shard_root: bool = True,
    decoupled_nodes: bool = False,
) -> None:
    """Shard ``module`` in place over the last axis of ``mesh``, replicated over the first if there are two.

    Collective over ``mesh`` and the axes of tensor parallelism; every rank must call it. The ranks compare their models
    first, so that different models are the same error everywhere. Then the first rank's weights and buffers are
    broadcast. Tensors on the meta device stay there: materialize and fill them afterwards, equally on all ranks.
    Modules that the user sharded are left alone. DTensors of ``parallelize_module`` are sharded further; their mesh and
    ``mesh`` must be cut from meshes that number all ranks alike. FSDP2 takes no 0-d parameters: they stay plain and
    replicated, and :class:`lightning_muon.sharding.fsdp.GradientAgreement` averages their gradients.

    Args:
        module: The model; its parameters are replaced, so create optimizers afterwards.
        mesh: 1-D (shard) or 2-D (replicate, shard), both axes of any size, named if 2-D.
        wrap_policy: See :func:`lightning_muon.sharding.units.find_units`.
        mp_policy: Mixed precision. ``output_dtype`` counts for roots only.
        reshard_after_forward: Free the whole weights of a unit after its forward, or (an ``int``) keep them sharded
            over that many ranks. With ``True`` the root still keeps its own until the backward pass, as FSDP2 does.
        offload_policy: For example ``CPUOffloadPolicy()``.
        forward_methods: Methods of ``module`` beside ``forward`` that are entered from outside, such as
            ``"training_step"``: the root's weights are whole while they run.
        shard_root: ``False`` makes each child a root of its own and leaves ``module`` a plain module. Needed where the
            backward pass runs inside ``training_step`` (manual optimization): FSDP2 reduces the gradients of a root
            only in a backward pass that starts from what its forward returned.
        decoupled_nodes: FSDP2 knows nothing of the replicas: gradients are means over the shard axis only.

    Raises:
        ValueError: If the model cannot be sharded; the message says which parameter and why.
        RuntimeError: If the ranks hold different models.
    """
    inner_mesh = shard_axis(mesh) if decoupled_nodes else mesh
    if isinstance(offload_policy, CPUOffloadPolicy):
        # For gradients that are clipped and momenta that are gathered there.
        require_backend(mesh, torch.device("cpu"), f"the weights of {type(module).__name__} are kept")
    units = _agree_on_units(module, mesh, wrap_policy, shard_root=shard_root, node=inner_mesh)
    _broadcast_to_all(module, mesh, inner_mesh)
    policy = mp_policy or MixedPrecisionPolicy()
    ignored = _prepare_parameters(module, mesh)
    offload = offload_policy or OffloadPolicy()
    shard = partial(fully_shard, mesh=inner_mesh, ignored_params=ignored, offload_policy=offload)
    inner_policy = replace(policy, output_dtype=None)
    outer_units = [module] if shard_root else units
    inner = {id(child) for outer in outer_units for child in outer.modules() if child is not outer}
    for unit in units:
        unit_policy = inner_policy if id(unit) in inner else policy
        shard(unit, reshard_after_forward=reshard_after_forward, mp_policy=unit_policy)
    if shard_root and not isinstance(module, FSDPModule):
        # None, not True: FSDP2 then keeps the root's weights from the end of forward to the start of backward.
        root_reshard = None if reshard_after_forward is True else reshard_after_forward
        shard(module, reshard_after_forward=root_reshard, mp_policy=policy)
    for name in forward_methods:
        register_fsdp_forward_method(module, name)


def shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The shard axis of a (replicate, shard) mesh: the ranks that hold one copy of the weights with this one; local.

    Raises:
        ValueError: If the mesh has other axes.
    """
    if mesh.mesh_dim_names != ("replicate", "shard"):
        raise ValueError(
            "decoupled nodes need a 2-D mesh with the axes ('replicate', 'shard'), also for a single node, got "
            f"{mesh.ndim}-D with {mesh.mesh_dim_names}; make it with init_device_mesh(device_type, (nodes, ranks of a "
            "node), mesh_dim_names=('replicate', 'shard'))"
        )
    return mesh["shard"]


def _broadcast_to_all(module: nn.Module, mesh: DeviceMesh, node: DeviceMesh) -> None:
    """Give all ranks of ``mesh`` the first one's weights and buffers. Collective over it; every rank must call it."""
    broadcast_initial_state(module, mesh)
    # What is sharded inside of a node already does not know of the other nodes.
    if node.ndim < mesh.ndim and any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        broadcast_initial_state(module, mesh["replicate"])


def _refuse_other_meshes(module: nn.Module, node: DeviceMesh) -> None:
    """Raise ``ValueError`` for a parameter that is shared with ranks of other nodes, or divided in another way."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh != node:
            raise ValueError(
                f"{name} is a DTensor on {parameter.device_mesh}, but with decoupled nodes parameters lie on the shard "
                f"axis of a node, {node}; shard it with fully_shard(module, mesh=self.device_mesh['shard']), or do not "
                "shard it yourself"
            )


def _agree_on_units(
    module: nn.Module, mesh: DeviceMesh, wrap_policy: WrapPolicy, *, shard_root: bool, node: DeviceMesh
) -> list[nn.Module]:
    """:func:`plan_units`, after all ranks have found that they plan the same for the same model.

    Collective over ``mesh`` and the axes of tensor parallelism; every rank must call it.
    """
    units: list[nn.Module] = []
    error: Exception | None = None
    try:
        if node is not mesh:
            _refuse_other_meshes(module, node)
        units = plan_units(module, wrap_policy, shard_root=shard_root)
    except Exception as problem:  # A policy is user code: whatever it raises on one rank must stop the others.
        error = problem
    # What goes wrong on the data axes reaches the other tensor-parallel ranks through the groups that follow.
    for axes in (axis_group(mesh, tuple(range(mesh.ndim))), *groups_beside(module, mesh)):
        if axes.group is not None:
            try:
                fail_together(error, axes.group)
                require_equal(describe_model(module, units), axes.group, f"the model {type(module).__name__}")
            except Exception as problem:
                error = error or problem
    if error is not None:
        raise error
    return units


def plan_units(module: nn.Module, wrap_policy: WrapPolicy = "auto", *, shard_root: bool = True) -> list[nn.Module]:
    """Return the modules that :func:`shard_model` shards below the root, inner ones first; checks them, local.

    Raises:
        ValueError: If the model cannot be sharded.
    """
    check_meta(module)
    if isinstance(module, FSDPModule):
        return []
    units = find_units(module, wrap_policy)
    if not shard_root:
        units = _with_children(module, units)
    return [*dtype_units(module, units), *units]


def _with_children(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Add the children of ``module`` that hold parameters to the units, and check that nothing is left over."""
    known = {id(unit) for unit in units}
    children = [
        child
        for child in callable_children(module)
        if id(child) not in known and not isinstance(child, FSDPModule) and next(child.parameters(), None) is not None
    ]
    result = [*units, *children]
    holders = owners(module, result)
    for name, parameter in module.named_parameters():
        inside = holders[id(parameter)]
        if any(holder is module for holder in inside) or len(inside) > 1:
            raise ValueError(
                f"{name} is held by {type(module).__name__} itself or shared by several of its children; with manual "
                "optimization these are sharded one by one, so move it into one child module"
            )
    return result


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and in place of a list or a dict without a forward its entries."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from callable_children(child)
        else:
            yield child


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
