"""Finds output heads: the layers whose outputs are classes or tokens, which Muon should leave to AdamW."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from lightning_muon.params.uses import inside_repeated_block, walk

# Losses and metrics may follow the network in registration order and are no part of it.
_NOT_NETWORK = re.compile(r"Loss|Metric")


@dataclass(frozen=True, kw_only=True)
class OutputHeads:
    """Parameters of output heads.

    Args:
        known: id of a weight -> reason, for heads that the model declares or that match an embedding in shape.
        guessed: id of the weight of the last layer, if nothing better is known.
    """

    known: dict[int, str] = field(default_factory=dict[int, str])
    guessed: int | None = None


def find_output_heads(module: nn.Module) -> OutputHeads:
    """Return the output heads of ``module``.

    In this order: what ``get_output_embeddings()`` of any submodule returns; linear layers that are as wide as an
    embedding and have one output per entry of it; otherwise the last layer that has a weight, if it is linear and lies
    in no repeated block.
    """
    known = dict(_declared_heads(module))
    if not known:
        known = dict(_vocabulary_heads(module))
    return OutputHeads(known=known, guessed=None if known else _last_linear(module))


def _declared_heads(module: nn.Module) -> Iterator[tuple[int, str]]:
    for submodule in module.modules():
        getter = getattr(submodule, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            head = getter()
        except (AttributeError, RuntimeError, TypeError):
            # A model without a head may inherit a getter that raises; another library's may want arguments.
            continue
        weight = _registered_weight(head) if isinstance(head, nn.Module) else None
        if weight is not None:
            yield id(weight), "output head"


def _vocabulary_heads(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield linear layers with the shape of an embedding, outside of repeated blocks.

    In a block such a shape is chance (feed-forward size = vocabulary size), and a square table (as many positions as
    channels) says nothing about a square layer.
    """
    tables = {
        (table.num_embeddings, table.embedding_dim)
        for table in module.modules()
        if isinstance(table, nn.Embedding) and table.num_embeddings != table.embedding_dim
    }
    for path in walk(module):
        layer = path[-1][1]
        weight = _registered_weight(layer) if isinstance(layer, nn.Linear) else None
        if weight is not None and tuple(weight.shape) in tables and not inside_repeated_block(path):
            yield id(weight), "output head (size of the embedding)"


def _last_linear(module: nn.Module) -> int | None:
    last = None
    for path in walk(module):
        layer = path[-1][1]
        if next(layer.parameters(recurse=False), None) is None:
            continue
        if not any(_is_loss_or_metric(ancestor) for _, ancestor in path[1:]):
            last = path
    if last is None or not isinstance(last[-1][1], nn.Linear) or inside_repeated_block(last):
        return None
    weight = _registered_weight(last[-1][1])
    return None if weight is None else id(weight)


def _registered_weight(layer: nn.Module) -> nn.Parameter | None:
    """Return the parameter ``weight``, None if a parametrization computes it anew at each access."""
    return dict(layer.named_parameters(recurse=False)).get("weight")


def _is_loss_or_metric(module: nn.Module) -> bool:
    return any(_NOT_NETWORK.search(base.__name__) for base in type(module).__mro__)
