"""Finds how a model is cut: by its methods, as a language model of transformers, or by its kind."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon.pipeline.parts import Carry, Chain, Loss, Part, StagedModel, missing_methods
from lightning_muon.pipeline.pp_plan import PPPlanModel, arguments_in, blocks_of, bound, named_parts

# Causal language models that tests have shown to be cut exactly. Others are compared with their own forward first.
CAUSAL_LMS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
ENCODER_DECODERS = ("mt5", "t5")
# Arguments that an encoder-decoder takes; "return_dict" is always true.
_TAKEN = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "return_dict")
_EXAMPLE_LENGTH = 2048  # Tokens of a typical training, if the model takes so many: attention grows with it.
_IGNORED = -100  # The label of a token that is not predicted, as everywhere in transformers.


class LanguageModel(StagedModel):
    """A language model of transformers: its batches, its loss, and the arguments and results of its calls."""

    shift: int  # Number of labels before the one that the first position predicts.
    _result: Any  # Class of the result of its forward.

    def __init__(self, root: Any) -> None:
        self.root: Any = root

    def copy(self, memo: dict[int, Any]) -> Self:
        """See the base class."""
        return type(self)(copy.deepcopy(self.root, memo))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch, arguments of the model by name, into its inputs and its labels.

        Raises:
            TypeError: If it is no mapping.
            KeyError: If it has no labels.
        """
        name = type(self.root).__name__
        if not isinstance(batch, Mapping):
            tokens, labels = ("batch", "batch") if isinstance(batch, Tensor) else ("batch[0]", "batch[1]")
            raise TypeError(
                f"a batch is a {type(batch).__name__}, but a pipeline calls {name} itself, instead of training_step, "
                'and takes a mapping of its arguments, such as {"input_ids": tokens, "labels": tokens}. Let the data '
                "loader give one, or say in the module that is trained what to take of a batch:\n"
                "    def pipeline_step(self, batch):  # the arguments of the model by name, and the labels\n"
                f'        return {{"input_ids": {tokens}}}, {labels}'
            )
        if "labels" not in batch:
            raise KeyError(f"the batch has no labels, only {sorted(batch)}; for language models they are the input_ids")
        return self._inputs_and_labels(dict(batch))

    def split_by(self, method: Callable[[Any], tuple[Any, Any]], batch: Any) -> tuple[Any, Any]:
        """Split a batch by the user's ``pipeline_step``, and bind the inputs to argument names."""
        inputs, target = method(batch)
        args, kwargs = arguments_in(inputs)
        labels = {"labels": target} if isinstance(target, Tensor) else {}  # From which a decoder's inputs may follow.
        return self._inputs_and_labels(bound(self.root, args, kwargs) | labels)[0], target

    def loss(self, output: Carry, target: Any) -> Loss:
        """Sum of the cross-entropy of all predicted tokens, and their number."""
        labels = target[..., self.shift :].flatten()
        logits = output[..., : output.shape[-2] - self.shift, :].flatten(0, -2).float()
        total = F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        return total, (labels != _IGNORED).sum()

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class. Targets are the labels, and the number of losses to divide by, or ``None`` for theirs."""
        inputs, labels = self._inputs_and_labels(bound(self.root, args, kwargs))
        return inputs, None if labels is None else (labels, kwargs.get("num_items_in_batch"))

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        if target is None:
            return self._result(loss=None, logits=output)
        labels, num_losses = target
        total, count = LanguageModel.loss(self, output, labels)
        return self._result(loss=total / (count if num_losses is None else num_losses), logits=output)

    def batch_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
        """See the base class. A Trainer of transformers gives the number of losses in all micro-batches of a step."""
        if vars(self).keys() & {"split", "loss"}:  # The methods of a user take other batches.
            return super().batch_of_call(args, kwargs)
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
        """The result with the loss only: the logits are on the ranks of the last stage."""
        return self._result(loss=loss, logits=None)

    def take_calls(self, run: Callable[..., Any]) -> None:
        """See the base class."""
        super().take_calls(run)
        if hasattr(self.root, "generate"):
            self.root.generate = partial(type(self.root).generate, self.root, use_cache=False)


class CausalLM(LanguageModel, PPPlanModel):
    """A causal language model: embeddings, layers, norm and head."""

    shift = 1

    def __init__(self, root: Any) -> None:
        PPPlanModel.__init__(self, root)
        length = min(_EXAMPLE_LENGTH, getattr(root.config, "max_position_embeddings", _EXAMPLE_LENGTH))
        with torch.device("meta"):
            # Without a full mask, transformers looks at positions to find packed sequences.
            mask = torch.ones(1, 1, length, length, dtype=torch.bool)
            self.example = {"input_ids": torch.zeros(1, length, dtype=torch.long), "attention_mask": mask}

    @property
    def is_known(self) -> bool:
        """See the base class; ``False`` for a subclass, or a loss, of the user."""
        is_own = type(self.root).__module__.startswith("transformers.") and "_loss_function" not in vars(self.root)
        return is_own and self.root.config.model_type in CAUSAL_LMS

    def probe(self) -> dict[str, Tensor]:
        """See the base class; with labels."""
        inputs = self._tokens()
        return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, _IGNORED)}


class EncoderDecoder(LanguageModel):
    """T5: the embeddings of both sides, the blocks of the encoder, those of the decoder, norm and head.

    Hidden states are sent with those of the other side, and with the position bias that the first block of a side makes
    for all. Embeddings of the decoder pass through the encoder stages, so that only the first stage and the last have a
    copy of the tied weight; the output of the encoder passes through the decoder stages. Masks are made on every stage.
    """

    shift = 0

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._library: Any = sys.modules[type(root.encoder).__module__]  # Has the functions that T5Stack.forward uses.
        self._result = self._library.Seq2SeqLMOutput
        stacks = (root.encoder, root.decoder)
        for stack in stacks:
            if stack.embed_tokens.weight is root.shared.weight:
                stack.embed_tokens = root.shared
        encoder, decoder = (blocks_of(stack, "block") for stack in stacks)
        encoder[-1].append((root.encoder, "final_layer_norm"))
        first = [(root, "shared"), *((stack, "embed_tokens") for stack in stacks)]
        last = [(root.decoder, "final_layer_norm"), (root, "lm_head")]
        self.parts = named_parts(root, [first, *encoder, *decoder, last])
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
        """Make the mask as ``T5Stack.forward`` does: of the stack's own positions, or of the ``encoded`` ones."""
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
        if "decoder_input_ids" not in inputs:
            raise TypeError(
                f"a pipeline of {type(self.root).__name__} needs labels or decoder_input_ids beside {[*inputs]}"
            )
        return inputs, labels

    def take_calls(self, run: Callable[..., Any]) -> None:
        """See the base class. ``generate`` calls the encoder first, which is made to return the tokens."""
        super().take_calls(run)

        @wraps(type(self.root.encoder).forward)
        def keep_tokens(input_ids: Tensor, **_: Any) -> Any:
            return self._library.BaseModelOutput(last_hidden_state=input_ids.unsqueeze(-1))

        self.root.encoder.forward = keep_tokens


def find_staged_model(module: nn.Module) -> StagedModel:
    """Find how ``module`` is cut: by its methods, or as the model that it is or holds; local.

    That model may be a language model of transformers, an ``nn.Sequential``, or one with a ``_pp_plan``.

    Raises:
        ValueError: If it is none of them; the message shows the methods to write.
    """
    methods: Any = module
    split, loss = getattr(module, "pipeline_step", None), getattr(module, "pipeline_loss", None)
    example = getattr(module, "example_input_array", None)  # Lightning's name for it.
    if hasattr(module, "pipeline_parts"):
        if loss is None:
            raise missing_methods(module, "it has pipeline_parts, but no pipeline_loss", "pipeline_loss")
        return Chain(module, methods.pipeline_parts(), split, loss, example)
    holders = [child for child in module.children() if next(child.parameters(), None) is not None]
    # The model itself, or all that a LightningModule holds.
    root: Any = holders[0] if len(holders) == 1 and not _is_known(module) else module
    if isinstance(root, nn.Sequential) and type(root).forward is nn.Sequential.forward:
        if loss is None:
            raise missing_methods(module, f"a {type(root).__name__} does not say its loss", "pipeline_loss")
        return Chain(root, list(root), split, loss, example)
    try:
        model = _language_model(root) or PPPlanModel(root)
    except LookupError as error:
        names = ", ".join(name for name, child in module.named_children() if child in holders)
        held = f"it holds {names}, and does not say in which order they run" if len(holders) > 1 else error.args[0]
        raise missing_methods(module, error.args[0] if _is_known(root) else held) from error
    if isinstance(model, LanguageModel):
        example = model.example
    elif loss is None:
        raise missing_methods(module, f"a {type(root).__name__} does not say its loss", "pipeline_loss")
    model.example = example
    if loss is not None:
        model.loss = loss
    if split is not None:
        model.split = partial(model.split_by, split) if isinstance(model, LanguageModel) else split
    return model


def _is_known(module: Any) -> bool:
    return isinstance(module, nn.Sequential) or bool(
        getattr(module, "base_model_prefix", None) or getattr(module, "_pp_plan", None)
    )


def _language_model(root: Any) -> LanguageModel | None:
    """``root`` as a language model, if it is one."""
    config: Any = getattr(root, "config", None)
    if getattr(root, "get_output_embeddings", lambda: None)() is None or hasattr(root, "peft_config"):
        return None
    if config.model_type in ENCODER_DECODERS:
        return EncoderDecoder(root)
    if getattr(config, "is_encoder_decoder", False):
        raise LookupError(
            f"of encoder-decoders only {' and '.join(ENCODER_DECODERS)} need no methods, no {config.model_type}"
        )
    # The loss type that transformers uses for a model whose name has no other.
    return CausalLM(root) if getattr(root, "loss_type", None) in (None, "ForCausalLM") else None
