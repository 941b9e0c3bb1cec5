"""What a pipeline asks of a model: its parts in the order of forward, how a run of them is called, and its loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Carry = Any
"""What one part hands to the next: a tensor, or a tuple of tensors."""
Loss = tuple[Tensor, Tensor | int]
"""The sum of the losses of a micro-batch, and how many it sums up."""

# Causal language models of transformers whose forward does nothing to the hidden states between embeddings, layers,
# norm and head; others scale them, or have a second stream.
CAUSAL_LMS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
_EXAMPLE_LENGTH = 2048  # Tokens of a typical training, if the model takes so many: attention grows with it.
_IGNORED = -100  # The label of a token that is not predicted, as everywhere in transformers.
_METHODS = """\
    def pipeline_parts(self):  # modules in the order of forward; each gets what the one before returns
        return [self.embedding, *self.blocks, self.head]

    def pipeline_step(self, batch):  # what the first part gets (a tensor or a tuple), and what the loss compares with
        tokens = batch["tokens"]
        return tokens[:, :-1], tokens[:, 1:]

    def pipeline_loss(self, output, target):  # the sum of the losses, and of how many
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()"""


@dataclass(frozen=True, eq=False)
class Part:
    """Modules that stay together, each with the module that holds it and its name there."""

    name: str  # Of its first module in the model.
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def modules(self) -> list[nn.Module]:
        """They themselves."""
        return [parent.get_submodule(name) for parent, name in self.places]


class StagedModel(ABC):
    """A model as a sequence of parts; a stage is a run of them."""

    parts: Sequence[Part]
    # What users call: during an evaluation its forward is that of the whole pipeline.
    root: nn.Module
    example: Any = None  # Inputs of which the first part takes some, if they are known; their values do not matter.

    @abstractmethod
    def copy(self, memo: dict[int, Any]) -> StagedModel:
        """Parts that are copies, for ``memo`` see ``copy.deepcopy``; its :meth:`run` is all that may be called."""

    @abstractmethod
    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """Call parts one after the other; ``carry`` is ``None`` for the first part of the model."""

    @abstractmethod
    def split(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch of training."""

    @abstractmethod
    def loss(self, output: Carry, target: Any) -> Loss:
        """Sum and number of the losses of a micro-batch."""

    @abstractmethod
    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Inputs and targets (or ``None``) of a call of :attr:`root` by the user."""

    @abstractmethod
    def result_of_call(self, output: Carry, target: Any) -> Any:
        """What that call returns."""


class Chain(StagedModel):
    """Modules each of which takes what the one before has returned."""

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[nn.Module],
        split: Callable[[Any], tuple[Any, Any]] | None,
        loss: Callable[[Carry, Any], Loss],
        example: Any = None,
    ) -> None:
        self.root, self._split, self._loss, self.example = root, split, loss, example
        places = {child: (parent, name) for parent in root.modules() for name, child in parent.named_children()}
        names = {child: name for name, child in root.named_modules()}
        for module in modules:
            if module not in places:
                raise ValueError(f"pipeline_parts returns a {type(module).__name__} that is no submodule of the model")
        if len(set(modules)) < len(modules):
            raise ValueError("pipeline_parts returns a module twice; a part is called once in a forward")
        self.parts = [Part(names[module], (places[module],)) for module in modules]

    def copy(self, memo: dict[int, Any]) -> Chain:
        """See the base class."""
        root = nn.ModuleList(copy.deepcopy([module for part in self.parts for module in part.modules], memo))
        return Chain(root, list(root), None, self._loss)

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        values = inputs if carry is None else carry
        for part in parts:
            (module,) = part.modules
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values

    def split(self, batch: Any) -> tuple[Any, Any]:
        """As ``pipeline_step`` says; without it a batch is a pair."""
        if self._split is not None:
            return self._split(batch)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"a batch is a {type(batch).__name__}, no pair (inputs, targets); define\n"
                f"{_METHODS.split(chr(10) * 2)[1]}"
            )
        return batch[0], batch[1]

    def loss(self, output: Carry, target: Any) -> Loss:
        """As ``pipeline_loss`` says."""
        return self._loss(output, target)

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class."""
        if kwargs:
            raise TypeError(f"a pipeline of modules takes no keywords, got {', '.join(kwargs)}")
        return args[0] if len(args) == 1 else tuple(args), None

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        return output


class CausalLM(StagedModel):
    """A causal language model of transformers: embeddings, layers, norm and head, called through its own forward.

    A stage that has no embeddings is called with ``inputs_embeds``, and modules of other stages hand on what they get.
    So masks, positions and rotary embeddings are made on every stage from the batch, which every stage has.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        base = getattr(root, root.base_model_prefix)
        layers = next(name for name, child in base.named_children() if isinstance(child, nn.ModuleList))
        # Names in order of forward. Dropout belongs to one place, too; what has only buffers (rotary) is everywhere.
        children = [
            name
            for name, child in base.named_children()
            if isinstance(child, nn.Dropout) or next(child.parameters(), None) is not None
        ]
        middle = children.index(layers)
        head = next(name for name, child in root.named_children() if child is root.get_output_embeddings())
        before, after = ([(base, name) for name in some] for some in (children[:middle], children[middle + 1 :]))
        blocks = [((getattr(base, layers), name),) for name, _ in getattr(base, layers).named_children()]
        names = {child: name for name, child in root.named_modules()}
        self.parts = [
            Part(names[places[0][0].get_submodule(places[0][1])], tuple(places))
            for places in (before, *blocks, [*after, (root, head)])
        ]
        self._forward: Callable[..., Any] = root.forward
        self._kind_of_result: Any = None  # Of its forward, from the first call on.
        length = min(_EXAMPLE_LENGTH, getattr(root.config, "max_position_embeddings", _EXAMPLE_LENGTH))
        with torch.device("meta"):
            # Without a mask that is whole, transformers looks at positions for sequences that were packed.
            mask = torch.ones(1, 1, length, length, dtype=torch.bool)
            self.example = {"input_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask}

    def copy(self, memo: dict[int, Any]) -> CausalLM:
        """See the base class."""
        return CausalLM(copy.deepcopy(self.root, memo))

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        given = {**inputs, "use_cache": False, "return_dict": True}
        if parts[-1] is not self.parts[-1]:
            given.pop("logits_to_keep", None)  # All hidden states go on.
        if carry is not None:
            given.pop("input_ids", None)
            given["inputs_embeds"] = carry
        result = self._forward(**given)
        self._kind_of_result = type(result)
        return result.logits

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The entries of a batch, and its labels."""
        if "labels" not in batch:
            raise KeyError(f"the batch has no labels, only {sorted(batch)}; for language models they are the input_ids")
        inputs = dict(batch)
        return inputs, inputs.pop("labels")

    def loss(self, output: Carry, target: Any) -> Loss:
        """Cross-entropy of each token after the first."""
        shifted = target[..., 1:].flatten()
        logits = output[..., :-1, :].flatten(0, -2).float()
        total = F.cross_entropy(logits, shifted, ignore_index=_IGNORED, reduction="sum")
        return total, (shifted != _IGNORED).sum()

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class."""
        inputs = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        inputs = {key: value for key, value in inputs.items() if value is not None}
        if "past_key_values" in inputs:
            raise ValueError("a pipeline keeps no cache of keys and values; call it, or generate, with use_cache=False")
        return inputs, inputs.pop("labels", None)

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        loss = None
        if target is not None:
            total, count = self.loss(output, target)
            loss = total / count
        return self._kind_of_result(loss=loss, logits=output)


def find_staged_model(module: nn.Module) -> StagedModel:
    """How ``module`` is cut: by its methods, as a language model of transformers, or as an ``nn.Sequential``; local.

    Raises:
        ValueError: If it is none of them; the message shows the methods to write.
    """
    example = getattr(module, "example_input_array", None)  # Lightning's name for it.
    split = getattr(module, "pipeline_step", None)
    if hasattr(module, "pipeline_parts"):
        if not hasattr(module, "pipeline_loss"):
            raise ValueError(f"{type(module).__name__} has pipeline_parts, but no pipeline_loss:\n{_METHODS}")
        methods: Any = module
        return Chain(module, methods.pipeline_parts(), split, methods.pipeline_loss, example)
    holders = [child for child in module.children() if next(child.parameters(), None) is not None]
    # The model itself, or all that a LightningModule holds.
    root: Any = holders[0] if len(holders) == 1 and not _is_known(module) else module
    if _is_causal_lm(root):
        return CausalLM(root)
    if isinstance(root, nn.Sequential) and hasattr(module, "pipeline_loss"):
        methods = module
        return Chain(root, list(root.children()), split, methods.pipeline_loss, example)
    kind = getattr(getattr(root, "config", None), "model_type", None)
    what = f"the model_type {kind!r}" if kind else f"a {type(root).__name__}"
    raise ValueError(
        f"{type(module).__name__} cannot be cut into stages: {what} is no causal language model out of "
        f"{', '.join(CAUSAL_LMS)}, and no nn.Sequential in a module with pipeline_loss. Say how it is cut:\n{_METHODS}"
    )


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or _is_causal_lm(module)


def _is_causal_lm(module: Any) -> bool:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    is_wrapped = hasattr(module, "peft_config")  # It answers for the model inside.
    has_head = getattr(module, "get_output_embeddings", lambda: None)() is not None
    return kind in CAUSAL_LMS and has_head and not is_wrapped
