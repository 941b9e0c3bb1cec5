"""What the table of docs/planning.md, with which test_plan.py compares all ways, does not have."""

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
from lightning_muon.schedule.simulate import PRESETS, CostModel

# An embedding of 32 x 8, 8 layers of a matrix of 8 x 8 and a vector, a norm and an output head of 32 x 8:
# 256 + 8 * 72 + 8 + 256 = 1096 elements, of which 512 are on Muon.
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
FORWARD = 16 * 2 * (8 * 64 + 256) / FLOPS  # Seconds of a row: 8 matrices and the output head.


def test_cores_compute_and_transfer_one_after_the_other() -> None:
    found = row_of(replace(JOB, is_cpu=True), SIZES, Way(mode="fsdp", shard=8))
    gather = 2 * 1096 * 7 / 8 * 2 / 8 / BETWEEN  # Two of the eight steps of a ring go to another node.
    # The gradients have float32, and gloo's sum sends twice as much.
    seconds = 3 * FORWARD + 2 * gather + 2 * 2 * gather
    assert found.seconds - found.muon_seconds == pytest.approx(seconds, rel=_ROUNDED)


def test_slow_links_bound_a_pipeline_by_its_messages() -> None:
    way = Way(mode="pipeline", pipeline=2, shard=4, passes=2)
    found = row_of(replace(JOB, cost=replace(COST, bandwidth=(WITHIN, 1.0))), SIZES, way)
    # An activation and a gradient of 16 tokens in each of three slots.
    assert found.seconds == pytest.approx(3 * 2 * 16 * 8 * 2, rel=0.05)


def _sizes(*parameters: ParameterShape) -> Sizes:
    return sizes_of(replace(JOB, model=replace(MODEL, parameters=parameters)))


def test_gradients_travel_beside_what_owners_send() -> None:
    # One bucket has all gradients. Each rank owns one matrix of 128 bytes in bfloat16, and sends it to 7 others.
    memory = row_of(JOB, SIZES, Way(mode="ddp", replicate=8)).memory
    assert memory.buffers == pytest.approx(2 * 7 * 128 + 4 * 1096)


def test_frozen_and_tied_weights_and_the_width_of_attention() -> None:
    embedding, *layers, norm, _ = MODEL.parameters
    assert SIZES.stages(2)[2].all.numel == 2 * 72 + 8 + 256, "the last stage has the head, which is 4 layers of work"
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


def test_the_only_way_that_fits_is_before_faster_ones() -> None:
    least = min(row.memory.peak for row in best_rows(replace(JOB, memory_bytes=1)))
    first, *others = best_rows(replace(JOB, memory_bytes=least))
    assert first.fits and not any(row.fits for row in others) and len(others) == len(MODES) - 1
    assert others[0].seconds < first.seconds


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
