"""Base class of models in a pipeline: parts in the order of forward, how several are called, and the loss."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn

Carry = Any
"""What one part passes to the next one: a tensor, or a tuple of tensors."""
Loss = tuple[Tensor, Tensor | int]
"""The sum of the losses of a micro-batch, and their number."""

# Methods of a module that defines itself how it is cut.
_METHODS = {
    "pipeline_parts": """\
    def pipeline_parts(self):  # modules in the order of forward; each gets what the one before returns
        return [self.embedding, *self.blocks, self.head]""",
    "pipeline_step": """\
    def pipeline_step(self, batch):  # what the model gets (a tensor, tuple or dict), and what the loss compares with
        return batch["tokens"][:, :-1], batch["tokens"][:, 1:]""",
    "pipeline_loss": """\
    def pipeline_loss(self, output, target):  # the sum of the losses, and of how many
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()""",
}


@dataclass(frozen=True, eq=False)
class Part:
    """Modules that stay together, each with the module that holds it and its name there."""

    name: str  # Name of its first module in the model.
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules themselves."""
        return list(dict.fromkeys(parent.get_submodule(name) for parent, name in self.places))


class StagedModel(ABC):
    """A model as a sequence of parts; a stage is a run of them."""

    parts: Sequence[Part]
    # The module that users call: during an evaluation its forward is that of the whole pipeline.
    root: Any
    loss: Callable[[Carry, Any], Loss]  # Of the output and the targets of a micro-batch.

    @abstractmethod
    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """Call parts one after the other; ``carry`` is ``None`` for the first part of the model."""

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch of training into inputs and targets; by default it is such a pair."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"a batch is a {type(batch).__name__}, no pair (inputs, targets); define\n{_METHODS['pipeline_step']}"
            )
        return batch[0], batch[1]

    @abstractmethod
    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Inputs and targets (or ``None``) of a call of :attr:`root` by the user."""

    @abstractmethod
    def result_of_call(self, output: Carry, target: Any) -> Any:
        """The result of that call."""

    def take_calls(self, run: Callable[..., Any]) -> None:
        """Let ``run`` answer calls of :attr:`root`; local."""

        @wraps(type(self.root).forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        # Code that reads the signature, as ``generate`` does, finds that of the model.
        signature = inspect.signature(type(self.root).forward.__get__(self.root))
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.root.forward = forward


class Chain(StagedModel):
    """Modules each of which takes the output of the previous one."""

    def __init__(self, root: nn.Module, modules: Sequence[nn.Module]) -> None:
        self.root = root
        places = {child: (parent, name) for parent in root.modules() for name, child in parent.named_children()}
        names = {child: name for name, child in root.named_modules()}
        for module in modules:
            if module not in places:
                raise ValueError(f"pipeline_parts returns a {type(module).__name__} that is no submodule of the model")
        if len(set(modules)) < len(modules):
            raise ValueError(
                f"a module is twice among the parts of {type(root).__name__}, where each is called once in a forward; "
                "give every place a module of its own"
            )
        self.parts = [Part(names[module], (places[module],)) for module in modules]

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        values = inputs if carry is None else carry
        for part in parts:
            (module,) = part.modules
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class."""
        if kwargs:
            raise TypeError(f"a pipeline of modules takes no keywords, got {', '.join(kwargs)}")
        return args[0] if len(args) == 1 else tuple(args), None

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        return output


def missing_methods(module: nn.Module, why: str, *names: str) -> ValueError:
    """The error for a module that cannot be cut; it shows these methods to write, or all that are missing."""
    lines = "\n\n".join(
        text for name, text in _METHODS.items() if name in names or not (names or hasattr(module, name))
    )
    return ValueError(f"{type(module).__name__} cannot be cut into stages: {why}. Write in it:\n{lines}")
