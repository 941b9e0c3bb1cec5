"""Gives a model memory where it waits on the meta device, one FSDP2 unit after the other, and a precision policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import together
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
    return any(tensor.is_meta for tensor in _all_tensors(module))


def materialize(module: nn.Module, mode: ShardingMode, device: torch.device, warn: Callable[[str], None]) -> None:
    """Give meta tensors memory and initial values, unit by unit where weights are sharded.

    Collective over all ranks.

    Raises:
        ValueError: Nothing initializes a buffer that is in no checkpoint.
    """
    meta, options = MetaTensors(module, device), mode.options
    units: Iterable[nn.Module] = ()
    if mode.shards_weights and has_meta_tensors(module):
        _materialize_user_sharded(module, meta)
        units = options.roots or plan_units(module, options.wrap_policy, shard_root=options.shard_root)
    with _own_random_numbers(module, device):
        for unit in units:
            meta.initialize(unit)
            shard_model(unit, mode.mesh, replace(options, wrap_policy=(), shard_root=True))
        meta.initialize(module)
    together(meta.require_buffers)
    if left := [name for name, _ in meta.left]:
        warn(
            f"{', '.join(left)}: nothing initializes what waited on the meta device here, and it is NaN now; load a "
            "checkpoint, or give its module a reset_parameters(), or create it on a real device"
        )


def _materialize_user_sharded(module: nn.Module, meta: MetaTensors) -> None:
    """Materialize what ``configure_model`` has sharded on the meta device; ``shard_model`` makes replicas equal."""
    if not isinstance(module, FSDPModule):
        for child in module.children():
            _materialize_user_sharded(child, meta)
    elif has_meta_tensors(module):
        with _own_random_numbers(module, meta.device):
            module.to_empty(device=meta.device)
            meta.fill([child for child in module.modules() if _tensors(child)], list(_all_tensors(module)))


class MetaTensors:
    """Gives the tensors of ``root`` that wait on the meta device memory and initial values, module by module; local.

    A module initializes its own by ``reset_parameters()``, after which the ``_init_weights(module)`` of the innermost
    model around it has the last word, as in transformers.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.device, self._root = device, root
        self._replaced: dict[Tensor, Tensor] = {}  # Ties hold from one call to the next.
        self._left: list[tuple[nn.Module, str]] = []  # What nothing has initialized.
        holders = [each for each in root.modules() if _takes_module(each)]
        self._models: dict[nn.Module, Any] = {child: holder for holder in holders for child in holder.modules()}

    def initialize(self, module: nn.Module) -> None:
        """Replace the meta tensors of ``module``."""
        touched: list[nn.Module] = []
        created: list[Tensor] = []
        for child in module.modules():
            without_memory = {name: tensor for name, tensor in _tensors(child).items() if tensor.is_meta}
            for name, tensor in without_memory.items():
                if tensor not in self._replaced:
                    empty = torch.empty_like(tensor, device=self.device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    self._replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    created.append(self._replaced[tensor])
                setattr(child, name, self._replaced[tensor])
            if without_memory:
                touched.append(child)
        self.fill(touched, created)

    def fill(self, modules: Sequence[nn.Module], created: Iterable[Tensor]) -> None:
        """Initialize the tensors of ``modules``, of which ``created`` have no values yet."""
        for tensor in created:
            _fill_with_nan(tensor)
        before = [(module, name, each, each._version) for module in modules for name, each in _tensors(module).items()]
        # The first module that holds a tied weight has the last word, for example the embedding before the head.
        for module in reversed(modules):
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if module in self._models:
                with torch.no_grad():
                    self._models[module]._init_weights(module)
        for module, name, tensor, version in before:
            is_same = _tensors(module).get(name) is tensor and tensor._version == version
            if is_same and not _has_values(tensor):
                self._left.append((module, name))

    @property
    def left(self) -> list[tuple[str, bool]]:
        """Name of each tensor that nothing has initialized, and whether checkpoints have it."""
        names = {child: f"{name}." if name else "" for name, child in self._root.named_modules()}
        return [(f"{names[own]}{name}", name not in own._non_persistent_buffers_set) for own, name in self._left]

    def require_buffers(self) -> None:
        """Raise for a buffer that nothing has initialized and no checkpoint has."""
        if missing := [name for name, is_saved in self.left if not is_saved]:
            raise ValueError(
                f"{', '.join(missing)}: nothing initializes what waited on the meta device here, and a buffer with "
                "persistent=False is in no checkpoint; give its module a reset_parameters() that fills it, or create "
                "the module under torch.device('cpu')"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that ``module`` holds itself, by name; local."""
    return {name: tensor for name, tensor in (module._parameters | module._buffers).items() if tensor is not None}


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor that :func:`_fill_with_nan` was given has other values now; ``False`` if that cannot be seen."""
    local = local_tensor(tensor.detach())
    return tensor.numel() == 0 or (_has_nan(local) and not bool(local.isnan().all()))


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _takes_module(holder: nn.Module) -> bool:
    """Whether ``holder`` has a method ``_init_weights(module)``; local."""
    method = getattr(holder, "_init_weights", None)
    return callable(method) and len(inspect.signature(method).parameters) == 1


@torch.no_grad()
def _fill_with_nan(tensor: Tensor) -> None:
    """Fill with NaN, so that a tensor that nothing initializes is not taken for a weight; local."""
    local = local_tensor(tensor.detach())
    if _has_nan(local):
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
