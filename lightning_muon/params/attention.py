"""Finds attention modules, and the rows of their projections that make the query and the key of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_muon.compat.torch import is_compiled
from lightning_muon.config import join_names
from lightning_muon.params.layers import is_transposed_linear
from lightning_muon.params.uses import Path, clean_name, walk

# How the outputs of the projections are ordered. "separate": one projection for queries, one for keys. "blocks": one
# with all queries, then all keys, then all values. "heads": one with the queries of a key head, its key and its value,
# then those of the next key head. "latent": queries and keys of multi-head latent attention.
HeadLayout = Literal["separate", "blocks", "heads", "latent"]
FUSED: tuple[HeadLayout, ...] = ("blocks", "heads")
# Pattern of module names -> (query, key) projections, or (fused projection, "blocks" or "heads"); None: no attention.
ProjectionNames = Mapping[str, tuple[str, str] | None]

# Names in lower case, as in transformers, torch, torchtitan, timm and diffusers.
_SEPARATE = (
    *(("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("wq", "wk"), ("to_q", "to_k"), ("q_lin", "k_lin")),
    *(("linear_q", "linear_k"), ("query_proj", "key_proj")),
)
_FUSED: dict[str, HeadLayout] = {
    **dict.fromkeys(("c_attn", "qkv", "qkv_proj", "wqkv", "to_qkv", "in_proj_weight"), "blocks"),
    **dict.fromkeys(("query_key_value", "linear_qkv"), "heads"),
}
# Multi-head latent attention of DeepSeek and Kimi: queries, keys and values, the shared rotary part of the keys.
_LATENT = (("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"), ("q_proj", "kv_b_proj", "kv_a_proj_with_mqa"))
WHAT_TO_PASS = (
    "Pass projections={pattern of module names: (query, key)} with the names of two layers (or parameters) of these "
    "modules; (name, 'blocks') for one that makes all queries, then all keys, then all values; (name, 'heads') for one "
    "that does so head by head; None for modules to leave alone"
)
# Norms between a projection and the logits.
_NORMS = {
    *(f"{what}{norm}" for what in ("q", "k", "qk", "query", "key") for norm in ("_norm", "_layernorm", "_layer_norm")),
    *("ln_q", "ln_k", "norm_q", "norm_k", "norm_query", "norm_key"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A layer that computes queries or keys; its parameters are those that the optimizer steps."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    dim: int  # Dimension of the weight along which its outputs lie.
    module: nn.Module | None  # `None` if the attention module holds the parameters itself.

    @property
    def num_rows(self) -> int:
        """Number of outputs."""
        return self.weight.shape[self.dim]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadRows:
    """The rows of each head, and the power of ``gamma`` by which they are scaled."""

    query: Tensor  # (heads, size), int64: rows of the query projection.
    query_powers: Tensor  # (size), float32
    key: Tensor  # (key heads, size of a key), int64: rows of the key projection.
    key_power: float


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionModule:
    """An attention module whose projections are known."""

    name: str
    module: nn.Module
    layout: HeadLayout
    query: Projection
    key: Projection  # The same as `query` if they are fused.
    num_rotary: int = 0  # For "latent": the last elements of a query, whose counterpart in the key all heads share.
    is_given: bool = False  # The user has named the projections.

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weights and biases, each once."""
        found = (self.query.weight, self.query.bias, self.key.weight, self.key.bias)
        return list(dict.fromkeys(parameter for parameter in found if parameter is not None))

    def num_heads(self, observed: int, size: int) -> int:
        """Number of query heads on all tensor-parallel ranks, from ``observed`` heads of ``size`` elements on one."""
        return observed if self.layout in FUSED else self.query.num_rows // size

    def head_rows(self, num_heads: int, size: int) -> HeadRows:
        """The rows of ``num_heads`` query heads of ``size`` elements.

        Query and key of a head are scaled by ``gamma ** 0.5``. A key that several query heads share is not scaled, as
        this would change the other heads, and the query is scaled by ``gamma``: so for grouped queries, and for the
        rotary part of latent keys, as in Kimi K2 (arXiv:2507.20534, section 2.1).
        """
        queries = torch.arange(num_heads * size).view(num_heads, -1)
        powers = torch.full((size,), 0.5)
        if self.layout == "latent":
            powers[size - self.num_rotary :] = 1.0
            self._require(self.key, self.key.num_rows % num_heads == 0, num_heads, size)
            keys = torch.arange(self.key.num_rows).view(num_heads, -1)[:, : size - self.num_rotary]
            return HeadRows(query=queries, query_powers=powers, key=keys, key_power=0.5)
        rows = self.key.num_rows
        num_keys = rows // size if self.layout == "separate" else (rows // size - num_heads) // 2
        expected = num_keys * size if self.layout == "separate" else (num_heads + 2 * num_keys) * size
        self._require(self.key, num_keys > 0 and rows == expected and num_heads % num_keys == 0, num_heads, size)
        if self.layout == "heads":
            groups = torch.arange(rows).view(num_keys, -1, size)
            queries, keys = groups[:, :-2].reshape(num_heads, size), groups[:, -2]
        else:
            first = 0 if self.layout == "separate" else num_heads * size
            keys = torch.arange(first, first + num_keys * size).view(num_keys, size)
        is_shared = num_keys < num_heads
        powers = torch.ones_like(powers) if is_shared else powers
        return HeadRows(query=queries, query_powers=powers, key=keys, key_power=0.0 if is_shared else 0.5)

    def _require(self, projection: Projection, fits: bool, num_heads: int, size: int) -> None:
        if not fits or (self.layout not in FUSED and self.query.num_rows != num_heads * size):
            raise ValueError(
                f"{self.name}: its attention has {num_heads} heads of {size}, which do not make up the "
                f"{self.query.num_rows} rows of {self.query.name!r} and the {projection.num_rows} rows of "
                f"{projection.name!r} in the order {self.layout!r}"
            )


def find_attentions(root: nn.Module, names: ProjectionNames) -> list[AttentionModule]:
    """The attention modules of ``root``, each once, in the order of ``root.modules()``.

    ``names`` are those that the user gives. Raises a ``ValueError`` that names each module that looks like attention
    and whose projections are not known, or whose logits do not follow from them.
    """
    paths = {path[-1][1]: path for path in reversed(list(walk(root)))}  # The first of several names.
    given = {module: _given(_name(path), names) for module, path in paths.items()}
    unused = set(names) - {pattern for pattern in given.values() if pattern is not None}
    if unused:
        raise ValueError(f"projections: no module has a name like {sorted(unused)}")
    found: dict[nn.Module, AttentionModule] = {}
    problems: dict[str, str] = {}
    for module in root.modules():
        name, pattern = _name(paths[module]), given[module]
        try:
            attention = _known(name, module) if pattern is None else _as_given(name, module, names[pattern])
            if attention is not None:
                _require_observable(attention, paths[module])
                found[module] = attention
        except ValueError as error:
            problems[name] = str(error)
    for module in root.modules():
        above = [each for _, each in paths[module]]
        is_left_alone = any(names.get(given[each] or "", ()) is None for each in above)
        inside_of_known = any(each in found or _name(paths[each]) in problems for each in above)
        has_known = any(each in found or _name(paths[each]) in problems for each in module.modules())
        if _looks_like_attention(module) and not (is_left_alone or inside_of_known or has_known):
            problems[_name(paths[module])] = "no query and key projections of known names"
    _require_told(problems, found)
    return list(found.values())


def _name(path: Path) -> str:
    return clean_name(path[-1][0])


def _given(name: str, names: ProjectionNames) -> str | None:
    return next((pattern for pattern in names if fnmatchcase(name, pattern)), None)


def _known(name: str, module: nn.Module) -> AttentionModule | None:
    """The attention that ``module`` is, judged by the names of its layers and parameters, or ``None``."""
    own = {attribute.lower(): attribute for attribute in (*module._modules, *module._parameters)}
    parts = {lower: part for lower, attribute in own.items() if (part := _projection(module, attribute)) is not None}
    attention = None
    for query, key, rotary in _LATENT:
        if attention is None and {query, key, rotary} <= parts.keys():
            num_rotary = parts[rotary].num_rows - parts[key].weight.shape[1 - parts[key].dim]
            attention = AttentionModule(
                name=name, module=module, layout="latent", query=parts[query], key=parts[key], num_rotary=num_rotary
            )
    for query, key in _SEPARATE:
        if attention is None and query in parts and key in parts:
            attention = AttentionModule(name=name, module=module, layout="separate", query=parts[query], key=parts[key])
    for fused, layout in _FUSED.items():
        if attention is None and fused in parts:
            attention = AttentionModule(name=name, module=module, layout=layout, query=parts[fused], key=parts[fused])
    norms = [own[norm] for norm in sorted(_NORMS & own.keys()) if _is_norm(module._modules.get(own[norm]))]
    if attention is not None and norms:
        raise ValueError(
            f"{', '.join(norms)} normalizes queries or keys behind their projections, so that scaling these changes no "
            "logit, and bounds the logits itself; leave QKClip out"
        )
    return attention


def _as_given(name: str, module: nn.Module, names: tuple[str, str] | None) -> AttentionModule | None:
    if names is None:
        return None
    first, second = names
    attributes = (first,) if second in FUSED else (first, second)
    parts = [_projection(module, attribute) for attribute in attributes]
    missing = [attribute for attribute, part in zip(attributes, parts, strict=True) if part is None]
    if missing:
        raise ValueError(f"{type(module).__name__} has no layer with a matrix, and no matrix, named {missing}")
    layout: HeadLayout = second if second in FUSED else "separate"  # type: ignore[assignment]
    query, key = parts[0], parts[-1]
    assert query is not None and key is not None
    return AttentionModule(name=name, module=module, layout=layout, query=query, key=key, is_given=True)


def _projection(module: nn.Module, attribute: str) -> Projection | None:
    """The projection made of the layer, or the parameter, of that name, if it has a matrix."""
    layer = module._modules.get(attribute)
    if layer is None:
        weight, bias = module._parameters.get(attribute), attribute.removesuffix("_weight") + "_bias"
        biases = module._parameters.get(bias) if bias in module._parameters else None
    else:
        weight, biases = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or weight.ndim != 2:
        return None
    dim = 1 if layer is not None and is_transposed_linear(layer) else 0
    return Projection(name=attribute, weight=weight, bias=biases, dim=dim, module=layer)


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and not isinstance(module, nn.Identity)


def _require_observable(attention: AttentionModule, path: Path) -> None:
    if any(is_compiled(each) for each in (*(each for _, each in path), *attention.module.modules())):
        raise ValueError("it is compiled, so that its logits cannot be observed; leave it out of torch.compile")
    if getattr(attention.module, "bias_k", None) is not None:
        raise ValueError("add_bias_kv=True adds a key that no projection makes")


def _looks_like_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and sum(p.ndim == 2 for p in module.parameters()) > 1


def _require_told(problems: Mapping[str, str], found: Mapping[nn.Module, AttentionModule]) -> None:
    if problems:
        found_out = [f"{name or 'the model'}: {problem}" for name, problem in problems.items()]
        raise ValueError(f"QKClip cannot clip the logits of {join_names(found_out, separator='; ')}. {WHAT_TO_PASS}")
    if not found:
        raise ValueError(f"QKClip finds no attention in the model. {WHAT_TO_PASS}, or leave QKClip out")
    users: dict[nn.Parameter, str] = {}
    for attention in found.values():
        for parameter in attention.parameters:
            other = users.setdefault(parameter, attention.name)
            if other != attention.name:
                raise ValueError(
                    f"{other} and {attention.name} share the weights of a projection, which neither can clip alone; "
                    "leave QKClip out, or name one of them with None in projections"
                )
