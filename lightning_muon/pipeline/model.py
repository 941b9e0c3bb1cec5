"""Finds how a model is cut: by its methods, as a causal language model of transformers, or by its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon.pipeline.parts import Carry, Chain, Loss, StagedModel, missing_methods
from lightning_muon.pipeline.pp_plan import PPPlanModel, arguments_in, bound

# Causal language models that tests have shown to be cut exactly. Others are compared with their own forward first.
CAUSAL_LMS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
_IGNORED = -100  # The label of a token that is not predicted, as everywhere in transformers.


class CausalLM(PPPlanModel):
    """A causal language model of transformers: its batches, its loss, and the arguments and results of its calls."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.loss = next_token_loss

    @property
    def is_known(self) -> bool:
        """See the base class; ``False`` for a subclass, or a loss, of the user."""
        is_own = type(self.root).__module__.startswith("transformers.") and "_loss_function" not in vars(self.root)
        return is_own and self.root.config.model_type in CAUSAL_LMS

    def probe(self) -> dict[str, Tensor]:
        """See the base class; with labels."""
        inputs = super().probe()
        return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, _IGNORED)}

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
        return _inputs_and_labels(batch)

    def split_by(self, method: Callable[[Any], tuple[Any, Any]], batch: Any) -> tuple[Any, Any]:
        """Split a batch by the user's ``pipeline_step``, and bind the inputs to argument names."""
        inputs, target = method(batch)
        args, kwargs = arguments_in(inputs)
        return _inputs_and_labels(bound(self.root, args, kwargs))[0], target

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class."""
        return _inputs_and_labels(bound(self.root, args, kwargs))

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        if target is None:
            return self._result(loss=None, logits=output)
        total, count = next_token_loss(output, target)
        return self._result(loss=total / count, logits=output)

    def take_calls(self, run: Callable[..., Any]) -> None:
        """See the base class."""
        super().take_calls(run)
        if hasattr(self.root, "generate"):
            self.root.generate = MethodType(partial(type(self.root).generate, use_cache=False), self.root)


def next_token_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Sum of the cross-entropy of all predicted tokens, and their number."""
    labels = labels[..., 1:].flatten()
    logits = logits[..., : logits.shape[-2] - 1, :].flatten(0, -2).float()
    total = F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
    return total, (labels != _IGNORED).sum()


def _inputs_and_labels(given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    inputs = {key: value for key, value in given.items() if value is not None}
    if "past_key_values" in inputs:
        raise ValueError("a pipeline keeps no cache of keys and values; call it, or generate, with use_cache=False")
    return inputs, inputs.pop("labels", None)


def find_staged_model(module: nn.Module) -> StagedModel:
    """Find how ``module`` is cut: by its methods, or as the model that it is or holds; local.

    That model may be one of transformers with one stack of layers, or an ``nn.Sequential``.

    Raises:
        ValueError: If it is none of them; the message shows the methods to write.
    """
    methods: Any = module
    holders = [child for child in module.children() if next(child.parameters(), None) is not None]
    # The model itself, or all that a LightningModule holds.
    is_held = len(holders) == 1 and not _is_known(module) and not hasattr(module, "pipeline_parts")
    root: Any = holders[0] if is_held else module
    try:
        if hasattr(module, "pipeline_parts"):
            model: StagedModel = Chain(root, methods.pipeline_parts())
        elif isinstance(root, nn.Sequential) and type(root).forward is nn.Sequential.forward:
            model = Chain(root, list(root))
        elif _is_causal_lm(root):
            model = CausalLM(root)
        else:
            model = PPPlanModel(root)
    except LookupError as error:
        names = ", ".join(name for name, child in module.named_children() if child in holders)
        held = f"it holds {names}, and does not say in which order they run" if len(holders) > 1 else error.args[0]
        raise missing_methods(module, error.args[0] if _is_known(root) else held) from error
    if hasattr(module, "pipeline_loss"):
        model.loss = methods.pipeline_loss
    elif not isinstance(model, CausalLM):
        raise missing_methods(module, f"a {type(root).__name__} does not say its loss", "pipeline_loss")
    if hasattr(module, "pipeline_step"):
        step = methods.pipeline_step
        model.split = partial(model.split_by, step) if isinstance(model, CausalLM) else step
    return model


def _is_known(module: Any) -> bool:
    return isinstance(module, nn.Sequential) or bool(getattr(module, "base_model_prefix", None))


def _is_causal_lm(root: Any) -> bool:
    if getattr(root, "get_output_embeddings", lambda: None)() is None or hasattr(root, "peft_config"):
        return False
    if getattr(root.config, "is_encoder_decoder", False):
        raise LookupError(
            f"a {root.config.model_type} has an encoder and a decoder; examples/pipeline_t5.py puts the blocks of one "
            "into modules that hand on what the other needs"
        )
    # The loss type that transformers uses for a model whose name has no other.
    return getattr(root, "loss_type", None) in (None, "ForCausalLM")
