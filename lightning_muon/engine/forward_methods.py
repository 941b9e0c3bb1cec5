"""Lets FSDP2 gather weights for methods beside ``forward``: the steps of a Trainer, ``generate``, calls of children."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_muon.compat.hooks import ModuleHook
from lightning_muon.sharding.outputs import tensors_in, without_views
from lightning_muon.sharding.units import callable_children, own_places

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
        if callable(getattr(module, name, None)) and _mark(module, name):
            _register_packed(module, name)
    for child in module.modules():
        has_generate = isinstance(child, FSDPModule) and callable(getattr(child, "generate", None))
        if has_generate and _mark(child, "entry generate"):
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
        if callable(save) and _mark(child, "save_pretrained"):
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
        if not isinstance(child, FSDPModule) and not hasattr(child, "_orig_mod") and _mark(child, "forward"):
            child.register_forward_pre_hook(gather.before)
            child.register_forward_hook(gather.after, always_call=True)
    for child in module.modules():
        generate = getattr(child, "generate", None)
        is_inner = child is not module and not isinstance(child, FSDPModule)
        if is_inner and callable(generate) and _mark(child, "generate"):
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


def _mark(module: nn.Module, what: str) -> bool:
    """Mark ``module`` as prepared for ``what``; return ``False`` if it was already."""
    marks: set[str] = vars(module).setdefault("prepared_by_lightning_muon", set())
    is_first = what not in marks
    marks.add(what)
    return is_first
