"""Ways to train on 8 ranks, with bytes and seconds worked out by hand.

test_plan.py compares all of them with the table of docs/planning.md.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from lightning_muon.cli.plan import strategy_line
from lightning_muon.cli.plan_fit import MODES, Job, Sizes, Way, best_rows, row_of, sizes_of
from lightning_muon.engine.options import Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK
from lightning_muon.params.shapes import ModelShapes, ParameterShape, read_shapes
from lightning_muon.schedule.cost import PRESETS, CostModel

# An embedding of 32 x 8, 8 layers of a matrix of 8 x 8 and a vector, a norm and an output head of 32 x 8:
# 256 + 8 * 72 + 8 + 256 = 1096 elements, of which 512 are on Muon and 584 on AdamW; 520 are in no layer.
MODEL = ModelShapes(
    name="tiny",
    source="",
    parameters=(
        ParameterShape(name="embed.weight", shape=(32, 8), kind="elementwise", reason="embedding"),
        *(
            each
            for i in range(8)
            for each in (
                ParameterShape(name=f"layers.{i}.weight", shape=(8, 8), kind="matrix"),
                ParameterShape(name=f"layers.{i}.norm", shape=(8,), kind="elementwise"),
            )
        ),
        ParameterShape(name="norm.weight", shape=(8,), kind="elementwise"),
        ParameterShape(name="head.weight", shape=(32, 8), kind="elementwise", reason="output head"),
    ),
)
FLOPS, WITHIN, BETWEEN = 1e4, 1e6, 1e5
_ROUNDED = 1e-5  # Bytes of a transfer are whole numbers.
COST = CostModel(flops_per_second=FLOPS, memory_bytes_per_second=1e15, bandwidth=(WITHIN, BETWEEN))
# Two nodes of 4 ranks, one row of 16 tokens for each rank, float32 weights that compute in bfloat16.
JOB = Job(
    model=MODEL,
    cost=COST,
    num_ranks=8,
    node_ranks=4,
    rows=8,
    length=16,
    memory_bytes=1e9,
    precision="bf16-mixed",
    flexdemo=FlexDeMoConfig(base="muon", replicator=DCTTopK(chunk_size=64)),
)
SIZES = sizes_of(JOB)
# Of each token, the 16 elements that go into and come out of each of 8 matrices, in bfloat16; 32 logits with their
# probabilities in float32 and two gradients of these, and the input of the head.
ACTIVATIONS = 8 * 16 * 2 + 32 * (2 + 4 + 8) + 8 * 2
STATE = 4 * (512 + 2 * 584)  # A momentum for each element on Muon, two moments for all others.
FORWARD = 16 * 2 * (8 * 64 + 256) / FLOPS  # Seconds of a row: 8 matrices and the output head.
NEWTON_SCHULZ = 5 * 2 * 64 * (2 * 8 + 8) / FLOPS  # Seconds of a matrix.


def _ring(num_bytes: float, size: int, nodes: int = 1) -> float:
    """Seconds: of the (g - 1) / g that a rank sends, n of g steps go to another of n nodes."""
    sent = num_bytes * (size - 1) / size
    return sent / WITHIN if nodes == 1 else max(sent * nodes / size / BETWEEN, sent * (1 - nodes / size) / WITHIN)


_EMBEDDING = 256 / 1096  # Share of the gathers and sums that nothing hides.
_GATHER, _SUM = _ring(2 * 1096, 8, 2), _ring(4 * 1096, 8, 2)
# Two stages: the output head is as much work as 4 layers, so that the first one has (8 + 4) / 2 = 6 layers, with the
# embedding 6 * 72 + 256 elements; the last one has 2 layers and the head.
_LAYERS, _FIRST = 6 * 72, 688
_BOTH_PASSES = 16 * (2 * 6 * 16 * 2 + 8 * 2)  # Activations.


class Case(NamedTuple):
    """What a way takes; ``None`` is not looked at."""

    way: Way
    # Weights, gradients, state, activations and buffers.
    columns: tuple[float, float, float, float, float] | None
    most: float | None  # Of the peak, what is there beside weights and state.
    seconds: float | None  # Of forward, backward and sums.
    muon_seconds: float | None
    changed: Mapping[str, Any] = {}  # Of JOB.


CASES: dict[str, Case] = {
    # One bucket has all gradients. Each rank owns one matrix of 128 bytes in bfloat16, and sends it to 7 others.
    "ddp": Case(
        Way(mode="ddp", replicate=8),
        (4 * 1096, 4 * 1096, STATE, 16 * ACTIVATIONS, 2 * 7 * 128 + 4 * 1096),
        2 * 7 * 128 + 16 * ACTIVATIONS + 2 * 1096,
        3 * FORWARD + _EMBEDDING * 2 * _SUM,
        NEWTON_SCHULZ + 7 * 128 / BETWEEN,
    ),
    # Cores compute and transfer one after the other, and gloo's sum sends twice as much.
    "fsdp on CPUs": Case(
        Way(mode="fsdp", shard=8), None, None, 3 * FORWARD + 2 * _GATHER + 2 * _SUM, None, {"is_cpu": True}
    ),
    # A stage on each node. A rank has 2 rows, each a micro-batch, so that the bubble is one of three slots. The first
    # stage needs most: both micro-batches are on their way, with all gradients and gathered weights. 1.5 matrices of
    # 128 bytes for each rank are gathered and sent back.
    "pipeline": Case(
        Way(mode="pipeline", pipeline=2, shard=4, passes=2),
        (_FIRST, 4 * _FIRST, 6 * 64 + 2 * (_FIRST - 6 * 64), _BOTH_PASSES, 4 * 144 + 2 * _FIRST),
        4 * 144 + 4 * _FIRST + _BOTH_PASSES + 2 * _FIRST,
        _ring(2 * _LAYERS, 4) + 3 * 3 * 16 * 2 * 6 * 64 / FLOPS + _ring(4 * _LAYERS, 4),
        6 / 4 * NEWTON_SCHULZ + 2 * 144 / WITHIN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_seconds_by_hand(name: str) -> None:
    case = CASES[name]
    found = row_of(replace(JOB, **case.changed), SIZES, case.way)
    memory = found.memory
    if case.columns is not None:
        assert memory[:5] == pytest.approx(case.columns)
    for value, expected, rounded in (
        (memory.peak - memory.weights - memory.state, case.most, None),
        (found.muon_seconds, case.muon_seconds, _ROUNDED),
        (found.seconds - found.muon_seconds, case.seconds, _ROUNDED),
    ):
        assert expected is None or value == pytest.approx(expected, rel=rounded)


def test_slow_links_bound_a_pipeline_by_its_messages() -> None:
    way = Way(mode="pipeline", pipeline=2, shard=4, passes=2)
    found = row_of(replace(JOB, cost=replace(COST, bandwidth=(WITHIN, 1.0))), SIZES, way)
    # An activation and a gradient of 16 tokens in each of three slots.
    assert found.seconds == pytest.approx(3 * 2 * 16 * 8 * 2, rel=0.05)


def _sizes(*parameters: ParameterShape) -> Sizes:
    return sizes_of(replace(JOB, model=replace(MODEL, parameters=parameters)))


def test_frozen_and_tied_weights_and_the_width_of_attention() -> None:
    embedding, *layers, norm, _ = MODEL.parameters
    # The table counts once as elements, and as a product of each token.
    tied = _sizes(embedding, *layers, norm)
    assert (tied.all.numel, tied.all.products, tied.vocabulary) == (1096 - 256, SIZES.all.products, 32)
    frozen = _sizes(replace(embedding, frozen=True), *layers, norm)
    assert (frozen.all.numel, frozen.all.trained) == (840, 584)
    shapes = {"q": (48, 16), "k": (24, 16), "v": (24, 16), "o": (16, 48)}
    attention = [
        ParameterShape(name=f"layers.{i}.self_attn.{name}_proj.weight", shape=shape, kind="matrix")
        for i in range(2)
        for name, shape in shapes.items()
    ]
    assert _sizes(*attention).layer.attention == 48


def test_experts_divided_over_ranks_are_gathered_and_sent_less() -> None:
    stacks = [ParameterShape(name=f"layers.{i}.experts", shape=(8, 8, 8), kind="stack") for i in range(2)]
    whole = replace(JOB, model=replace(MODEL, parameters=tuple(stacks)), experts_per_token=2)
    sizes, way = sizes_of(whole), Way(mode="fsdp", shard=8)
    # Each token meets two of eight matrices.
    assert (sizes.layer.products, sizes.layer.activations, sizes.layer.experts) == (2 * 64, 2 * 16, 512)
    for expert_size, between in ((4, 0), (8, 4 / 7)):
        job = replace(whole, expert_size=expert_size)
        before, found = row_of(whole, sizes, way), row_of(job, sizes, way)
        # The same shards, of which two layers at one time are gathered.
        assert found.memory[:4] == before.memory[:4]
        saved = 2 * 2 * 512 * (1 - 1 / expert_size)
        assert before.memory.peak - found.memory.peak == pytest.approx(saved)
        # 16 tokens of 8 elements go to two experts and back in each layer, and their gradients.
        exchanged = 4 * 2 * 2 * 16 * 8 * 2 * (expert_size - 1) / expert_size
        slower = COST.transfer_seconds(exchanged * (1 - between), exchanged * between)
        assert found.seconds - before.seconds == pytest.approx(slower, rel=_ROUNDED)
        assert {row.way.mode for row in best_rows(job)} == {"fsdp", "hsdp"} - ({"hsdp"} if expert_size == 8 else set())
    # With an expert group as large as the shard group no expert travels, and nothing else is in this model.
    quick = replace(job, cost=replace(COST, flops_per_second=1e15))
    found = row_of(quick, sizes, way)
    assert found.seconds - found.muon_seconds == pytest.approx(slower, rel=_ROUNDED)


def test_what_fits_comes_first_and_passes_are_doubled_until_it_does() -> None:
    rows = best_rows(JOB)
    assert {row.way.mode for row in rows} == set(MODES)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    # Of FSDP 16 rows per rank: two passes are the first that fit.
    job = replace(JOB, rows=128, memory_bytes=100_000)
    whole, half = (row_of(job, SIZES, Way(mode="fsdp", shard=8, passes=passes)) for passes in (1, 2))
    assert not whole.fits and half.fits
    (found,) = (row for row in best_rows(job) if row.way.mode == "fsdp")
    assert found.way == half.way
    assert not any(row.fits for row in best_rows(replace(job, memory_bytes=1000)))
    # Three ranks make no grid, and one row is too little for two ranks.
    assert "hsdp" not in {row.way.mode for row in best_rows(replace(JOB, num_ranks=3))}
    assert {row.way.mode for row in best_rows(replace(JOB, rows=1))} == {"none", "pipeline"}


@pytest.mark.parametrize("name", ["llama3-70b", "t5-base"])
def test_lines_to_paste_make_valid_options(name: str) -> None:
    flexdemo = FlexDeMoConfig(base="adamw", replicator=DCTTopK(chunk_size=32, top_k=4))
    job = replace(JOB, model=read_shapes(name), cost=PRESETS["h100"], num_ranks=16, rows=64, flexdemo=flexdemo)
    lines: dict[str, str] = {row.way.mode: strategy_line(row.way, flexdemo) for row in best_rows(job)}
    assert set(lines) == set(MODES)
    known: dict[str, Any] = {"ParallelMuonStrategy": Options, "FlexDeMoConfig": FlexDeMoConfig, "DCTTopK": DCTTopK}
    for mode, line in lines.items():
        options = eval(line, known)
        assert options.sharding == (mode if mode in ("none", "ddp", "zero2") else "fsdp")
        assert (options.pipeline_size > 1) == (mode == "pipeline")
        if mode != "none":
            replicas, shards = options.resolve(num_nodes=2, num_processes=8)
            assert math.prod((replicas, shards, options.pipeline_size)) == 16
        if mode == "flexdemo":
            assert options.optimizer == flexdemo
