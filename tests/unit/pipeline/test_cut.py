"""Which parts of a model are which stage, and what is left of it on a rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.pipeline.cut import (
    Absent,
    check_parameters,
    choose_stages,
    cut_by_costs,
    free,
    measure_flops,
    only,
    untie,
)
from lightning_muon.pipeline.model import StagedModel, find_staged_model
from tests.distributed.pipeline.models import WIDTH, causal_lm


class _Net(nn.Module):
    """Linear layers of these widths between an embedding and a head that may share its weight."""

    def __init__(self, inner: Sequence[int] = (4, 4, 4, 4), *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, each), nn.Linear(each, 4)) for each in inner)
        self.head = nn.Linear(4, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), target.numel()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _names(stages: Sequence[Sequence[object]]) -> list[list[str]]:
    return [[part.name for part in parts] for parts in stages]  # type: ignore[attr-defined]


def _model(net: nn.Module) -> StagedModel:
    return find_staged_model(net)


@pytest.mark.parametrize(
    ("inner", "num_stages", "sizes"),
    [
        # The head has 400 elements in a matrix, a block has 8 times its width, and the embedding is looked up.
        ((50, 50), 2, [2, 2]),
        ((10, 10, 10, 10), 2, [5, 1]),
        ((50, 50, 50), 4, [2, 1, 1, 1]),
        ((100, 100, 1, 1), 3, [2, 1, 3]),
        ((1,), 3, [1, 1, 1]),
        ((50, 50), 1, [4]),
    ],
)
def test_the_stage_with_the_most_work_has_least(inner: Sequence[int], num_stages: int, sizes: list[int]) -> None:
    stages = choose_stages(_model(_Net(inner)), num_stages)
    names = [name for each in _names(stages) for name in each]
    assert all(stages) and names == [part.name for part in _model(_Net(inner)).parts]
    work = [0, *(8 * each for each in inner), 400]

    def largest(lengths: Sequence[int]) -> int:
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        return max(sum(work[end - length : end]) for end, length in zip(ends, lengths, strict=True))

    assert largest([len(parts) for parts in stages]) == largest(sizes)


def _runs(costs: Sequence[float], starts: Sequence[int]) -> list[float]:
    return [sum(costs[start:end]) for start, end in pairwise([*starts, len(costs)])]


def test_a_cut_is_fast_and_then_small() -> None:
    draws = random.Random()
    for _ in range(200):
        num_parts = draws.randint(1, 9)
        num_stages = draws.randint(1, num_parts)
        seconds, memory = ([draws.choice((0, 1, 2, 10, 10.3, 50)) for _ in range(num_parts)] for _ in range(2))
        cuts = [(0, *inner) for inner in combinations(range(1, num_parts), num_stages - 1)]
        limit = 1.05 * min(max(_runs(seconds, cut)) for cut in cuts)
        smallest = min(max(_runs(memory, cut)) for cut in cuts if max(_runs(seconds, cut)) <= limit)
        found = tuple(cut_by_costs(seconds, memory, num_stages))
        assert found in cuts, (seconds, memory, num_stages)
        assert max(_runs(seconds, found)) <= limit and max(_runs(memory, found)) == smallest, (seconds, memory, found)


class _Images(nn.Module):
    """Convolutions, which take more FLOPs for each element of their weights than the layers behind them."""

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout()),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 300)),
            nn.Linear(300, 10),
        )
        self.example_input_array = example

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), target.numel()


def test_stages_follow_the_flops_of_an_example() -> None:
    net = _Images(torch.randn(2, 3, 16, 16))
    before, generator = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    model = _model(net)
    pixels = 2 * 16 * 16
    assert measure_flops(model) == [2 * 27 * 8 * pixels, 0, 2 * 72 * 8 * pixels, 2 * 2 * 128 * 300, 2 * 2 * 3000]
    assert [len(parts) for parts in choose_stages(model, 2)] == [2, 3]
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_without_flops_stages_follow_elements_of_matrices() -> None:
    class Looking(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images if images.sum() > 0 else -images

    net = _Images(torch.randn(2, 3, 16, 16))
    net.layers.insert(0, Looking())
    assert measure_flops(_model(net)) is None, "a forward that looks at values cannot be measured"
    assert measure_flops(_model(_Images())) is None
    assert [len(parts) for parts in choose_stages(_model(_Images()), 2)] == [4, 1], "the first linear layer is largest"


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"])
def test_a_head_takes_time_and_an_embedding_takes_none(kind: str) -> None:
    net = causal_lm(kind, num_layers=6, vocabulary=1000)
    model = _model(net)
    embedding, *layers, head = measure_flops(model) or ()
    length = net.config.max_position_embeddings
    assert embedding == 0 and head == 2 * length * WIDTH * 1000 and len(set(layers)) == 1
    elements = sum(p.numel() for p in model.parts[1].modules[0].parameters() if p.ndim > 1)
    assert layers[0] == 2 * length * elements + 4 * length**2 * WIDTH
    # On the meta device as on the CPU.
    with torch.device("meta"):
        assert measure_flops(_model(causal_lm(kind, num_layers=6, vocabulary=1000))) == [embedding, *layers, head]


def test_the_head_counts_as_layers_and_the_embedding_as_memory() -> None:
    net = causal_lm("llama", num_layers=12, vocabulary=880)
    model = _model(net)
    _, layer, *_, head = measure_flops(model) or ()
    assert 4.9 < head / layer < 5.1
    # 17 layers' work on 3 stages: 6 at most. The first stage, with the embedding, has one layer less than the second.
    assert [len(parts) for parts in choose_stages(model, 3)] == [1 + 5, 6, 1 + 1]


def test_first_parts_say_where_stages_begin() -> None:
    stages = choose_stages(_model(_Net()), 3, ["embedding", "blocks.1", "head"])
    assert _names(stages) == [["embedding", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3"], ["head"]]


@pytest.mark.parametrize(
    ("num_stages", "first_parts", "match"),
    [
        (7, None, "has 6 parts, too few for 7 stages"),
        (2, ["embedding", "block.1"], r"names block\.1; the parts of the model are embedding, blocks\.0"),
        (2, ["embedding", "blocks.1", "head"], "of the 2 stages in order, beginning with embedding; got"),
        (2, ["blocks.0", "blocks.1"], "beginning with embedding"),
        (3, ["embedding", "blocks.2", "blocks.1"], "in order"),
        (3, ["embedding", "blocks.2", "blocks.2"], "in order"),
    ],
)
def test_stages_that_cannot_be_are_refused(num_stages: int, first_parts: list[str] | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        choose_stages(_model(_Net()), num_stages, first_parts)


def test_a_parameter_of_no_part_is_refused() -> None:
    net = _Net()
    check_parameters(net, _model(net).parts)
    net.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"scale \(3,\) belongs to no part of the pipeline \(embedding to head\)"):
        check_parameters(net, _model(net).parts)


def test_parts_that_share_a_parameter_get_copies() -> None:
    net = _Net(tied=True)
    net.embedding.weight.requires_grad_(False)
    first = net.embedding.weight
    net.blocks[1][0].weight = net.blocks[0][0].weight
    net.blocks[2][1].weight = net.blocks[2][0].weight  # Twice in one part: stays one parameter.
    parts = _model(net).parts
    tied = untie(parts)
    assert [[(part.name, name) for part, _, name in places] for places in tied] == [
        [("embedding", "weight"), ("head", "weight")],
        [("blocks.0", "weight"), ("blocks.1", "weight")],
    ]
    assert net.embedding.weight is first and net.head.weight is not first
    assert torch.equal(net.head.weight, first) and not net.head.weight.requires_grad
    assert net.blocks[1][0].weight is not net.blocks[0][0].weight and net.blocks[1][0].weight.requires_grad
    assert net.blocks[2][1].weight is net.blocks[2][0].weight
    assert untie(parts) == []


def test_names_of_what_is_left_are_those_of_the_model() -> None:
    net = _Net()
    whole = {name: value.clone() for name, value in net.state_dict().items()}
    model = _model(net)
    stages = choose_stages(model, 2, ["embedding", "blocks.2"])
    free(stages[0])
    assert set(net.state_dict()) == {name for name in whole if name.startswith(("blocks.2", "blocks.3", "head"))}
    assert all(torch.equal(value, whole[name]) for name, value in net.state_dict().items())
    assert {name for name, _ in net.named_parameters()} == set(net.state_dict())


def test_stages_one_after_the_other_are_the_whole_forward() -> None:
    net, tokens = _Net(), torch.randint(0, 100, (3, 5))
    expected = net(tokens)
    model = _model(net)
    stages = dict(enumerate(choose_stages(model, 4)))
    modules = dict(net.named_modules())
    hidden = None
    for stage, parts in stages.items():
        with only(stages, stage):
            # Modules of the other stages are not there, those of this one are.
            assert {name for name, child in net.named_modules() if isinstance(child, Absent)} == {
                part.name for other, own in stages.items() if other != stage for part in own
            }
            # A forward of the whole model, too, runs this stage alone.
            through_net = net(tokens if hidden is None else hidden)
        hidden = model.run(parts, hidden, tokens)
        assert torch.equal(through_net, hidden)
    assert torch.equal(hidden, expected)
    assert dict(net.named_modules()) == modules


def test_an_absent_module_hands_on_and_keeps_its_kind() -> None:
    original = nn.Linear(2, 2)
    original.attention_type = "sliding"
    absent = copy.deepcopy(Absent(original))
    assert (absent.attention_type, absent.in_features) == ("sliding", 2) and not list(absent.parameters())
    hidden = torch.randn(3, 2)
    assert absent(hidden, "mask", position=1) is hidden
    assert torch.equal(absent(torch.arange(3)), torch.zeros(()))
