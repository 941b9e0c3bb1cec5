"""Gives a model memory where it waits on the meta device, one FSDP2 unit after the other, and a precision policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.shard_model import plan_units, shard_model

SUPPORTED = ("32-true", "bf16-true", "bf16-mixed")
# These update running statistics, which stay float32, and take no weights of another dtype.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def of_float16(precision: str) -> str:
    """Text after "is not supported" for a refused precision; empty if it has no float16."""
    return " (float16 needs loss scaling)" if "16" in precision and "bf16" not in precision else ""


def mixed_precision_policy(precision: str, module: nn.Module) -> MixedPrecisionPolicy:
    """The dtypes in which FSDP2 gathers and reduces; ``precision`` is one of :data:`SUPPORTED`.

    With ``bf16-mixed`` the weights travel and compute in bfloat16, gradients are reduced in float32 and the output of
    the root is float32; the framework's autocast stays on, so that losses are computed in float32. A model with batch
    norms gathers float32 weights and leaves bfloat16 to autocast.
    """
    if precision != "bf16-mixed":
        return MixedPrecisionPolicy()
    has_batch_norm = any(isinstance(child, _BATCH_NORMS) for child in module.modules())
    return MixedPrecisionPolicy(
        param_dtype=None if has_batch_norm else torch.bfloat16,
        reduce_dtype=torch.float32,
        # Children that are roots of their own (manual optimization) hand bfloat16 to each other.
        output_dtype=torch.float32 if getattr(module, "automatic_optimization", True) else None,
    )


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def materialize(module: nn.Module, mode: ShardingMode, device: torch.device, warn: Callable[[str], None]) -> None:
    """Give meta tensors memory and initial values, unit by unit where weights are sharded."""
    if not has_meta_tensors(module):
        return
    uninitialized = _materialize_user_sharded(module, device) if mode.shards_weights else set[str]()
    replaced: dict[Tensor, Tensor] = {}
    options = mode.options
    units: Iterable[nn.Module] = ()
    if mode.shards_weights:
        units = options.roots or plan_units(module, options.wrap_policy, shard_root=options.shard_root)
    with _own_random_numbers(module, device):
        for unit in units:
            uninitialized |= initialize_meta(unit, device, replaced)
            shard_model(unit, mode.mesh, replace(options, wrap_policy=(), shard_root=True))
        uninitialized |= initialize_meta(module, device, replaced)
    if uninitialized:
        warn(
            f"{', '.join(sorted(uninitialized))} have no reset_parameters(), so their parameters and buffers that were "
            "on the meta device are NaN now; load a checkpoint, or create these modules on a real device"
        )


def _materialize_user_sharded(module: nn.Module, device: torch.device) -> set[str]:
    """Materialize what ``configure_model`` has sharded on the meta device; ``shard_model`` makes replicas equal."""
    if not isinstance(module, FSDPModule):
        return set().union(*(_materialize_user_sharded(child, device) for child in module.children()))
    if not has_meta_tensors(module):
        return set()
    with _own_random_numbers(module, device):
        module.to_empty(device=device)
        for tensor in chain(module.parameters(), module.buffers()):
            _fill_with_nan(tensor)
        return _initialize(
            child
            for child in module.modules()
            if list(chain(child.parameters(recurse=False), child.buffers(recurse=False)))
        )


def initialize_meta(module: nn.Module, device: torch.device, replaced: dict[Tensor, Tensor]) -> set[str]:
    """Replace meta tensors (``replaced`` carries ties from call to call); return the classes without initial values."""
    touched: list[nn.Module] = []
    for child in module.modules():
        tensors = chain(
            child.named_parameters(recurse=False, remove_duplicate=False),
            child.named_buffers(recurse=False, remove_duplicate=False),
        )
        without_memory = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
        for name, tensor in without_memory:
            if tensor not in replaced:
                empty = torch.empty_like(tensor, device=device)
                _fill_with_nan(empty)
                is_parameter = isinstance(tensor, nn.Parameter)
                replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            setattr(child, name, replaced[tensor])
        if without_memory:
            touched.append(child)
    # The first module that holds a tied weight has the last word, for example the embedding before the head.
    return _initialize(reversed(touched))


def _initialize(modules: Iterable[nn.Module]) -> set[str]:
    """Call ``reset_parameters`` of each; return the classes that have none."""
    uninitialized = set[str]()
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            uninitialized.add(type(module).__name__)
    return uninitialized


@torch.no_grad()
def _fill_with_nan(tensor: Tensor) -> None:
    """Fill with NaN, so that a tensor that nothing initializes is not taken for a weight; local."""
    local = local_tensor(tensor.detach())
    if local.is_floating_point() or local.is_complex():
        local.fill_(float("nan"))


@contextmanager
def _own_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let each rank draw its own numbers if it fills parts of tensors: on a CPU equal seeds would give equal parts."""
    # CUDA's generator draws by the place of a part. What must be equal on several ranks is made so when it is sharded.
    parts = [p for p in module.parameters() if p.is_meta and isinstance(p, DTensor)]
    if not parts or device.type != "cpu":
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed() + torch.distributed.get_rank())
        yield
