"""Finds how a model is cut: by its methods, as a causal language model of transformers, or by its kind.

The forward of a transformers model runs on every stage, with the modules of other stages left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon.pipeline.parts import Carry, Chain, Loss, Part, StagedModel, missing_methods

_Place = tuple[nn.Module, str]
_PROBE_LENGTH = 8  # Tokens: more than the window of a short convolution.


class PPPlanModel(StagedModel):
    """A model of transformers, cut where its ``_pp_plan`` says, or at its children.

    Every stage runs that forward, with all inputs. Modules of other stages return their input; the first module of the
    stage gets what the stage has received, and the input of the first module of the next stage is sent there. So masks,
    positions, rotary embeddings, and operations between two parts (scaled embeddings, bounded logits) are computed on
    every stage. All arguments of a part but the first must follow from the inputs.

    Raises:
        LookupError: If it is no such model.
    """

    is_known = False  # Whether tests have shown that this holds for its kind.

    def __init__(self, root: Any) -> None:
        self.root = root
        names = {child: name for name, child in root.named_modules()}
        places = _planned_places(root)
        self.parts = [Part(names[each[0][0].get_submodule(each[0][1])], tuple(each)) for each in places]
        self._forward: Callable[..., Any] = root.forward
        self._result: Any = None  # Class of the result of its forward, and the name of the output in it.
        self._output = ""

    def probe(self) -> dict[str, Tensor]:
        """Inputs of a small forward: two rows of tokens, one with padding."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.root.config.vocab_size, (2, _PROBE_LENGTH), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, _PROBE_LENGTH // 2 :] = 0
        device = next(self.root.parameters()).device
        return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}

    def run(self, parts: Sequence[Part], carry: Carry, inputs: Any) -> Carry:
        """See the base class."""
        args, kwargs = arguments_in(inputs)
        kwargs |= {"use_cache": False, "return_dict": True}
        with _stage_of_forward(self.parts, parts, carry) as passed_on:
            result = self._forward(*args, **kwargs)
        self._result, self._output = type(result), next(iter(result))
        if parts[-1] is self.parts[-1]:
            return result[self._output]
        if not passed_on:
            raise RuntimeError(
                f"the forward of {type(self.root).__name__} does not come to the part after {parts[-1].name}"
            )
        return passed_on[0]

    def inputs_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """See the base class."""
        if kwargs.get("labels") is not None:
            raise TypeError(f"call {type(self.root).__name__} without labels: pipeline_loss is its loss in a pipeline")
        return bound(self.root, args, kwargs), None

    def result_of_call(self, output: Carry, target: Any) -> Any:
        """See the base class."""
        return self._result(**{self._output: output})


def arguments_in(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments in the inputs of a batch."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def bound(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``root``, by name."""
    signature = inspect.signature(type(root).forward)
    given = signature.bind(root, *args, **kwargs).arguments
    given.pop("self")
    rest = next((each.name for each in signature.parameters.values() if each.kind == each.VAR_KEYWORD), "")
    return given | given.pop(rest, {})


class _Entrance(nn.Module):
    """Wraps the first module of a stage: calls it with what the stage has received, and has its attributes."""

    def __init__(self, module: nn.Module, received: Tensor) -> None:
        super().__init__()
        self.module, self.received = module, received

    def __getattr__(self, name: str) -> Any:
        own = vars(self)["_modules"]
        return own[name] if name in own else getattr(own["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result for the received tensor as first argument."""
        if args:
            return self.module(self.received, *args[1:], **kwargs)
        return self.module(**(kwargs | {next(iter(kwargs)): self.received}))


@contextmanager
def _stage_of_forward(model: Sequence[Part], stage: Sequence[Part], carry: Carry) -> Generator[list[Tensor]]:
    """Context in which a forward of the model is that of a stage; the list gets the next stage's input. Local.

    Modules of other stages must be absent.
    """
    passed_on: list[Tensor] = []
    with ExitStack() as stack:
        if stage[-1] is not model[-1]:
            following = model[list(model).index(stage[-1]) + 1].modules[0]
            handle = following.register_forward_pre_hook(
                lambda _, args, kwargs: passed_on.append(args[0] if args else next(iter(kwargs.values()))),
                with_kwargs=True,
            )
            stack.callback(handle.remove)
        if carry is not None:
            # For absent embeddings: masks and positions follow from shape, dtype and device of what they return.
            stack.callback(model[0].modules[0].register_forward_hook(lambda *_: torch.zeros_like(carry)).remove)
            parent, name = stage[0].places[0]
            module = parent.get_submodule(name)
            stack.callback(setattr, parent, name, module)
            setattr(parent, name, _Entrance(module, carry))
        yield passed_on


def _planned_places(root: Any) -> list[list[_Place]]:
    """The places of each part: by the ``_pp_plan`` of a model, or the children of its base model."""
    kind = f"a {type(root).__name__}"
    prefix = getattr(root, "base_model_prefix", None)
    if prefix is None or hasattr(root, "peft_config"):  # A PeftModel answers for the model inside.
        raise LookupError(f"{kind} is no model of transformers alone, and not the forward of nn.Sequential")
    base = getattr(root, prefix, root) if prefix else root
    above = "" if base is root else f"{prefix}."
    names = sorted(getattr(root, "_pp_plan", None) or (), key=lambda name: not name.startswith(above))
    if len(names) < 2:  # The plan of transformers has the head first, and often nothing else.
        # Dropout belongs to one stage, too; modules with buffers only (rotary) are on all stages.
        names = [
            f"{path}{name}"
            for path, parent in {above: base, "": root}.items()
            for name, child in parent.named_children()
            if child is not base and (isinstance(child, nn.Dropout) or next(child.parameters(), None) is not None)
        ]
    parts: list[list[_Place]] = [[]]
    for name in names:
        path, _, child = name.rpartition(".")
        parent, module = root.get_submodule(path), root.get_submodule(name)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            parts += [*([(module, number)] for number, _ in module.named_children()), []]
        else:
            parts[-1].append((parent, child))
    if len(parts) == 1:
        raise LookupError(f"{kind} has no list of layers in {', '.join(names) or 'its children'}")
    return [part for part in parts if part]


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
