"""Which modules are attention by the names of their layers, and which rows make the heads."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon.params.attention import find_attentions


def _module(**layers: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


def _linear(rows: int) -> nn.Linear:
    return nn.Linear(4, rows)


class SelfAttention(nn.Module):
    """By its name attention, whose layers have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _linear(4), _linear(4)


def _transformers(kind: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes, **options, vocab_size=31, pad_token_id=0))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("Qwen2Model", {"num_key_value_heads": 1}, ("layers.0.self_attn", "separate", "q_proj", "k_proj")),
        ("BertModel", {}, ("encoder.layer.0.attention.self", "separate", "query", "key")),
        ("BloomModel", {"n_head": 3}, ("h.0.self_attention", "heads", "query_key_value", "query_key_value")),
        ("ModernBertModel", {}, ("layers.0.attn", "blocks", "Wqkv", "Wqkv")),
    ],
)
def test_layers_of_transformers_are_known(kind: str, options: dict[str, Any], expected: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    first = find_attentions(_transformers(kind, **options), {})[0]
    assert (first.name, first.layout, first.query.name, first.key.name) == expected


def test_models_with_norms_of_queries_and_keys_are_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"layers.0.self_attn: k_norm, q_norm normalizes .* leave QKClip out"):
        find_attentions(_transformers("Qwen3Model", num_key_value_heads=1, head_dim=4), {})
    assert find_attentions(_module(q_proj=_linear(4), k_proj=_linear(4), q_norm=nn.Identity()), {})


@pytest.mark.parametrize(
    ("num_heads", "rows", "layout", "queries", "keys"),
    [
        (2, 12, "blocks", [[0, 1], [2, 3]], [[4, 5], [6, 7]]),
        (4, 12, "blocks", [[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9]]),
        (2, 12, "heads", [[0, 1], [6, 7]], [[2, 3], [8, 9]]),
        (4, 16, "heads", [[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [12, 13]]),
    ],
)
def test_rows_of_fused_projections(
    num_heads: int, rows: int, layout: str, queries: list[list[int]], keys: list[list[int]]
) -> None:
    (found,) = find_attentions(_module(mixed=_linear(rows)), {"": ("mixed", layout)})
    heads = found.head_rows(num_heads, 2)
    assert (heads.query.tolist(), heads.key.tolist()) == (queries, keys)
    shared = len(queries) > len(keys)
    assert (heads.query_powers.tolist(), heads.key_power) == (([1.0] * 2, 0.0) if shared else ([0.5] * 2, 0.5))


def test_rows_that_are_no_heads_are_an_error() -> None:
    (found,) = find_attentions(_module(qkv=_linear(13)), {})
    with pytest.raises(ValueError, match=r"2 heads of 2, which do not make up the 13 rows of 'qkv'"):
        found.head_rows(2, 2)
    (found,) = find_attentions(_module(wq=_linear(12), wk=_linear(8)), {})
    with pytest.raises(ValueError, match=r"the 12 rows of 'wq' and the 8 rows of 'wk' in the order 'separate'"):
        found.head_rows(3, 4)


def _compiled() -> nn.Module:
    module = nn.Sequential(_module(wq=_linear(4), wk=_linear(4)))
    module.compile()
    return module


def _sharing() -> nn.Module:
    shared = _linear(4)
    return nn.Sequential(_module(wq=shared, wk=_linear(4)), _module(wq=shared, wk=_linear(4)))


@pytest.mark.parametrize(
    ("module", "names", "match"),
    [
        (nn.Sequential(SelfAttention()), {}, "0: no query and key projections of known names. Pass projections="),
        (nn.Sequential(_linear(4)), {}, "finds no attention in the model"),
        (nn.Sequential(SelfAttention()), {"*attn": ("one", "two")}, r"no module has a name like \['\*attn'\]"),
        (nn.Sequential(SelfAttention()), {"0": ("one", "three")}, r"0: SelfAttention has no layer .*\['three'\]"),
        (_compiled(), {}, "0: it is compiled"),
        (_sharing(), {}, "0 and 1 share the weights"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), {}, "the model: add_bias_kv=True"),
    ],
)
def test_what_cannot_be_told_is_named(module: nn.Module, names: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        find_attentions(module, names)


def test_a_module_may_be_left_alone() -> None:
    module = nn.Sequential(SelfAttention(), _module(wq=_linear(4), wk=_linear(4)))
    assert [each.name for each in find_attentions(module, {"0": None})] == ["1"]
    assert [each.is_given for each in find_attentions(module, {"0": ("one", "two")})] == [True, False]
