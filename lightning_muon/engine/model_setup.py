"""Prepares a model: memory where it waits on the meta device, a precision policy, weights for methods beside forward.

FSDP2 gathers them for ``forward`` alone: the steps of a Trainer, ``generate`` and calls of children need them, too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_muon.comm.agreement import together
from lightning_muon.compat.torch import ModuleHook
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.shard_model import plan_units, shard_model
from lightning_muon.sharding.units import callable_children, own_places, tensors_in, without_views

SUPPORTED = ("32-true", "bf16-true", "bf16-mixed")
# These update running statistics, which stay float32, and take no weights of another dtype.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_precision(precision: str, said: str, known: Sequence[str] = SUPPORTED) -> None:
    """Raise ``ValueError`` unless ``precision``, which the user has ``said``, is one of the ``known`` ones; local."""
    if precision not in known:
        reason = " (float16 needs loss scaling)" if "16" in said and "bf16" not in said else ""
        raise ValueError(f"{said} is not supported{reason}; use one of {tuple(known)}")


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
    with _own_random_numbers(module, device):  # What is around the units may initialize parts of them again.
        meta.initialize(module)
    together(meta.require_saved)
    if left := [name for name, _ in meta.left]:
        warn(
            f"{', '.join(left)}: nothing initializes what waited on the meta device here, and it is NaN now (integers: "
            "the smallest, booleans: False); load a checkpoint, or give its module a reset_parameters(), or create it "
            "on a real device"
        )


def _materialize_user_sharded(module: nn.Module, meta: MetaTensors) -> None:
    """Materialize what ``configure_model`` has sharded on the meta device; ``shard_model`` makes replicas equal."""
    if not isinstance(module, FSDPModule):
        for child in module.children():
            _materialize_user_sharded(child, meta)
    elif has_meta_tensors(module):
        with _own_random_numbers(module, meta.device):
            module.to_empty(device=meta.device)
            meta.fill(module, list(_all_tensors(module)))


class MetaTensors:
    """Gives the tensors of ``root`` that wait on the meta device memory and initial values, module by module; local.

    A module initializes itself by ``reset_parameters()``, after which the ``_init_weights(module)`` of the innermost
    model around it has the last word, as in transformers. Children come before the modules around them, which may
    initialize them again.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.device, self._root = device, root
        self._replaced: dict[Tensor, Tensor] = {}  # Ties hold from one call to the next.
        self._left: list[tuple[nn.Module, str]] = []  # What nothing has initialized.
        holders = [each for each in root.modules() if _takes_module(each)]
        self._models: dict[nn.Module, Any] = {child: holder for holder in holders for child in holder.modules()}
        # A module around tensors that have values does not touch them, unless it has meta tensors of its own.
        self._waiting = {
            child
            for child in root.modules()
            if any(each.is_meta for each in _tensors(child).values())
            or (has_meta_tensors(child) and all(each.is_meta for each in _all_tensors(child)))
        }

    def initialize(self, module: nn.Module) -> None:
        """Replace the meta tensors of ``module``."""
        created: list[Tensor] = []
        for child in module.modules():
            places: Any = (child._parameters, child._buffers, vars(child))
            for tensors in places if child in self._waiting else ():
                for name, tensor in tensors.items():
                    if not isinstance(tensor, Tensor) or not tensor.is_meta:
                        continue
                    if tensor not in self._replaced:
                        empty = torch.empty_like(tensor, device=self.device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        self._replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                        created.append(self._replaced[tensor])
                    tensors[name] = self._replaced[tensor]
        self.fill(module, created)

    def fill(self, root: nn.Module, created: Iterable[Tensor]) -> None:
        """Initialize the modules in ``root`` that wait for it; ``created`` are tensors without values."""
        for tensor in created:
            _fill_unset(tensor)
        modules = [child for child in root.modules() if child in self._waiting]
        self._waiting.difference_update(modules)
        places = [*self._left, *((module, name) for module in modules for name in _tensors(module))]
        before = [(tensor, tensor._version) for module, name in places for tensor in [_tensors(module)[name]]]
        # The first module that holds a tied weight has the last word, for example the embedding before the head.
        for module in reversed(modules):
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if module in self._models:
                with torch.no_grad():
                    self._models[module]._init_weights(module)
        self._left = [
            (module, name)
            for (module, name), (tensor, version) in zip(places, before, strict=True)
            if _tensors(module).get(name) is tensor and tensor._version == version and not _has_values(tensor)
        ]

    @property
    def left(self) -> list[tuple[str, bool]]:
        """Name of each tensor that nothing has initialized, and whether checkpoints have it."""
        names = {child: f"{name}." if name else "" for name, child in self._root.named_modules()}
        return [
            (f"{names[own]}{name}", name not in own._non_persistent_buffers_set and name not in vars(own))
            for own, name in self._left
        ]

    def require_saved(self) -> None:
        """Raise for a tensor that nothing has initialized and no checkpoint has."""
        if missing := [name for name, is_saved in self.left if not is_saved]:
            raise ValueError(
                f"{', '.join(missing)}: nothing initializes what waited on the meta device here, and an attribute or a "
                "buffer with persistent=False is in no checkpoint; give its module a reset_parameters() that fills "
                "it, or create the module under torch.device('cpu')"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, buffers and other tensors that ``module`` holds itself, by name; local."""
    held = module._parameters | module._buffers | vars(module)
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _unset_value(dtype: torch.dtype) -> float:
    """What a tensor holds that nothing has initialized: what cannot be taken for a weight or for an index."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has other values than :func:`_fill_unset` gave it; ``False`` if that cannot be seen."""
    local = local_tensor(tensor.detach())
    unset = _unset_value(local.dtype)
    return local.numel() == 0 or not bool((local.isnan() if unset != unset else local == unset).all())


@torch.no_grad()
def _fill_unset(tensor: Tensor) -> None:
    """Fill a tensor so that it is not taken for initialized; local."""
    local = local_tensor(tensor.detach())
    local.fill_(_unset_value(local.dtype))


def _takes_module(holder: nn.Module) -> bool:
    """Whether ``holder`` has a method ``_init_weights(module)``; local."""
    method = getattr(holder, "_init_weights", None)
    return callable(method) and len(inspect.signature(method).parameters) == 1


@contextmanager
def _own_random_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let each rank draw its own numbers if it fills parts of tensors: on a CPU equal seeds would give equal parts."""
    # CUDA's generator draws by the place of a part. What must be equal on several ranks is made so when it is sharded.
    if device.type != "cpu" or not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + torch.distributed.get_rank())
        yield


STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def follow_calls(
    module: nn.Module, around_forward: Callable[[], AbstractContextManager[None]], begins: Callable[[Tensor], None]
) -> list[RemovableHandle]:
    """Hook calls of a module: ``around_forward`` is entered before them, ``begins`` called when a backward begins."""

    def before(*_: Any) -> None:
        with around_forward():
            pass

    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        # Nothing announces loss.backward().
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, begins, mode="any")

    hooks = ModuleHook(before), ModuleHook(after, "call")
    return [module.register_forward_pre_hook(hooks[0]), module.register_forward_hook(hooks[1])]


def register_steps(module: nn.Module) -> None:
    """Make the steps of a sharded LightningModule, and ``generate`` of sharded models in it, entries of FSDP2, once."""
    for name in STEPS if isinstance(module, FSDPModule) else ():
        if callable(getattr(module, name, None)) and _mark_prepared(module, name):
            _register_packed(module, name)
    for child in module.modules():
        has_generate = isinstance(child, FSDPModule) and callable(getattr(child, "generate", None))
        if has_generate and _mark_prepared(child, "entry generate"):
            register_fsdp_forward_method(child, "generate")


def _register_packed(module: nn.Module, name: str) -> None:
    method: Callable[..., Any] = getattr(module, name)
    # `without_views` is for FSDP2, which hooks the outputs as those of a forward.
    setattr(module, name, MethodType(lambda _, call: without_views(call(), call.args), module))
    register_fsdp_forward_method(module, name)
    entry: Callable[..., Any] = getattr(module, name)

    # Lightning looks through __wrapped__ for the signature, and for whether the user overrode the method.
    @wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        # FSDP2 casts each floating-point tensor that enters a forward to the dtype of the parameters. For a step that
        # would round regression targets to bfloat16; inputs of layers are cast where they are used.
        return entry(partial(method, *args, **kwargs))

    setattr(module, name, step)


def refuse_parts_of_weights(module: nn.Module) -> None:
    """Let ``save_pretrained`` of models in ``module`` raise without whole weights, of which this rank has parts."""
    for child in module.modules():
        save: Any = getattr(child, "save_pretrained", None)
        if callable(save) and _mark_prepared(child, "save_pretrained"):
            child.save_pretrained = _with_whole_weights(save)  # type: ignore[assignment]


def _with_whole_weights(save: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(save)
    def save_whole(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise ValueError(
                "save_pretrained would write the part of the weights that this rank has; on every rank call state = "
                "lightning_muon.full_state_dict(model), then on rank 0 model.save_pretrained(folder, state_dict=state)"
            )
        return save(*args, **kwargs)

    return save_whole


def unshard_on_call(module: nn.Module) -> None:
    """Gather the root while a child, or ``generate`` in it, runs outside of a step; all ranks must make such calls."""
    places = own_places(module) if isinstance(module, FSDPModule) else []
    if not places:
        return  # The root has no weights of its own, so each child gathers its own.
    gather = _Gather(module, places[0])
    for child in callable_children(module):
        if not isinstance(child, FSDPModule) and not hasattr(child, "_orig_mod") and _mark_prepared(child, "forward"):
            child.register_forward_pre_hook(gather.before)
            child.register_forward_hook(gather.after, always_call=True)
    for child in module.modules():
        generate = getattr(child, "generate", None)
        is_inner = child is not module and not isinstance(child, FSDPModule)
        if is_inner and callable(generate) and _mark_prepared(child, "generate"):
            child.generate = gather.around(generate)  # type: ignore[assignment]


class _Gather:
    """Hooks by which the outermost of nested calls gathers the root, and frees what it has gathered."""

    def __init__(self, root: nn.Module, place: tuple[nn.Module, str]) -> None:
        self._root = weakref.ref(root)
        self._owner, self._attribute = weakref.ref(place[0]), place[1]
        self._have_gathered: list[bool] = []  # Whether each running call has gathered.

    def before(self, *_: Any) -> None:
        root: Any = self._root()
        gathers = isinstance(getattr(self._owner(), self._attribute, None), DTensor)
        self._have_gathered.append(gathers)
        if root is not None and gathers:
            root.unshard()

    def after(self, *_: Any) -> None:
        root: Any = self._root()
        if self._have_gathered.pop() and root is not None:
            root.reshard()

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            self.before()
            try:
                return method(*args, **kwargs)
            finally:
                self.after()

        return gathered


def _mark_prepared(module: nn.Module, what: str) -> bool:
    """Mark ``module`` as prepared for ``what``; return ``False`` if it was already."""
    marks: set[str] = vars(module).setdefault("prepared_by_lightning_muon", set())
    is_first = what not in marks
    marks.add(what)
    return is_first
