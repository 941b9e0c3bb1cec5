"""Places of parameters, kinds of layers, and output heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from lightning_muon.params.layers import find_output_heads, layer_kind
from lightning_muon.params.routing import route_module
from lightning_muon.params.uses import parameter_uses


class Conv1D(nn.Module):
    """The linear layer of GPT-2 as transformers writes it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))


def _plane(name: str) -> nn.Module:
    """A layer of a class of this name, whose weight is 2-D."""
    layer = type(name, (nn.Module,), {})()
    layer.weight = nn.Parameter(torch.ones(4, 6))
    return layer


class Raw(nn.Module):
    def __init__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_parameter(
            name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
        )


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
    ("name", "shape", "kind"),
    [
        ("text_projection", (4, 6), "matrix"),
        ("token_mixer", (4, 6), "matrix"),
        ("posterior_proj", (4, 6), "matrix"),
        ("w1", (3, 4, 6), "stack"),
        ("A_log", (4, 6), "elementwise"),
        ("pos_embed", (4, 6), "elementwise"),
        ("class_token", (4, 6), "elementwise"),
        ("relative_position_bias_table", (4, 6), "elementwise"),
        ("gate_up_proj_bias", (4, 6), "elementwise"),
        ("row", (1, 6), "elementwise"),
        ("column", (6, 1), "elementwise"),
        ("gate_up_proj", (3, 4, 6), "stack"),
        ("temperature", (3, 1, 1), "elementwise"),
        ("scales", (3, 4, 1), "elementwise"),
        ("anything", (1, 4, 6), "elementwise"),
        ("kernel", (3, 4, 2, 2), "convolution"),
        ("scalar", (), "elementwise"),
        ("vector", (5,), "elementwise"),
    ],
)
def test_a_raw_parameter_is_judged_by_shape_and_name(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert _kinds(Raw(name, *shape)) == {name: kind}


class Mixed(nn.Module):
    """Its parameters are named after what `forward` does with them."""

    def __init__(self) -> None:
        super().__init__()
        planes = ("outputs_first", "inputs_first", "turned", "both", "added", "exponent", "handed", "inputs_first_row")
        stacks = ("stack_inputs_first", "stack_outputs_first", "stack_turned", "stack_einsum", "over_heads", "filter")
        for name in (*planes, *stacks, "filter_in_groups"):
            shape = (4, 4, 4)[: 2 if name in planes else 3]
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.listed = nn.ParameterList([torch.zeros(4, 4)])
        self.by_name = nn.ParameterDict({"used": torch.zeros(4, 4), "scale": torch.zeros(4, 4)})

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = F.linear(x, weight=self.outputs_first) @ self.inputs_first + x.matmul(self.turned.T)
        x = F.linear(x @ self.both, self.both) + self.added * -torch.exp(self.exponent.float())
        x = max(x, self.handed)
        expert = self.stack_inputs_first[number].to(x.dtype)
        x = torch.mm(x, expert) + F.linear(x, self.stack_outputs_first[number])
        x = torch.bmm(x, self.stack_turned.transpose(-2, -1)) + torch.einsum("eci, eio -> eco", x, self.stack_einsum)
        x = torch.einsum("bi,ihd->bhd", x, self.over_heads)
        x = F.conv1d(x, self.filter) + F.conv1d(x, self.filter_in_groups, groups=2)
        x = sum(x @ weight.T for weight in self.listed)
        return x @ self.by_name["used"] * self.by_name["scale"] @ self.inputs_first_row.mT.mT


def test_a_raw_parameter_is_what_the_code_of_its_layer_does_with_it() -> None:
    routes = route_module(Mixed())
    assert {name for name, route in routes.items() if route.kind == "elementwise"} == {
        "added", "exponent", "handed", "over_heads", "filter_in_groups", "by_name.scale",
    }  # fmt: skip
    assert {name for name, route in routes.items() if route.is_transposed and "(inputs, outputs)" in route.reason} == {
        "inputs_first", "inputs_first_row", "stack_inputs_first", "stack_einsum", "by_name.used",
    }  # fmt: skip
    kinds = {name: route.kind for name, route in routes.items()}
    assert (kinds["both"], kinds["listed.0"], kinds["stack_turned"]) == ("matrix", "matrix", "stack")
    assert kinds["filter"] == "convolution"


class Base(nn.Module):
    """Its parameters are named after how the code comes to them, and `start` is what is multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.inherited)

    def returned(self) -> torch.Tensor:
        return self.by_method


class Idioms(Base):
    """What is a matrix, stored as (outputs, inputs) or turned, and what is none."""

    outputs_first = (
        "inherited by_method paired typed scaled masked keyword joined bare walrus again left_of_own viewed by_function"
    ).split()
    inputs_first = "equation einops_order chosen enumerated zipped item both_branches transposed_filter".split()
    others = "start looked_up gathered indexed handed in_groups other_layer per_head added activation".split()

    def __init__(self) -> None:
        super().__init__()
        for name in (*self.outputs_first, *self.inputs_first, *self.others):
            size = torch.zeros((4, 4, 4) if name in ("in_groups", "transposed_filter") else (4, 4))
            self.register_parameter(name, nn.Parameter(size))
        for name in ("enumerated", "zipped", "item"):
            delattr(self, name)
            setattr(self, name, nn.ParameterDict({"0": size}) if name == "item" else nn.ParameterList([size]))
        self.linear = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return self.inherited.device

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        from einops import einsum

        equation = "bd,dh->bh"
        x, w = super().forward(x), self.paired
        typed: torch.Tensor = self.typed
        scaled = self.scaled * 0.5
        x = F.linear(x, w) + F.linear(x, typed) + F.linear(x, scaled) + F.linear(x, self.masked * mask)
        x = F.linear(input=x, bias=None, weight=self.keyword) + F.linear(x, self.returned())
        x = F.linear(x, torch.cat([self.joined, self.bare])) + F.linear(x, self.bare)
        x = x @ (w := self.walrus).T
        w = self.again.to(x.dtype)
        x = torch.einsum(equation, x, self.equation) + (self.left_of_own * self.scaling) @ x
        x = x @ w.T + einsum(x, self.einops_order, "batch i, i o -> batch o")
        x = x @ self.viewed.view(4, 4) + torch.matmul(x, self.by_function.t())
        x = x @ (self.chosen if mask is None else self.chosen.half())
        for _, w in enumerate(self.enumerated):
            x = x @ w
        for w, _ in zip(self.zipped, ids, strict=True):
            x = x @ w
        for key, w in self.item.items():
            x = x @ w + len(key)
        if mask is None:
            w = self.both_branches
        else:
            w = self.both_branches.half()
        x = F.conv_transpose1d(x @ w, self.transposed_filter)
        state = self.start
        for _ in range(3):
            state = torch.tanh(state @ self.paired.T)
        x = x + F.embedding(ids, self.looked_up) @ self.looked_up.T + self.gathered[ids] @ self.gathered.T
        x = x + self.indexed.index_select(0, ids) @ self.indexed + F.conv1d(x, self.in_groups, None, 1, 1, 1, 2)
        x = self.linear(self.handed) + F.linear(self.other_layer, x) + torch.einsum("bhd,hd->bh", x, self.per_head)
        return (x * self.activation) @ x + self.added


def test_plain_idioms_are_understood() -> None:
    routes = {name.removesuffix(".0"): route for name, route in route_module(Idioms()).items()}
    kinds = {name: (route.kind != "elementwise", route.is_transposed) for name, route in routes.items()}
    assert {name for name in Idioms.outputs_first if kinds[name] != (True, False)} == set()
    assert {name for name in Idioms.inputs_first if kinds[name] != (True, True)} == set()
    assert {name for name in Idioms.others if kinds[name][0]} == set()
    assert routes["gathered"].reason == "looked up" and routes["handed"].reason.startswith("unknown use")


def test_a_reparametrized_weight_keeps_the_kind_of_its_layer() -> None:
    normed = parametrizations.weight_norm(nn.Conv1d(4, 5, 3))
    assert _kinds(normed) == {
        "bias": "elementwise",
        "parametrizations.weight.original0": "elementwise",
        "parametrizations.weight.original1": "convolution",
    }
    assert set(_kinds(parametrizations.weight_norm(nn.Conv1d(4, 4, 3, groups=2))).values()) == {"elementwise"}
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
