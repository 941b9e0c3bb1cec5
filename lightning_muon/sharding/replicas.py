"""Makes a model of plain tensors equal on all ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import fail_together, require_equal
from lightning_muon.comm.mesh import axis_group
from lightning_muon.params.uses import parameter_uses
from lightning_muon.sharding.broadcast import broadcast_initial_state
from lightning_muon.sharding.checks import check_meta, describe_model


def replicate_model(module: nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Give all ranks the weights and buffers of the first one, after all have found that they hold the same model.

    Collective over ``mesh``; every rank must call it.

    Args:
        module: Of plain tensors; those that are not contiguous become so.
        mesh: All data-parallel ranks.
        name: Of the mode, for messages.

    Raises:
        ValueError: If a parameter is a DTensor, or on the meta device.
        RuntimeError: If the ranks hold different models.
    """
    everyone = axis_group(mesh, tuple(range(mesh.ndim)))
    error: Exception | None = None
    try:
        check_meta(module)
        _check_plain(module, name)
    except ValueError as problem:
        error = problem
    if everyone.group is not None:
        fail_together(error, everyone.group)
        require_equal(describe_model(module, ()), everyone.group, f"the model {type(module).__name__}")
    elif error is not None:
        raise error
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    broadcast_initial_state(module, mesh)


def _check_plain(module: nn.Module, name: str) -> None:
    for parameter_name, parameter in names_of(module).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{parameter_name} {tuple(parameter.shape)} is a DTensor already, but sharding={name!r} keeps whole "
                "plain weights on every rank; remove fully_shard and parallelize_module from configure_model, or use "
                "sharding='fsdp'"
            )
        if parameter.is_meta:
            raise ValueError(f"{parameter_name} {tuple(parameter.shape)} is on the meta device; materialize it first")


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter by the first of its names, without the parts that wrappers add."""
    return {uses[0].name: uses[0].parameter for uses in parameter_uses(module)}
