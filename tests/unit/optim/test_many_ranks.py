"""What the host has to do on many ranks: its own pieces count, not all ranks times all matrices.

Rank 0 has weights without memory, and neither arithmetic nor communication.
"""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lightning_muon import ParallelMuon
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import Setting, exchange_groups
from lightning_muon.params.layout import Matrix
from lightning_muon.params.shapes import ModelShapes, ParameterShape, read_shapes
from lightning_muon.schedule.simulate import PRESETS
from tests.support.fake_cuda import rank_of
from tests.support.fake_training import sharded

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

Found = Sequence[tuple[ParameterShape, nn.Parameter]]
_sharded = partial(sharded, dtype=torch.bfloat16, device="meta")


def _weights(shapes: Sequence[ParameterShape], mesh: DeviceMesh) -> Found:
    """Trainable parameters, sharded over the last axis of the mesh, each with a gradient."""
    found = list[tuple[ParameterShape, nn.Parameter]]()
    for shape in (shape for shape in shapes if not shape.frozen):
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(shape.shard_dim)]
        parameter = nn.Parameter(_sharded(shape.shape, mesh, placements))
        parameter.grad = _sharded(shape.shape, mesh, placements)
        found.append((shape, parameter))
    return found


def _optimizer_of(found: Found, **options: Any) -> ParallelMuon:
    """With the groups and fused weights that the shapes say; there are no values to look at for a NaN."""
    muon = [(shape.name, tensor) for shape, tensor in found if shape.kind != "elementwise"]
    adamw = [(shape.name, tensor) for shape, tensor in found if shape.kind == "elementwise"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]
    fused = {shape.name: shape.splits for shape, _ in found if shape.splits}
    groups = [group for group in groups if group["params"]]
    return ParallelMuon(groups, fused=fused, compute_dtype="bfloat16", error_if_nonfinite=False, **options)


def test_a_plan_for_45_000_matrices_on_64_ranks_takes_seconds() -> None:
    with rank_of(NUM_RANKS):
        optimizer = _optimizer_of(
            _weights(read_shapes("deepseek-v3").parameters, init_device_mesh("cpu", (NUM_RANKS,)))
        )
        begin = time.process_time()
        planned = optimizer._make_plan()
        # 2 seconds of one core; a look at every matrix on every rank takes more than a minute.
        assert time.process_time() - begin < 10
    (group,) = planned.plan.exchange_groups
    assert len(group.matrices) > 45_000
    assert list(group.program) == [0]


def test_a_step_looks_at_the_pieces_of_the_calling_rank_only() -> None:
    with rank_of(NUM_RANKS):
        optimizer = _optimizer_of(_weights(MODEL, init_device_mesh("cpu", (NUM_RANKS,))))
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
            (shape, nn.Parameter(_sharded(shape.shape, mesh, placements)))
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
        groups = _optimizer_of(found)._make_plan().plan.exchange_groups
        loads = [sum(each) for each in zip(*(group.flops for group in groups), strict=True)]
    assert len(groups) == 2 and max(loads) < 1.05 * sum(loads) / len(loads)


@pytest.mark.parametrize("dedupe", ["always", "never"])
def test_the_plan_command_finds_the_owners_of_the_optimizer(dedupe: Any) -> None:
    model = ModelShapes(name="model", source="", parameters=tuple(MODEL))
    (planned,) = exchange_groups(Setting(model=model, cost=PRESETS["reference"]), Mesh(2, 4), dedupe)
    with rank_of(8):
        found = _weights(MODEL, init_device_mesh("cpu", (2, 4)))
        (bound,) = _optimizer_of(found, dedupe=dedupe)._make_plan().plan.exchange_groups
    of_plan, of_optimizer = ([(each.owner, each.held) for each in group.matrices] for group in (planned, bound))
    assert of_plan == of_optimizer and planned.buckets == bound.buckets
