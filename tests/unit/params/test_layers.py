"""Places of parameters, kinds of layers, and output heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from lightning_muon.params.layers import find_output_heads, layer_kind, parameter_uses
from lightning_muon.params.routing import route_module


def _plane(name: str) -> nn.Module:
    """A layer of a class of this name, whose weight is 2-D."""
    layer = type(name, (nn.Module,), {})()
    layer.weight = nn.Parameter(torch.ones(4, 6))
    return layer


def _kinds(module: nn.Module) -> dict[str, str]:
    return {uses[0].name: layer_kind(uses[0])[0] for uses in parameter_uses(module)}


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Linear(3, 5), "matrix"),
        (nn.Linear(9, 1), "matrix"),
        # fully_shard swaps the class of a module for a subclass like the first one.
        (type("FSDPLinear", (nn.Linear,), {})(3, 5), "matrix"),
        (type("PatchEmbedding", (nn.Linear,), {})(3, 5), "matrix"),
        (Conv1D(5, 3), "matrix"),
        (nn.Conv1d(3, 5, 3), "convolution"),
        (nn.Conv2d(3, 5, 1), "convolution"),
        (nn.ConvTranspose3d(3, 5, 2), "convolution"),
        (nn.Conv1d(4, 4, 3, groups=4), "elementwise"),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), "elementwise"),
        (nn.Bilinear(3, 4, 5), "stack"),
        (nn.Embedding(7, 3), "elementwise"),
        (nn.EmbeddingBag(7, 3), "elementwise"),
        (_plane("VocabParallelEmbedding"), "elementwise"),
        (nn.LayerNorm((4, 6)), "elementwise"),
        (_plane("RMSNormOverPlanes"), "elementwise"),
        (_plane("LayerNormLinear"), "matrix"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_the_weight_of_a_layer_has_the_kind_of_the_layer(layer: nn.Module, kind: str) -> None:
    kinds = _kinds(layer)
    assert kinds.pop("weight") == kind
    assert set(kinds.values()) <= {"elementwise"}


@pytest.mark.parametrize(
    ("names", "shape", "kind"),
    [
        ("text_projection token_mixer posterior_proj", (4, 6), "matrix"),
        ("A_log pos_embed class_token relative_position_bias_table gate_up_proj_bias", (4, 6), "elementwise"),
        ("w1 gate_up_proj", (3, 4, 6), "stack"),
        ("kernel", (3, 4, 2, 2), "convolution"),
        # Vectors.
        *(("proj", shape, "elementwise") for shape in ((1, 6), (6, 1), (3, 1, 1), (3, 4, 1), (1, 4, 6), (), (5,))),
    ],
)
def test_a_raw_parameter_is_judged_by_shape_and_name(names: str, shape: tuple[int, ...], kind: str) -> None:
    module = nn.Module()
    for name in names.split():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    assert _kinds(module) == dict.fromkeys(names.split(), kind)


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.inherited)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.overridden)


class Idioms(Base):
    """Its parameters are named after what `forward` does with them: read as (outputs, inputs), turned, or as no matrix.

    `both` and `paired` are read in two ways; the lines of `followed` are not understood.
    """

    outputs_first = (
        "inherited both paired typed scaled masked keyword turned left first expert_rows experts_turned experts_each"
    ).split()
    inputs_first = "plain overridden turned_twice expert experts_einsum experts_numbered experts_a experts_b".split()
    others = (
        "added exponent handed over_heads start looked_up gathered indexed in_groups per_head activation followed"
    ).split()

    def __init__(self) -> None:
        super().__init__()
        for name in (*self.outputs_first, *self.inputs_first, *self.others, "filter"):
            is_stack = name.startswith(("expert", "over", "in_groups", "filter"))
            self.register_parameter(name, nn.Parameter(torch.zeros((4, 4, 4) if is_stack else (4, 4))))
        self.linear = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return self.inherited.device

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.overridden

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, w = self.left @ super().forward(x), self.paired
        for number, matrix in enumerate(self.experts_numbered):
            x = torch.matmul(self.first, x[number] @ matrix)
        for a, b in zip(self.experts_a, self.experts_b, strict=True):
            x = torch.relu(x @ a) @ b
        typed: torch.Tensor = self.typed
        scaled = self.scaled * 0.5
        x = F.linear(x, typed) + F.linear(x, scaled) + F.linear(x, self.masked * self.mask)
        x = F.linear(input=x, bias=None, weight=self.keyword) + x.matmul(self.turned.T)
        x = F.linear(x @ self.both, self.both) + F.linear(x, self.paired) @ self.plain.to(x.dtype)
        for number in ids:
            expert = self.expert[number].to(x.dtype)
            x = torch.mm(x, expert) + F.linear(x, self.expert_rows[number])
        x = torch.bmm(x, self.experts_turned.transpose(-2, -1)) @ self.turned_twice.mT.mT
        x = sum(F.linear(x, each) for each in self.experts_each)
        x = torch.einsum("eci, eio -> eco", x, self.experts_einsum) + torch.einsum("bi,ihd->bhd", x, self.over_heads)
        x = x + torch.einsum("bhd,hd->bh", x, self.per_head) + self.added * -torch.exp(self.exponent.float())
        state = self.start
        for _ in range(3):
            state = torch.tanh(state @ w.T)
        x = x + F.embedding(ids, self.looked_up) @ self.looked_up.T + self.gathered[ids.long()] @ self.gathered.T
        x = x + self.indexed.index_select(0, ids) @ self.indexed + F.conv1d(x, self.filter)
        for followed in (self.followed, None):
            x = x @ followed
        x = max(self.linear(x), self.handed) + F.conv1d(x, self.in_groups, None, 1, 1, 1, 2)
        return (x * self.activation) @ x


def test_a_raw_parameter_is_what_the_code_of_its_layer_does_with_it() -> None:
    routes = route_module(Idioms())
    kinds = {name: (route.kind != "elementwise", route.is_transposed) for name, route in routes.items()}
    assert {name for name in Idioms.outputs_first if kinds[name] != (True, False)} == set()
    assert {name for name in Idioms.inputs_first if kinds[name] != (True, True)} == set()
    assert {name for name in Idioms.others if kinds[name][0]} == set()
    assert [routes[name].kind for name in ("both", "experts_turned", "filter")] == ["matrix", "stack", "convolution"]
    assert routes["gathered"].reason == "looked up" and routes["handed"].reason.startswith("unknown use")
    assert routes["plain"].reason.endswith("(inputs, outputs)")


def test_a_reparametrized_weight_keeps_the_kind_of_its_layer() -> None:
    normed = parametrizations.weight_norm(nn.Conv1d(4, 5, 3))
    assert _kinds(normed) == {
        "bias": "elementwise",
        "parametrizations.weight.original0": "elementwise",
        "parametrizations.weight.original1": "convolution",
    }
    assert _kinds(parametrizations.orthogonal(nn.Linear(4, 5, bias=False))) == {
        "parametrizations.weight.original": "matrix"
    }


class Declared(nn.ModuleDict):
    def get_output_embeddings(self) -> nn.Module:
        if "head" not in self:
            raise RuntimeError("this model has no head")
        return self["head"]


def test_what_get_output_embeddings_returns_is_the_head() -> None:
    wrapper = nn.ModuleList([Declared({"head": nn.Linear(4, 9), "body": nn.Linear(4, 4)})])
    assert find_output_heads(wrapper) == ({id(wrapper[0]["head"].weight): "output head"}, set())
    model = Declared({"body": nn.Linear(4, 9)})
    assert find_output_heads(model) == ({}, {id(model["body"].weight)}), "a getter that raises is passed over"


def test_a_linear_of_embedding_size_is_a_head_outside_of_blocks() -> None:
    block = nn.ModuleDict({"up": nn.Linear(4, 9), "down": nn.Linear(9, 4)})
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(9, 4),
            "head": nn.Linear(4, 9),
            "blocks": nn.ModuleList([block]),
            "last": nn.Linear(4, 4),
        }
    )
    assert list(find_output_heads(model)[0]) == [id(model["head"].weight)]
    # A square table makes no square layer a head.
    model = nn.ModuleDict({"positions": nn.Embedding(4, 4), "mix": nn.Linear(4, 4), "last": nn.Linear(4, 2)})
    assert find_output_heads(model) == ({}, {id(model["last"].weight)})


def test_a_guessed_head_is_the_last_layer_of_the_network() -> None:
    loss = type("FocalLoss", (nn.ModuleDict,), {})({"centers": nn.Linear(4, 4)})
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "last": nn.Linear(4, 2), "loss": loss, "ce": nn.CrossEntropyLoss()})
    assert find_output_heads(model)[1] == {id(model["last"].weight)}
    assert not find_output_heads(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))[1]
    assert not find_output_heads(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))]))[1]
    towers = nn.ModuleDict({name: nn.Linear(4, 2) for name in ("image_fc", "image_projection", "text_projection")})
    assert find_output_heads(towers)[1] == {id(towers[name].weight) for name in ("image_projection", "text_projection")}
