"""The ways to train on 8 ranks, with bytes and seconds worked out by hand."""

import math
from dataclasses import replace
from typing import Any

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
AT_WORK = 2 * (3 * 64 + 2 * 64)  # Newton-Schulz of a matrix: input, two iterates and two products, in bfloat16.
FORWARD = 16 * 2 * (8 * 64 + 256) / FLOPS  # Seconds of a row: 8 matrices and the output head.
NEWTON_SCHULZ = 5 * 2 * 64 * (2 * 8 + 8) / FLOPS  # Seconds of a matrix.


def _ring(num_bytes: float, size: int, nodes: int = 1) -> float:
    """Seconds: of the (g - 1) / g that a rank sends, n of g steps go to another of n nodes."""
    sent = num_bytes * (size - 1) / size
    return sent / WITHIN if nodes == 1 else max(sent * nodes / size / BETWEEN, sent * (1 - nodes / size) / WITHIN)


_EMBEDDING = 256 / 1096  # Share of the gathers and sums that nothing hides.
_GATHER, _SUM = _ring(2 * 1096, 8, 2), _ring(4 * 1096, 8, 2)
_HSDP_GATHER = _ring(2 * 1096, 4)
_HSDP_SUM = _ring(4 * 1096, 4) + 2 * _ring(4 * 1096 / 4, 2, 2)
# Of the 4 * 1096 bytes a rank sends each eighth to another rank, 4 of 7 of them to the other node.
_TO_OWNERS = 4 * 1096 * 4 / 8 / BETWEEN
# Two stages: the output head is as much work as 4 layers, so that the first one has (8 + 4) / 2 = 6 layers, with the
# embedding 6 * 72 + 256 elements; the last one has 2 layers and the head.
_LAYERS, _FIRST = 6 * 72, 688
CASES: dict[str, tuple[Way, dict[str, float], float, float]] = {
    # Everything on one rank: 8 rows are 128 tokens. The copies that autocast makes are the buffers.
    "none": (
        Way(mode="none"),
        {
            "weights": 4 * 1096,
            "gradients": 4 * 1096,
            "state": STATE,
            "activations": 128 * ACTIVATIONS,
            "buffers": 2 * 1096,
            "peak": 4 * 1096 + STATE + 128 * ACTIVATIONS + 2 * 1096,
        },
        8 * 3 * FORWARD,
        8 * NEWTON_SCHULZ,
    ),
    # In 4 passes of 2 rows the gradients are there when backward begins.
    "none, 4 passes": (
        Way(mode="none", passes=4),
        {
            "activations": 32 * ACTIVATIONS,
            "peak": 2 * 4 * 1096 + STATE + 32 * ACTIVATIONS + 2 * 1096,
        },
        8 * 3 * FORWARD,
        8 * NEWTON_SCHULZ,
    ),
    # Recomputed layers keep their input of 8 elements; while one is recomputed, less is there than for the logits.
    "none, recompute": (
        Way(mode="none", recompute=True),
        {"activations": 128 * (ACTIVATIONS - 8 * 8 * 2)},
        8 * (3 * FORWARD + 16 * 2 * 8 * 64 / FLOPS),
        8 * NEWTON_SCHULZ,
    ),
    # One bucket has all gradients. Each rank owns one matrix of 128 bytes in bfloat16, and sends it to 7 others.
    "ddp": (
        Way(mode="ddp", replicate=8),
        {
            "weights": 4 * 1096,
            "gradients": 4 * 1096,
            "state": STATE,
            "activations": 16 * ACTIVATIONS,
            "buffers": 2 * 7 * 128 + 4 * 1096,
            "peak": 4 * 1096 + STATE + 2 * 7 * 128 + 16 * ACTIVATIONS + 2 * 1096,
        },
        3 * FORWARD + _EMBEDDING * 2 * _SUM,
        NEWTON_SCHULZ + 7 * 128 / BETWEEN,
    ),
    # Gradients and state of an eighth. The bucket is there as it arrives, as it is sent, and the shares of 7 ranks.
    "zero2": (
        Way(mode="zero2", shard=8),
        {
            "weights": 4 * 1096,
            "gradients": 4 * 137,
            "state": STATE / 8,
            "activations": 16 * ACTIVATIONS,
            "buffers": 4 * 1096 * (2 + 7 / 8),
            "peak": 4 * 1096 + STATE / 8 + max(16 * ACTIVATIONS + 2 * 1096, 4 * 137 + 4 * 1096 * (2 + 7 / 8)),
        },
        3 * FORWARD + _EMBEDDING * 2 * _TO_OWNERS,
        NEWTON_SCHULZ,
    ),
    # The root of 520 and two layers of 72 are gathered; at the end the gradients of the root are whole and packed.
    # A matrix is gathered from 7 other ranks and sent back to them.
    "fsdp": (
        Way(mode="fsdp", shard=8),
        {
            "weights": 4 * 137,
            "gradients": 4 * 137 + 2 * 520,
            "state": STATE / 8,
            "activations": 16 * ACTIVATIONS,
            "buffers": 4 * 112 + 2 * 520 + 4 * 520,
            "peak": 4 * 137 + STATE / 8 + 4 * 112 + 16 * ACTIVATIONS + 2 * (520 + 2 * 72),
        },
        3 * FORWARD + _EMBEDDING * (2 * _GATHER / 2 + _SUM),
        NEWTON_SCHULZ + 2 * 112 / BETWEEN,
    ),
    # Shards in a node, replicas between nodes. The owners are on all ranks, since that is faster than two matrices for
    # each: a matrix of 128 bytes goes to 3 others of the replica, and to the other replica.
    "hsdp": (
        Way(mode="hsdp", replicate=2, shard=4),
        {
            "weights": 4 * 274,
            "gradients": 4 * 274 + 2 * 520,
            "state": STATE / 4,
            "activations": 16 * ACTIVATIONS,
            "buffers": 2 * 96 + 2 * (96 + 128) + 2 * 520 + 4 * 520,
            "peak": 4 * 274 + STATE / 4 + 2 * 96 + 2 * (96 + 128) + 16 * ACTIVATIONS + 2 * (520 + 2 * 72),
        },
        3 * FORWARD + _EMBEDDING * (_HSDP_GATHER + _HSDP_SUM),
        NEWTON_SCHULZ + 96 / WITHIN + 128 / BETWEEN,
    ),
    # Each node has all matrices, two for each of its ranks. A residual takes the place of the momentum, and is there as
    # blocks, too. All parameters are small and travel whole, 2192 bytes of a node in bfloat16, divided over its ranks.
    "flexdemo": (
        Way(mode="flexdemo", replicate=2, shard=4),
        {
            "weights": 4 * 274,
            "gradients": 4 * 274 + 2 * 520,
            "state": 4 * (512 + 3 * 584) / 4,
            "activations": 16 * ACTIVATIONS,
            "peak": 4 * 274
            + (512 + 3 * 584)
            + 4 * 192
            + 4 * 274
            + 4 * 274
            + AT_WORK
            + 4 * 274
            + JOB.flexdemo.bucket_bytes,
        },
        3 * FORWARD
        + _EMBEDDING * (_HSDP_GATHER + _ring(4 * 1096, 4))
        + 8 * 64 * 274 / FLOPS  # The cosine transforms: two products with 64 x 64 there, and two back.
        + 2192 / 4 / BETWEEN,
        2 * NEWTON_SCHULZ + 2 * 192 / WITHIN,
    ),
    # A stage on each node. A rank has 2 rows, each a micro-batch, so that the bubble is one of three slots. The first
    # stage needs most: both micro-batches are on their way, with all gradients and gathered weights. 1.5 matrices of
    # 128 bytes for each rank are gathered and sent back.
    "pipeline": (
        Way(mode="pipeline", pipeline=2, shard=4, passes=2),
        {
            "weights": _FIRST,
            "gradients": 4 * _FIRST,
            "state": 6 * 64 + 2 * (_FIRST - 6 * 64),
            "activations": 16 * (2 * 6 * 16 * 2 + 8 * 2),
            "buffers": 4 * 144 + 2 * _FIRST,
            "peak": _FIRST
            + 6 * 64
            + 2 * (_FIRST - 6 * 64)
            + 4 * 144
            + 4 * _FIRST
            + 16 * (2 * 6 * 16 * 2 + 8 * 2)
            + 2 * _FIRST,
        },
        _ring(2 * _LAYERS, 4) + 3 * 3 * 16 * 2 * 6 * 64 / FLOPS + _ring(4 * _LAYERS, 4),
        6 / 4 * NEWTON_SCHULZ + 2 * 144 / WITHIN,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_seconds_by_hand(case: str) -> None:
    way, sizes, seconds, muon_seconds = CASES[case]
    found = row_of(JOB, SIZES, way)
    memory = found.memory._asdict()
    assert {name: memory[name] for name in sizes} == pytest.approx(sizes)
    assert found.muon_seconds == pytest.approx(muon_seconds, rel=_ROUNDED)
    assert found.seconds - found.muon_seconds == pytest.approx(seconds, rel=_ROUNDED)


def test_cores_of_a_cpu_compute_and_transfer_one_after_the_other() -> None:
    way, seconds = Way(mode="fsdp", shard=8), 3 * FORWARD + 2 * _GATHER + 2 * _SUM  # gloo's sum sends twice as much.
    found = row_of(replace(JOB, is_cpu=True), SIZES, way)
    assert found.seconds - found.muon_seconds == pytest.approx(seconds, rel=_ROUNDED)


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
