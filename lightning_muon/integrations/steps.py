"""Lets FSDP2 see the methods through which a Trainer enters a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MARK = "is_fsdp_entry"


class _Batch:
    """Arguments of a step, packed so that mixed precision does not touch them.

    FSDP2 casts every floating-point tensor that enters a forward to the dtype of the parameters. For a step that would
    round regression targets to bfloat16; the inputs of ``forward`` and of the layers are cast where they are used.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


def register_steps(module: nn.Module) -> None:
    """Make the steps of a sharded LightningModule, and ``generate`` of sharded models in it, entries of FSDP2.

    FSDP2 gathers the weights of a module when its ``forward`` is called; a Trainer calls ``training_step``. Doing this
    twice changes nothing.
    """
    for name in STEPS if isinstance(module, FSDPModule) else ():
        if callable(getattr(module, name, None)) and not _is_registered(module, name):
            _register_packed(module, name)
    for child in module.modules():
        has_generate = isinstance(child, FSDPModule) and callable(getattr(child, "generate", None))
        if has_generate and not _is_registered(child, "generate"):
            register_fsdp_forward_method(child, "generate")
            setattr(vars(child)["generate"].__func__, _MARK, True)


@contextmanager
def explain_shards() -> Iterator[None]:
    """Add to torch's error about weights that are still shards what the user can do."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "A layer ran while its weights were shards: FSDP2 gathers the weights of a module when its forward is "
                "called. With manual optimization each child of the LightningModule gathers its own, so call the child "
                "itself, not a layer or another method of it; or name the layer in "
                "ParallelMuonStrategy(wrap_policy=...), or the method in "
                "torch.distributed.fsdp.register_fsdp_forward_method from on_fit_start."
            )
        raise


def _register_packed(module: nn.Module, name: str) -> None:
    method: Callable[..., Any] = getattr(module, name)

    def unpack(_: nn.Module, batch: _Batch) -> Any:
        return method(*batch.args, **batch.kwargs)

    setattr(module, name, MethodType(unpack, module))
    register_fsdp_forward_method(module, name)
    entry: Callable[..., Any] = getattr(module, name)

    # Lightning looks through __wrapped__ for the signature, and for whether the user overrode the method.
    @wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        return entry(_Batch(args, kwargs))

    setattr(module, name, step)
    setattr(step, _MARK, True)


def _is_registered(module: nn.Module, name: str) -> bool:
    return getattr(vars(module).get(name), _MARK, False)
