"""Kinds of parameters by their layers: matrix, convolution, stack of matrices, elementwise, output head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_muon.params.uses import Path, Usage, Use, inside_repeated_block, usage, walk

ParameterKind = Literal["matrix", "convolution", "stack", "elementwise"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# `Norm` in the name of a class or a base class; but neither a normal distribution nor a layer that normalizes and
# multiplies (LayerNormLinear).
_NORM_CLASS = re.compile(r"Norm(?!al(?!i[sz]))")
_NOT_NORM_CLASS = re.compile(r"linear|mlp|conv|attention|block", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"embedding|positional", re.IGNORECASE)

# Words in names of raw parameters whose rows are looked up or added, never multiplied as one matrix.
_TABLE_WORDS = frozenset(
    "pos posemb position positions positional pe wpe wte emb embed embeds embedding embeddings token tokens table "
    "codebook centers centroids prototypes prompt prompts latent latents".split()
)
_BIAS_WORDS = frozenset(("bias", "biases"))
# Names that torch.nn.utils.weight_norm and spectral_norm give to the weight that they replace.
_REPARAMETRIZED_WEIGHT = ("weight_v", "weight_orig")

# Words that outweigh a table word: `token_proj` and `token_mixer` are multiplied.
_MATRIX_WORDS = frozenset("proj projection projector mix mixer mixing kernel".split())
# Words of names that are taken for matrices where the code of their layer does not say how they are used.
_WEIGHT_WORDS = _MATRIX_WORDS | {"weight", "weights", "w"}


def layer_kind(use: Use) -> tuple[ParameterKind, str]:
    """Kind and reason for one use of a parameter: by the type of its layer, by its class name, by shape and name."""
    parameter, (owner, attribute) = use.parameter, _layer_of(use)
    is_known = _direct_kind(owner, 2) is not None or isinstance(owner, (*_CONVOLUTIONS, *_RECURRENT))
    if not is_known and _is_table_class(owner) and hasattr(owner, "weight"):
        return "elementwise", "embedding"
    if parameter.ndim < 2:
        return "elementwise", f"{parameter.ndim}-D"
    if not parameter.is_floating_point():
        return "elementwise", f"dtype {str(parameter.dtype).removeprefix('torch.')}"
    if any(_NORM_CLASS.search(name) and not _NOT_NORM_CLASS.search(name) for name in _class_names(owner)):
        return "elementwise", "norm"
    # One number per row or column of the weight (weight_norm).
    is_magnitude = isinstance(use.owner, ParametrizationList) and sum(size > 1 for size in parameter.shape) < 2
    if attribute == "weight" and (reason := _direct_kind(owner, parameter.ndim)) is not None and not is_magnitude:
        return reason
    if isinstance(owner, _RECURRENT) and parameter.ndim == 2:
        return "matrix", f"{_layer_name(owner)} weight"
    if isinstance(owner, nn.MultiheadAttention) and parameter.ndim == 2:
        return "matrix", "attention projection"
    return _raw_kind(use)


def _layer_of(use: Use) -> tuple[nn.Module, str]:
    """The layer that uses a parameter, and the name of its attribute that the parameter is, or stands for."""
    owner, attribute = use.owner, use.attribute
    if isinstance(owner, ParametrizationList) and len(use.path) > 2:
        # parametrizations.weight.original0 stands for `weight` of the layer two levels up.
        return use.path[-3][1], use.path[-1][0].rsplit(".", 1)[-1]
    return owner, "weight" if attribute in _REPARAMETRIZED_WEIGHT else attribute


def is_transposed(use: Use) -> bool:
    """Whether a parameter is stored as (inputs, outputs), by the class of its layer, or by its code."""
    owner, _ = _layer_of(use)
    if isinstance(owner, _TRANSPOSED) or _is_transposed_linear(owner):
        return True
    return _direct_kind(owner, use.parameter.ndim) is None and _usage(use) == "inputs first"


def _usage(use: Use) -> Usage:
    """What the code of its layer does with a parameter."""
    owner, attribute = _layer_of(use)
    return usage(type(owner), attribute, use.parameter.ndim)


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether ``module`` is the ``Conv1D`` of transformers, a linear layer."""
    return "Conv1D" in _class_names(module) and hasattr(module, "nf") and not isinstance(module, _CONVOLUTIONS)


def _direct_kind(module: nn.Module, ndim: int) -> tuple[ParameterKind, str] | None:
    """Kind and reason of the ``weight`` of a layer of torch or of a subclass, ``None`` for any other layer."""
    if isinstance(module, nn.Linear) and ndim == 2:
        return "matrix", "Linear weight"
    if isinstance(module, _CONVOLUTIONS) and ndim > 2:
        if module.groups > 1:
            # Each group, or each channel, has a matrix or a filter of its own.
            return "elementwise", f"{_layer_name(module)} in groups"
        return "convolution", f"{_layer_name(module)} weight"
    if isinstance(module, nn.Bilinear):
        return "stack", "Bilinear weight"
    if _is_transposed_linear(module) and ndim == 2:
        return "matrix", "Conv1D (linear) weight"
    return None


def _raw_kind(use: Use) -> tuple[ParameterKind, str]:
    """Judge a parameter that no known layer holds, by its shape and by the words of its name."""
    shape = tuple(use.parameter.shape)
    if shape[0] == 1:
        return "elementwise", "leading size 1"
    if sum(size > 1 for size in shape) < 2 or (len(shape) == 3 and 1 in shape):
        return "elementwise", "vector"
    words = _words(use)
    if words & _BIAS_WORDS:
        return "elementwise", "bias"
    if (words & _TABLE_WORDS or _is_table_class(use.owner)) and not words & _MATRIX_WORDS:
        return "elementwise", "learned table"
    used = _usage(use)
    if used == "lookup":
        return "elementwise", "looked up"
    if used == "no product" or (used == "unknown" and not words & _WEIGHT_WORDS):
        return "elementwise", f"{'no plain product' if used == 'no product' else 'unknown use'}; see muon_patterns"
    if len(shape) == 2:
        return "matrix", "raw 2-D parameter"
    is_stack = len(shape) == 3 and used != "convolution"
    return ("stack", f"stack of {shape[0]} matrices") if is_stack else ("convolution", f"raw {len(shape)}-D")


def _words(use: Use) -> set[str]:
    """Lower-case words of the attribute name; entries of a ParameterList are named by the list."""
    name = use.attribute
    if isinstance(use.owner, nn.ParameterList | nn.ParameterDict):
        name = f"{use.path[-1][0].rsplit('.', 1)[-1]}_{name}"
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _is_table_class(module: nn.Module) -> bool:
    return any(_EMBEDDING_CLASS.search(name) for name in _class_names(module))


def _class_names(module: nn.Module) -> list[str]:
    """Names of the classes of ``module`` below ``nn.Module``."""
    return [base.__name__ for base in type(module).__mro__ if base is not nn.Module and issubclass(base, nn.Module)]


def _layer_name(module: nn.Module) -> str:
    """Name of the torch class that a layer is or derives from (LSTM, Conv2d)."""
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules."))
    return next(bases, type(module).__name__)


# Losses and metrics may follow the network in registration order and are no part of it.
_NOT_NETWORK = re.compile(r"Loss|Metric")


def find_output_heads(module: nn.Module) -> tuple[dict[int, str], set[int]]:
    """The output heads of ``module``: id of a weight -> reason; or else ids of weights as a guess.

    Heads are what ``get_output_embeddings()`` of any submodule returns, or linear layers with an embedding's shape; the
    guess is the last registered layer that has a weight, if it is linear and lies in no repeated block, and with it
    its twins: linear layers beside it of as many outputs whose names end in the same word (CLIP's two projections).
    """
    known = dict(_declared_heads(module)) or dict(_vocabulary_heads(module))
    return known, set() if known else set(_last_linears(module))


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
        weight = head._parameters.get("weight") if isinstance(head, nn.Module) else None
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
        # Not `layer.weight`, which a parametrization computes at each access.
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        if weight is not None and tuple(weight.shape) in tables and not inside_repeated_block(path):
            yield id(weight), "output head (size of the embedding)"


def _last_linears(module: nn.Module) -> Iterator[int]:
    last: Path = ()
    for path in walk(module):
        has_parameters = next(path[-1][1].parameters(recurse=False), None) is not None
        classes = [base.__name__ for _, ancestor in path[1:] for base in type(ancestor).__mro__]
        if has_parameters and path[1:] and not any(map(_NOT_NETWORK.search, classes)):
            last = path
    if not last or not isinstance(last[-1][1], nn.Linear) or inside_repeated_block(last):
        return
    head, word = last[-1][1], last[-1][0].rpartition("_")[2]
    for name, layer in last[-2][1].named_children():
        is_twin = isinstance(layer, nn.Linear) and layer.out_features == head.out_features and name.endswith(f"_{word}")
        weight = layer._parameters.get("weight")
        if weight is not None and (layer is head or is_twin):
            yield id(weight)
