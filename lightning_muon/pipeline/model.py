"""What a pipeline asks of a model: its parts in the order of forward, how a run of them is called, and its loss."""

from __future__ import annotations

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Carry = Any
"""What one part returns to the next one: a tensor, or a tuple of tensors."""
Loss = tuple[Tensor, Tensor | int]
"""The sum of the losses of a micro-batch, and how many it sums up."""

# Causal language models of transformers whose forward does nothing to the hidden states between embeddings, layers,
# norm and head; others scale them, or have a second stream.
CAUSAL_LMS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
ENCODER_DECODERS = ("mt5", "t5")
# What an encoder-decoder is called with; "return_dict" is always true.
_TAKEN = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "return_dict")
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
        return list(dict.fromkeys(parent.get_submodule(name) for parent, name in self.places))


class StagedModel(ABC):
    """A model as a sequence of parts; a stage is a run of them."""

    parts: Sequence[Part]
    # What users call: during an evaluation its forward is that of the whole pipeline.
    root: nn.Module
    example: Any = None  # Inputs of which the first part takes some, if they are known; their values do not matter.

    @abstractmethod
    def copy(self, memo: dict[int, Any]) -> Self:
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

    def batch_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
        """The batch of training of a call with gradients, and of how many losses the mean is wanted, if not of its own.

        Raises:
            RuntimeError: If the model does not compute its loss itself.
        """
        raise RuntimeError(
            f"{type(self.root).__name__} is divided over the ranks of a pipeline, and returns no output that a loss "
            "could be computed from; in a loop call lightning_muon.forward_backward(model, batch) in the place of the "
            "model and of backward, and evaluate under torch.no_grad()"
        )

    def result_of_training(self, loss: Tensor) -> Any:
        """What a call with gradients returns."""
        raise NotImplementedError

    def take_calls(self, run: Callable[..., Any]) -> None:
        """From now on ``run`` answers calls of :attr:`root`; local."""

        @wraps(type(self.root).forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        # What looks at the signature, as ``generate`` does, finds that of the model.
        signature = inspect.signature(type(self.root).forward.__get__(self.root))
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.root.forward = forward


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

    def copy(self, memo: dict[int, Any]) -> Self:
        """See the base class."""
        root = nn.ModuleList(copy.deepcopy([module for part in self.parts for module in part.modules], memo))
        return type(self)(root, list(root), None, self._loss)

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


class LanguageModel(StagedModel):
    """A language model of transformers: its batches, its loss, and what calls of it mean."""

    shift: int  # How many labels come before the one that the first position predicts.
    _result: Any  # The class of what its forward returns.

    def __init__(self, root: Any) -> None:
        self.root: Any = root

    def copy(self, memo: dict[int, Any]) -> Self:
        """See the base class."""
        return type(self)(copy.deepcopy(self.root, memo))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """The entries of a batch, and its labels."""
        if "labels" not in batch:
            raise KeyError(f"the batch has no labels, only {sorted(batch)}; for language models they are the input_ids")
        return self._inputs_and_labels(dict(batch))

    def loss(self, output: Carry, target: Any) -> Loss:
        """Cross-entropy of each token that is predicted."""
        labels = target[..., self.shift :].flatten()
        logits = output[..., : output.shape[-2] - self.shift, :].flatten(0, -2).float()
        total = F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        return total, (labels != _IGNORED).sum()

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class. Targets are the labels, and of how many losses the mean is wanted, if not of theirs."""
        signature = inspect.signature(type(self.root).forward)
        given = signature.bind(self.root, *args, **kwargs).arguments
        given.pop("self")
        rest = next((each.name for each in signature.parameters.values() if each.kind == each.VAR_KEYWORD), "")
        inputs, labels = self._inputs_and_labels(given | given.pop(rest, {}))
        return inputs, None if labels is None else (labels, kwargs.get("num_items_in_batch"))

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        if target is None:
            return self._result(loss=None, logits=output)
        labels, num_losses = target
        total, count = self.loss(output, labels)
        return self._result(loss=total / (count if num_losses is None else num_losses), logits=output)

    def batch_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
        """See the base class. A Trainer of transformers says how many losses all micro-batches of a step have."""
        inputs, target = self.inputs_of_call(args, kwargs)
        if target is None:
            raise RuntimeError(
                f"{type(self.root).__name__} is divided over ranks of a pipeline, whose last stage computes the loss: "
                "in training call it with labels (no label smoothing, no loss of your own), or use torch.no_grad()"
            )
        labels, num_losses = target
        return {**inputs, "labels": labels}, None if num_losses is None else torch.as_tensor(num_losses)

    def _inputs_and_labels(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        inputs = {key: value for key, value in given.items() if value is not None and key != "num_items_in_batch"}
        if "past_key_values" in inputs:
            raise ValueError("a pipeline keeps no cache of keys and values; call it, or generate, with use_cache=False")
        return inputs, inputs.pop("labels", None)

    def result_of_training(self, loss: Tensor) -> Any:
        """The loss alone: the logits are on the ranks of the last stage."""
        return self._result(loss=loss, logits=None)

    def take_calls(self, run: Callable[..., Any]) -> None:
        """See the base class."""
        super().take_calls(run)
        if hasattr(self.root, "generate"):
            self.root.generate = partial(type(self.root).generate, self.root, use_cache=False)


class CausalLM(LanguageModel):
    """A causal language model: embeddings, layers, norm and head, called through its own forward.

    A stage that has no embeddings is called with ``inputs_embeds``, and modules of other stages return what they get.
    So masks, positions and rotary embeddings are made on every stage from the batch, which every stage has.
    """

    shift = 1

    def __init__(self, root: Any) -> None:
        super().__init__(root)
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
        self.parts = _named_parts(root, [before, *_blocks(base, layers), [*after, (root, head)]])
        self._forward: Callable[..., Any] = root.forward
        self._result = None  # Known from the first call on.
        length = min(_EXAMPLE_LENGTH, getattr(root.config, "max_position_embeddings", _EXAMPLE_LENGTH))
        with torch.device("meta"):
            # Without a mask that is whole, transformers looks at positions for sequences that were packed.
            mask = torch.ones(1, 1, length, length, dtype=torch.bool)
            self.example = {"input_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask}

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        given = {**inputs, "use_cache": False, "return_dict": True}
        if parts[-1] is not self.parts[-1]:
            given.pop("logits_to_keep", None)  # All hidden states go on.
        if carry is not None:
            given.pop("input_ids", None)
            given["inputs_embeds"] = carry
        result = self._forward(**given)
        self._result = type(result)
        return result.logits


class EncoderDecoder(LanguageModel):
    """T5: the embeddings of both sides, the blocks of the encoder, those of the decoder, norm and head.

    Hidden states travel with those of the other side, and with the position bias that the first block of a side makes
    for all: embeddings of the decoder go past the encoder, so that only the first stage and the last have a copy of the
    tied weight; then the output of the encoder goes along the decoder. Masks are made on every stage from the batch.
    """

    shift = 0

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._library: Any = sys.modules[type(root.encoder).__module__]  # Has what the forward of a stack takes.
        self._result = self._library.Seq2SeqLMOutput
        stacks = (root.encoder, root.decoder)
        for stack in stacks:
            if stack.embed_tokens.weight is root.shared.weight:
                stack.embed_tokens = root.shared
        encoder, decoder = (_blocks(stack, "block") for stack in stacks)
        encoder[-1].append((root.encoder, "final_layer_norm"))
        first = [(root, "shared"), *((stack, "embed_tokens") for stack in stacks)]
        last = [(root.decoder, "final_layer_norm"), (root, "lm_head")]
        self.parts = _named_parts(root, [first, *encoder, *decoder, last])
        self._last_of_encoder, self._last_of_decoder = self.parts[len(encoder)], self.parts[-2]
        tokens = torch.zeros(1, _EXAMPLE_LENGTH, dtype=torch.long, device="meta")
        self.example = {"input_ids": tokens, "decoder_input_ids": tokens}

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        encoder, decoder = self.root.encoder, self.root.decoder
        # Hidden states, those of the other side, the position bias.
        values: tuple[Any, ...] = carry if isinstance(carry, tuple) else (carry,)
        for part in parts:
            block: Any = part.modules[0]
            if part is self.parts[0]:
                hidden = encoder.dropout(encoder.embed_tokens(inputs["input_ids"]))
                values = hidden, decoder.dropout(decoder.embed_tokens(inputs["decoder_input_ids"]))
            elif part is self.parts[-1]:
                hidden = decoder.dropout(decoder.final_layer_norm(values[0]))
                is_scaled = getattr(self.root.config, "scale_decoder_outputs", False)
                return self.root.lm_head(hidden * self.root.model_dim**-0.5 if is_scaled else hidden)
            elif not block.is_decoder:
                hidden, other, *bias = values
                hidden, *bias = block(hidden, self._mask(encoder, hidden, inputs), *bias)
                values = hidden, other, bias[0]
                if part is self._last_of_encoder:
                    values = other, encoder.dropout(encoder.final_layer_norm(hidden))
            else:
                hidden, encoded, *bias = values
                masks = [self._mask(decoder, hidden, inputs), self._mask(decoder, hidden, inputs, encoded)]
                hidden, *bias = block(hidden, masks[0], *bias or [None], encoded, masks[1])
                values = (hidden,) if part is self._last_of_decoder else (hidden, encoded, bias[0])
        return values

    def _mask(self, stack: Any, hidden: Tensor, inputs: Any, encoded: Tensor | None = None) -> Tensor | None:
        """As ``T5Stack.forward`` makes it: that of its own positions, or that of what the encoder has ``encoded``."""
        if stack.is_decoder and encoded is None:
            padding = inputs.get("decoder_attention_mask")
            return self._library.create_causal_mask(stack.config, hidden, padding, past_key_values=None)
        padding = inputs.get("attention_mask")
        return self._library.create_bidirectional_mask(stack.config, hidden, padding, encoder_hidden_states=encoded)

    def _inputs_and_labels(self, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        inputs, labels = super()._inputs_and_labels(given)
        if "encoder_outputs" in inputs:  # The tokens, see `take_calls`.
            inputs["input_ids"] = inputs.pop("encoder_outputs")[0].squeeze(-1)
        if labels is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self.root.prepare_decoder_input_ids_from_labels(labels)
        unknown = [key for key, value in inputs.items() if key not in _TAKEN and value is not False]
        if unknown:
            raise TypeError(f"a pipeline of {type(self.root).__name__} takes {', '.join(_TAKEN)}; got {unknown}")
        return inputs, labels

    def take_calls(self, run: Callable[..., Any]) -> None:
        """See the base class. ``generate`` calls the encoder first: its output are the tokens, which it keeps."""
        super().take_calls(run)

        @wraps(type(self.root.encoder).forward)
        def keep_tokens(input_ids: Tensor, **_: Any) -> Any:
            return self._library.BaseModelOutput(last_hidden_state=input_ids.unsqueeze(-1))

        self.root.encoder.forward = keep_tokens


_Place = tuple[nn.Module, str]


def _blocks(stack: nn.Module, name: str) -> list[list[_Place]]:
    """The places of the children of a list of modules."""
    blocks = stack.get_submodule(name)
    return [[(blocks, number)] for number, _ in blocks.named_children()]


def _named_parts(root: nn.Module, places: Sequence[Sequence[_Place]]) -> list[Part]:
    names = {child: name for name, child in root.named_modules()}
    return [Part(names[each[0][0].get_submodule(each[0][1])], tuple(each)) for each in places]


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
    if _is_language_model(root):
        return CausalLM(root) if root.config.model_type in CAUSAL_LMS else EncoderDecoder(root)
    if isinstance(root, nn.Sequential) and hasattr(module, "pipeline_loss"):
        methods = module
        return Chain(root, list(root.children()), split, methods.pipeline_loss, example)
    kind = getattr(getattr(root, "config", None), "model_type", None)
    what = f"the model_type {kind!r}" if kind else f"a {type(root).__name__}"
    raise ValueError(
        f"{type(module).__name__} cannot be cut into stages: {what} is no language model out of "
        f"{', '.join((*CAUSAL_LMS, *ENCODER_DECODERS))}, and no nn.Sequential in a module with pipeline_loss. Say how "
        f"it is cut:\n{_METHODS}"
    )


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or _is_language_model(module)


def _is_language_model(module: Any) -> bool:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    is_wrapped = hasattr(module, "peft_config")  # It answers for the model inside.
    has_head = getattr(module, "get_output_embeddings", lambda: None)() is not None
    return kind in (*CAUSAL_LMS, *ENCODER_DECODERS) and has_head and not is_wrapped
