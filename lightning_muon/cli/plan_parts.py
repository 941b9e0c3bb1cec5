"""Models for ``lightning-muon plan --splits``: parts as the runtime cuts them, and the cost of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import groupby

import torch
from torch import nn

from lightning_muon.cli.plan_model import PlannedModel
from lightning_muon.pipeline.cut import choose_stages, matrices_of
from lightning_muon.pipeline.model import Chain, StagedModel, find_staged_model
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_LOSS_BYTES = 4  # Bytes per logit: its log-softmax in float32; in backward two gradients of that size.


class PlannedParts:
    """A model as the parts of which the runtime makes stages, with the cost of each.

    All below a module with "attn" or "attention" in its name is one attention. Its width, that of all heads together,
    is the number of inputs of its last matrix, the output projection.
    """

    def __init__(self, planned: PlannedModel, model: ModelShapes, *, width: int | None, itemsize: int) -> None:
        if planned.module is None:
            self._staged, shapes = _from_shapes(model)
        else:
            self._staged = find_staged_model(planned.module)
            shapes = dict(zip(planned.module.parameters(), model.parameters, strict=True))
        parts = self._staged.parts
        distinct = [dict.fromkeys(p for module in part.modules for p in module.parameters()) for part in parts]
        self.parameters = [[shapes[parameter] for parameter in each] for each in distinct]
        self.numel = [sum(math.prod(each.shape) for each in some) for some in self.parameters]
        self.trained = [sum(math.prod(p.shape) for p in some if not p.frozen) for some in self.parameters]
        self.width = width or _width_of(model)
        # Activation checkpointing is for layers: embeddings and the output head are outside of them.
        self.is_layer = [any(each.algorithm == "muon" for each in some) for some in self.parameters]
        matrices = [matrices_of(part) for part in parts]
        # FLOPs of a forward for each token, and of attention's scores and values for each pair of tokens of a row.
        self.product_flops = [2 * sum(each.numel() for each in some) for some in matrices]
        self.score_flops = [4 * sum(_attention_widths(shapes[each] for each in some)) for some in matrices]
        # Bytes for each token that backward needs: inputs and outputs of each matrix.
        self.output_bytes = [itemsize * sum(each.shape[-2] for each in some) for some in matrices]
        self.activations = [itemsize * sum(each.shape[-1] + each.shape[-2] for each in some) for some in matrices]
        self.inputs = self.width * itemsize
        self.loss_gradient = [0] * len(parts)  # Bytes for each token of the micro-batch whose backward runs.
        if matrices[-1] and not self.is_layer[-1]:
            self.loss_gradient[-1] = _LOSS_BYTES * matrices[-1][-1].shape[0]
            self.activations[-1] += self.loss_gradient[-1]
        self._index = {id(part): index for index, part in enumerate(parts)}
        self.stages = cache(self._stages)

    def _stages(self, num_stages: int) -> list[list[int]]:
        """The parts of each stage, by number."""
        return [[self._index[id(part)] for part in stage] for stage in choose_stages(self._staged, num_stages)]

    def __len__(self) -> int:
        return len(self.parameters)

    def kept(self, part: int, *, recompute: bool) -> int:
        """Bytes for each token of a micro-batch between forward and backward."""
        return self.inputs if recompute and self.is_layer[part] else self.activations[part]

    def in_backward(self, parts: Sequence[int], *, recompute: bool) -> int:
        """Further bytes for each token of the micro-batch in backward: of a recomputed layer, and of the loss."""
        again = max((self.activations[part] for part in parts if self.is_layer[part] and recompute), default=0)
        return again + 2 * sum(self.loss_gradient[part] for part in parts)


def _from_shapes(model: ModelShapes) -> tuple[StagedModel, dict[nn.Parameter, ParameterShape]]:
    """Modules without memory: one for each numbered layer, and for all that comes before, between and after them."""
    shapes: dict[nn.Parameter, ParameterShape] = {}

    def module_of(each: ParameterShape) -> nn.Module:
        parameter = nn.Parameter(torch.empty(each.shape, device="meta"), requires_grad=False)
        shapes[parameter] = each
        is_table = each.reason.startswith("embedding") and len(each.shape) == 2
        return _holding(
            parameter, nn.Embedding(each.shape[0], each.shape[1], device="meta") if is_table else nn.Module()
        )

    def layer_of(each: ParameterShape) -> str:
        words = each.name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        return "" if number is None else ".".join(words[: number + 1])

    parts = [nn.ModuleList(map(module_of, some)) for _, some in groupby(model.parameters, layer_of)]
    if not any(each.reason.startswith("output head") for each in model.parameters):  # It is tied to the embedding.
        tied = [p for p, each in shapes.items() if each.reason.startswith("embedding")][:1]
        parts[-1].extend(_holding(parameter, nn.Module()) for parameter in tied)
    root = nn.ModuleList(parts)
    return Chain(root, parts), shapes


def _holding(parameter: nn.Parameter, module: nn.Module) -> nn.Module:
    module.weight = parameter
    return module


def _attention_widths(matrices: Iterable[ParameterShape]) -> list[int]:
    """Width of each attention among the matrices."""
    last: dict[str, int] = {}
    for each in matrices:
        words = each.name.split(".")
        for index, word in enumerate(words):
            if ("attn" in word.lower() or "attention" in word.lower()) and "norm" not in word.lower():
                last[".".join(words[: index + 1])] = each.shape[-1]
                break
    return list(last.values())


def _width_of(model: ModelShapes) -> int:
    tables = (each.shape[-1] for each in model.parameters if each.reason.startswith("embedding"))
    if (width := next(tables, None)) is None:
        raise ValueError(f"{model.name} has no embedding that says how wide its activations are; add --width")
    return width
