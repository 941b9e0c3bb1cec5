"""``lightning-muon plan --splits``, run through the command, with numbers computed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_memory import memory_of_stages
from lightning_muon.cli.plan_model import Mesh, PlannedModel
from lightning_muon.cli.plan_parts import PlannedParts
from lightning_muon.cli.plan_strategies import Setting
from lightning_muon.cli.split_rules import Job, OptimizerStep, Split, SplitTraffic, stage_costs, zero2_owners
from lightning_muon.config import MuonConfig
from lightning_muon.grad_sync.shard_map import place_shards
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.params.layout import OwnedBy
from lightning_muon.params.routing import route_module
from lightning_muon.pipeline.cut import choose_stages
from lightning_muon.pipeline.model import find_staged_model
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.pipeline import F, I, W, peak_activations
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes
from lightning_muon.sharding.modes import _flops_of_whole_matrices
from tests.unit.cli.tiny_shapes import LENGTH, SHAPES, WIDTH, WORDS

# Embedding, four layers, norm and head: a stage of 544 elements and one of 264, with 256 elements of matrices each.
_FLOPS, _WITHIN, _BETWEEN = 1e4, 1e6, 1e5
_FORWARD = 2 * 256 * LENGTH / _FLOPS  # Seconds of one row in one of the two stages.
_GIB = 2**30
_ROUNDED = 1e-5  # The bytes of each gather and sum are whole numbers.


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPES))
    cost = {"flops_per_second": _FLOPS, "memory_bytes_per_second": 1e12, "bandwidth": [_WITHIN, _BETWEEN]}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    files = ["--shapes", str(tmp_path / "tiny.json"), "--cost", str(tmp_path / "cost.json")]
    return ["plan", *files, "--splits", "4", "--node-ranks", "2", "--rows", "4", "--length", str(LENGTH)]


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[int, int, int], dict[str, Any]]:
    main([*arguments, "--json"])
    splits = json.loads(capsys.readouterr().out)["splits"]
    return {(each["pipeline_size"], each["replicate_size"], each["shard_size"]): each for each in splits}


def _bytes(*of_kinds: int) -> dict[str, int]:
    kinds = ("weights", "gradients", "optimizer", "activations", "gathered", "buffers")
    return dict(zip(kinds, of_kinds, strict=True))


def test_two_stages_of_two_shards_by_hand(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = _plan(capsys, *arguments, "--schedules", "1f1b", "--activations", "kept")[2, 1, 2]
    assert (found["schedule"], found["microbatches"]) == ("1f1b", 2)
    # Of 544 elements a rank holds 272: 128 on Muon, 144 on AdamW. Whole gradients are float32, whole weights bfloat16.
    # Two micro-batches are on their way, each with 16 tokens of 8 elements into and out of each layer.
    activations = 2 * LENGTH * 4 * (WIDTH + WIDTH) * 2
    # On the wire half of two matrices, in four buffers; at work input, two iterates and two products of two matrices.
    wire, at_work = 4 * 2 * 32 * 2, 2 * (2 * 5 * WIDTH**2)
    memory = _bytes(4 * 272, 4 * 544, 4 * (128 + 2 * 144), activations, 2 * 544, wire + at_work)
    assert found["memory_bytes"] == memory
    # In backward nothing is at work.
    assert found["peak_bytes"] == sum(memory.values()) - at_work
    # Gather and sum of half a stage; each rank has halves of the two matrices of the other one, there and back.
    assert found["inside_bytes"] == 2 * 544 / 2 + 4 * 544 / 2 + 2 * (2 * 32 * 2)
    assert found["between_bytes"] == 2 * LENGTH * WIDTH * 2
    # The first rank ends last: gather; F, both messages, and 2 F + B of the second rank; then its own 2 B; sums.
    message = LENGTH * WIDTH * 2 / _BETWEEN
    end = 2 * 544 / 2 / _WITHIN + 9 * _FORWARD + 2 * message + 4 * 544 / 2 / _WITHIN
    assert found["step_seconds"] - found["optimizer_seconds"] == pytest.approx(end, rel=_ROUNDED)
    # Both ranks compute for two forwards and two backwards.
    assert found["idle"] == pytest.approx(1 - 6 * _FORWARD / end, rel=_ROUNDED)


def test_frozen_weights_have_no_states(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path
) -> None:
    embedding, *others = SHAPES["parameters"]
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPES | {"parameters": [embedding | {"frozen": True}, *others]}))
    memory = _plan(capsys, *arguments, "--activations", "kept")[1, 1, 4]["memory_bytes"]
    # Of 808 elements 256 are the embedding's, 256 are on Muon, and 296 on AdamW.
    assert (memory["weights"], memory["optimizer"]) == (4 * 202, 4 * (64 + 2 * 74))


def test_recomputed_layers_keep_their_inputs(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    kept, again = (
        _plan(capsys, *arguments, "--schedules", "1f1b", "--activations", way)[2, 1, 2]
        for way in ("kept", "checkpointed")
    )
    one_layer = LENGTH * 2 * WIDTH * 2
    # The second stage, which is no layer, now needs more than the first one.
    head = LENGTH * ((WORDS + WIDTH) * 2 + 12 * WORDS)
    assert again["peak_bytes"] == max(
        kept["peak_bytes"] - 2 * 4 * one_layer + 2 * 4 * one_layer // 2 + one_layer,
        4 * 132 + 4 * 264 + 4 * 2 * 132 + head + 2 * 264,
    )
    # Backward of the first stage takes 3 instead of 2 forwards: for the first micro-batch while it would wait.
    assert again["step_seconds"] - kept["step_seconds"] == pytest.approx(_FORWARD, rel=_ROUNDED)


def test_four_shards_without_a_pipeline_by_hand(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    found = _plan(capsys, *arguments, "--activations", "kept")[1, 1, 4]
    assert (found["schedule"], found["microbatches"], found["idle"]) == (None, 1, 0)
    # 202 of 808 elements, 64 of them on Muon. At the end of backward shards of four layers, and the root whole, packed
    # for its sum; as it begins one row, with three copies of its logits, and the root and two layers gathered.
    activations = LENGTH * (4 * 2 * WIDTH * 2 + (WORDS + WIDTH) * 2 + 12 * WORDS)
    root, layer, wire = 256 + 264, 72, 4 * 2 * 3 * 16
    memory = _bytes(
        4 * 202, layer * 4 + 2 * root, 4 * (64 + 2 * 138), activations, 2 * (root + 2 * layer), wire + 4 * root
    )
    assert found["memory_bytes"] == memory and not found["weights_stay_whole"]
    assert found["peak_bytes"] == sum(memory.values()) - memory["gradients"] - 4 * root
    # Two gathers and a sum, in rings of four ranks of which two of four steps leave a node; Muon's bytes all count as
    # leaving it: three quarters of the matrix of each rank, there and back.
    ring = (2 * 2 * 808 + 4 * 808) * 3 / 4
    assert (found["inside_bytes"], found["between_bytes"]) == (ring / 2, ring / 2 + 2 * 48 * 2)
    # Compute hides all transfers but the first gather and the last sum, those of the embedding.
    exposed = (2 + 4) * 256 * 3 / 4 / 2 / _BETWEEN
    step = found["step_seconds"] - found["optimizer_seconds"]
    assert step == pytest.approx(2 * 3 * _FORWARD + exposed, rel=_ROUNDED)


def test_transfers_longer_than_compute_are_exposed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    way = _plan(capsys, *arguments, "--activations", "kept", "--inter-bandwidth", "1")[1, 1, 4]
    # Weights stay whole, as one gather of 606 bytes between nodes takes longer than a forward; the sum is 1212 bytes.
    assert way["weights_stay_whole"]
    assert way["memory_bytes"]["gathered"] == 2 * 808
    step = way["step_seconds"] - way["optimizer_seconds"]
    assert step == pytest.approx(606 + 1212 + 6 * 256 * 3 / 4 / 2, rel=_ROUNDED)


def test_batches_are_accumulated_where_one_does_not_fit(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    arguments[arguments.index("--rows") + 1] = "16"
    once = _plan(capsys, *arguments, "--activations", "kept")[1, 1, 4]
    limit = (once["peak_bytes"] - 1) / _GIB
    found = _plan(capsys, *arguments, "--activations", "kept", "--rank-memory", f"{limit:.17f}")[1, 1, 4]
    assert found["fits"] and found["microbatches"] == 2
    assert found["memory_bytes"]["activations"] == once["memory_bytes"]["activations"] / 2
    assert found["memory_bytes"]["gradients"] == 4 * 808  # Whole, until the last pass sums them.
    assert found["inside_bytes"] - once["inside_bytes"] == 2 * 808 * 3 / 4 / 2 * 2


def test_the_fastest_that_fits_is_recommended(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    everything = _plan(capsys, *arguments)
    assert set(everything) == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    sizes = {key: each["peak_bytes"] for key, each in everything.items()}
    # Too little for the fastest.
    first = next(iter(everything))
    assert [key for key, each in everything.items() if each["recommended"]] == [first]
    limit = sizes[first] - 1
    found = _plan(capsys, *arguments, "--rank-memory", f"{limit / _GIB:.17f}")
    fits = {key: each for key, each in found.items() if each["peak_bytes"] <= limit}
    assert fits and {key for key, each in found.items() if each["fits"]} == set(fits)
    fastest = min(fits, key=lambda key: fits[key]["step_seconds"])
    assert [key for key, each in found.items() if each["recommended"]] == [fastest]


def test_a_table_marks_it_and_says_what_to_set(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    main(arguments)
    out = capsys.readouterr().out
    ((_, pipeline, replicate, shard),) = re.findall(r"(\w+) +(\d) x (\d) x (\d) +\* ", out)
    words = f"pipeline_size={pipeline}, " * (pipeline != "1")
    assert f"recommended: {words}replicate_size={replicate}, shard_size={shard}" in out


def test_where_nothing_fits_a_message_says_how_much(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(
        SystemExit,
        match=r"nothing fits into 1e-06 GiB per rank; pipeline needs least, 10\.3 KiB with \d x \d x \d, .* too much",
    ):
        main([*arguments, "--rank-memory", "1e-6"])
    assert "tiny on 4 ranks" in capsys.readouterr().out  # The table is there.


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--splits", "0"), "must be at least 1"),
        (("--draw", "x.svg"), "--splits goes without --draw"),
        (("--shard-size", "2"), "--splits goes without --shard-size"),
        (("--rank-memory", "-1"), "must be finite and above 0"),
        (("--schedules", "zb"), "invalid choice: 'zb'"),
        (("--splits", "7", "--rows", "1"), "2 splits are left out: 1 rows are too few"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...], match: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *words])
    assert match in f"{capsys.readouterr().err} {caught.value}"


def test_a_width_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    parameters = [{"name": "layers.0.weight", "shape": [8, 8], "kind": "matrix"}]
    (tmp_path / "one.json").write_text(json.dumps({"name": "one", "parameters": parameters}))
    with pytest.raises(SystemExit, match="one has no embedding that says how wide its activations are; add --width"):
        main(["plan", "--shapes", str(tmp_path / "one.json"), "--splits", "2"])


def _llama(**options: Any) -> tuple[Any, ModelShapes]:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 40}
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options))
    routes = zip(route_module(module).values(), module.parameters(), strict=True)
    parameters = tuple(ParameterShape(**vars(route), shape=tuple(each.shape)) for route, each in routes)
    return module, ModelShapes(name="llama", source="", parameters=parameters)


@pytest.mark.parametrize("tied", [False, True])
def test_models_are_cut_as_the_runtime_cuts_them(tied: bool) -> None:
    module, model = _llama(num_hidden_layers=7, num_attention_heads=2, tie_word_embeddings=tied)
    for planned in (PlannedModel(shapes=model, module=module), PlannedModel(shapes=model)):
        parts = PlannedParts(planned, model, width=None, itemsize=2)
        assert parts.width == 16
        for num_stages in (1, 2, 3, 5, 9):
            expected = [
                sum(p.numel() for part in stage for each in part.modules for p in each.parameters())
                for stage in choose_stages(find_staged_model(module), num_stages)
            ]
            assert [sum(parts.numel[part] for part in stage) for stage in parts.stages(num_stages)] == expected


def test_groups_count_the_nodes_they_lie_on() -> None:
    split = Split(pipeline=2, replicate=4, shard=2, node_ranks=4)
    assert split.axes == ((2, 1), (4, 2))  # Shards 0, 1; replicas 0, 2, 4, 6.
    assert Split(pipeline=1, replicate=1, shard=12, node_ranks=8).axes == ((12, 2), (1, 1))
    assert Split(pipeline=1, replicate=2, shard=6, node_ranks=8).axes == ((6, 2), (2, 2))  # 6 to 11; 0 and 6, 2 and 8.


def test_a_split_backward_keeps_gradients_of_products_between_its_parts() -> None:
    # F0 F1 I0 F2 I1 W0 I2 W1 W2: at I2 three micro-batches are there, two of them between their parts.
    nodes = [F(1, 0), F(1, 1), I(1, 0), F(1, 2), I(1, 1), W(1, 0), I(1, 2), W(1, 1), W(1, 2)]
    assert peak_activations(nodes, {1: 10}, {1: 3}) == 3 * 10 + 2 * 3
    assert peak_activations(nodes, {1: 10}, {1: 0}) == peak_activations(nodes, {1: 10}) == 30


def test_the_first_stage_runs_its_whole_backward_as_the_second_part(arguments: list[str]) -> None:
    model = read_shapes(arguments[2])
    cost = CostModel(flops_per_second=_FLOPS, memory_bytes_per_second=1e12, bandwidth=(_WITHIN,))
    setting = Setting(model=model, mesh=Mesh(1, 1), config=MuonConfig(), wire_itemsize=2, cost=cost)
    parts = PlannedParts(PlannedModel(shapes=model), model, width=None, itemsize=2)
    sizes = {"itemsize": 4, "gathered_itemsize": 2, "reduced_itemsize": 4, "flops_per_second": _FLOPS}
    job = Job(parts=parts, setting=setting, num_ranks=2, node_ranks=8, rows=2, length=LENGTH, **sizes)
    split = Split(pipeline=2, replicate=1, shard=1, node_ranks=8)
    stages = parts.stages(2)
    options = {"number": 2, "recompute": True}
    whole, halves = (stage_costs(job, split, stages, splits_backward=each, **options) for each in (False, True))
    # The first stage is four layers, which run forward twice; the second one, norm and head, is not recomputed.
    assert [whole.of("B", stage) for stage in (0, 1)] == pytest.approx([3 * _FORWARD, 2 * _FORWARD])
    assert [halves.of("I", stage) for stage in (0, 1)] == pytest.approx([0, _FORWARD])
    assert [halves.of("W", stage) for stage in (0, 1)] == pytest.approx([3 * _FORWARD, _FORWARD])
    # At the second I of the last stage both micro-batches wait for their W, with the gradient of its product.
    nodes = [F(1, 0), F(1, 1), I(1, 0), I(1, 1), W(1, 0), W(1, 1)]
    memory = memory_of_stages(job, split, nodes, stages, OptimizerStep(SplitTraffic()), number=2, recompute=True)
    loss = 4 * WORDS  # Bytes of a token, and of the gradient in the backward of one of the two.
    assert memory.activations == 2 * LENGTH * (2 * (WORDS + WIDTH) + loss + 2 * WORDS) + LENGTH * loss


@pytest.mark.parametrize("quality", ["reference", "fast"])
def test_owners_of_zero2_are_those_of_a_run(quality: Literal["reference", "fast"]) -> None:
    shapes = [(32, 32), (16, 64), (16, 128), (64, 32)]  # Loads differ with the quality, and so do the owners.
    module = nn.ParameterDict({str(index): torch.empty(shape) for index, shape in enumerate(shapes)})
    optimizer = ParallelMuon(module.named_parameters(), ns_quality=quality)
    run = place_shards(list(module.values()), _flops_of_whole_matrices([optimizer]), 2)
    expected = {name: run[parameter] for name, parameter in module.items()}

    parameters = tuple(ParameterShape(name=str(i), shape=each, kind="matrix") for i, each in enumerate(shapes))
    model = ModelShapes(name="four", source="", parameters=parameters)
    cost = CostModel(flops_per_second=_FLOPS, memory_bytes_per_second=1e12, bandwidth=(_WITHIN,))
    config = MuonConfig(ns_quality=quality)
    setting = Setting(model=model, mesh=Mesh(1, 1), config=config, wire_itemsize=2, cost=cost, is_cpu=True)
    parts = PlannedParts(PlannedModel(shapes=model), model, width=8, itemsize=4)
    sizes = {"itemsize": 4, "gathered_itemsize": 4, "reduced_itemsize": 4, "flops_per_second": _FLOPS}
    job = Job(parts=parts, setting=setting, num_ranks=2, node_ranks=8, rows=2, length=LENGTH, **sizes)
    split = Split(pipeline=1, replicate=1, shard=2, node_ranks=8, sharding="zero2")
    assert {name: OwnedBy(rank) for name, rank in zero2_owners(job, split).items()} == expected
    assert (zero2_owners(job, split)["1"] == 0) == (quality == "reference")
