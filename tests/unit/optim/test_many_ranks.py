"""What the host has to do on many ranks: its own pieces count, not all ranks times all matrices."""

import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import Setting, exchange_groups
from lightning_muon.params.layout import Matrix
from lightning_muon.params.shapes import ModelShapes, ParameterShape, read_shapes
from lightning_muon.schedule.simulate import PRESETS
from tests.support.one_of_many import optimizer_of, rank_of, sharded, weights

NUM_RANKS, NUM_EXPERTS, NUM_LAYERS = 64, 256, 3
MODEL = [
    shape
    for layer in range(NUM_LAYERS)
    for shape in (
        ParameterShape(name=f"{layer}.experts", shape=(NUM_EXPERTS, 64, 32), kind="stack"),
        ParameterShape(name=f"{layer}.attention", shape=(128, 64), kind="matrix"),
        ParameterShape(name=f"{layer}.norm", shape=(64,), kind="elementwise"),
    )
]


def test_a_plan_for_45_000_matrices_on_64_ranks_takes_seconds() -> None:
    with rank_of(NUM_RANKS):
        optimizer = optimizer_of(weights(read_shapes("deepseek-v3").parameters, NUM_RANKS))
        begin = time.process_time()
        planned = optimizer._make_plan()
        # 2 seconds of one core; a look at every matrix on every rank takes more than a minute.
        assert time.process_time() - begin < 10
    (group,) = planned.plan.exchange_groups
    assert len(group.matrices) > 45_000
    assert list(group.program) == [0]


def test_a_step_looks_at_the_pieces_of_the_calling_rank_only() -> None:
    with rank_of(NUM_RANKS):
        optimizer = optimizer_of(weights(MODEL, NUM_RANKS))
        calls: Counter[Matrix] = Counter()
        view = Matrix.local_view

        def count(matrix: Matrix, local: object) -> object:
            calls[matrix] += 1
            return view(matrix, local)  # type: ignore[arg-type]

        for _ in range(3):
            calls.clear()
            with mock.patch.object(Matrix, "local_view", count):
                optimizer.step()
    held = NUM_LAYERS * (NUM_EXPERTS // NUM_RANKS + 1)
    assert len(calls) == held
    assert calls.total() <= 5 * held


def test_owners_on_two_meshes_have_as_much_to_do_together() -> None:
    """Two replicas of four ranks, of which pairs divide the experts: three of four ranks own the other matrices."""
    with rank_of(8):
        dense, experts = init_device_mesh("cpu", (2, 4)), init_device_mesh("cpu", (2, 2, 2))
        found = [
            (shape, nn.Parameter(sharded(shape.shape, mesh, placements)))
            for layer in range(3)
            for shape, mesh, placements in (
                (ParameterShape(name=f"{layer}.q", shape=(64, 64), kind="matrix"), dense, [Replicate(), Shard(0)]),
                (
                    ParameterShape(name=f"{layer}.experts", shape=(8, 64, 32), kind="stack"),
                    experts,
                    [Replicate(), Shard(1), Shard(0)],
                ),
            )
        ]
        groups = optimizer_of(found)._make_plan().plan.exchange_groups
        loads = [sum(each) for each in zip(*(group.flops for group in groups), strict=True)]
    assert len(groups) == 2 and max(loads) < 1.05 * sum(loads) / len(loads)


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(dedupe: Any) -> None:
    model = ModelShapes(name="model", source="", parameters=tuple(MODEL))
    (planned,) = exchange_groups(Setting(model=model, cost=PRESETS["reference"]), Mesh(2, 4), dedupe)
    with rank_of(8):
        mesh = init_device_mesh("cpu", (2, 4))
        found = [(shape, nn.Parameter(sharded(shape.shape, mesh, [Replicate(), Shard(0)]))) for shape in MODEL]
        (bound,) = optimizer_of(found, dedupe=dedupe)._make_plan().plan.exchange_groups
    of_plan, of_optimizer = ([(each.owner, each.held) for each in group.matrices] for group in (planned, bound))
    assert of_plan == of_optimizer and planned.buckets == bound.buckets
