"""``StepMonitor`` against weights before and after, and bytes counted at torch's collectives."""

import math
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import ParallelMuon, StepMonitor
from lightning_muon.monitor import step_monitor
from lightning_muon.monitor.step_monitor import WHOLE_STEP, part_seconds
from lightning_muon.schedule.program import TRANSFER, Op, OpKind
from lightning_muon.schedule.simulate import Span
from tests.distributed.sharding.test_traffic import Wire
from tests.distributed.sharding.training import distributed_over
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.tensors import random_tensors, whole

MATRICES = {"odd": (13, 7), "square": (24, 24), "flat": (3, 40)}
VECTORS = {"bias": (9,), "gain": (5,)}
LR, FACTOR, DECAY = 0.02, 2.5, 0.1
EXACT: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}
EVERY = 3


def _sent(wire: Wire, num_shards: int) -> Counter[str]:
    """Bytes that left this rank for others, by the axis of a (replicate, shard) mesh."""
    found, me = Counter[str](), dist.get_rank() // num_shards
    for rank, size in (item for each in wire.sent if each.is_payload for item in each.to.items()):
        found["shard" if rank // num_shards == me else "replicate"] += size
    return found


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean()))


def _train(mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """What the monitor says of the second measured step, and what was found without it."""
    shard, copy = distributed_over(mesh_shape, 0), distributed_over(mesh_shape, None)
    place = {name: copy if name == "gain" else shard for name in MATRICES | VECTORS}
    parameters = {name: nn.Parameter(place[name](t)) for name, t in random_tensors(MATRICES | VECTORS, 0).items()}
    groups = [
        {
            "params": [(name, parameters[name]) for name in names],
            "algorithm": algorithm,
            "lr": LR,
            "weight_decay": DECAY,
        }
        for names, algorithm in ((MATRICES, "muon"), (VECTORS, "adamw"))
    ]
    optimizer = ParallelMuon(groups, muon_lr_factor=FACTOR, bucket_bytes=1000, dedupe="always", **EXACT)
    monitor = StepMonitor(optimizer, every_n_steps=EVERY)
    taken: list[dict[str, float]] = []
    for step in range(1, 2 * EVERY + 1):
        for name, grad in random_tensors(MATRICES | VECTORS, step).items():
            parameters[name].grad = place[name](grad)
        before = {name: whole(parameter) for name, parameter in parameters.items()}
        with Wire() as wire:
            optimizer.step()
        taken.append(monitor.take())
    after = {name: whole(parameter) for name, parameter in parameters.items()}
    return {"taken": taken, "before": before, "after": after, "sent": _sent(wire, mesh_shape[-1])}


def _orthogonalized(result: dict[str, Any], name: str) -> Tensor:
    """What Newton-Schulz has made of a matrix, from the weights before and after."""
    rate = LR * FACTOR * 0.2 * math.sqrt(max(MATRICES[name]))
    before, after = (result[when][name].double() for when in ("before", "after"))
    return (before * (1 - LR * FACTOR * DECAY) - after) / rate


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_the_numbers_are_those_of_weights_messages_and_shapes(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    num_ranks = math.prod(mesh_shape)
    results = gloo.run(_train, mesh_shape, world_size=num_ranks)
    result, values = results[0], results[0]["taken"][-1]
    assert all(each["taken"] == result["taken"] for each in results)
    assert [bool(taken) for taken in result["taken"]] == [False, False, True] * 2

    for name, watched in (("group0.muon", "odd"), ("group1", "bias")):
        before, after = result["before"][watched], result["after"][watched]
        assert values[f"update_rms/{name}"] == pytest.approx(_rms(after - before), rel=1e-6)
        assert values[f"weight_rms/{name}"] == pytest.approx(_rms(after), rel=1e-6)
    assert values["lr/group1"] == LR
    for rows, cols in MATRICES.values():
        rate = LR * FACTOR * 0.2 * math.sqrt(max(rows, cols))
        assert values[f"muon_lr/group0.{rows}x{cols}"] == pytest.approx(rate)

    sent = {axis: sum(each["sent"][axis] for each in results) / num_ranks for axis in ("shard", "replicate")}
    assert {axis: values.get(f"bytes/{axis}", 0) for axis in sent} == sent
    assert list(map(bool, sent.values())) == [mesh_shape[-1] > 1, len(mesh_shape) > 1], "or nothing was compared"

    singular = [torch.linalg.svdvals(_orthogonalized(result, name)) for name in MATRICES]
    errors = [math.sqrt(float((each.square() - 1).square().mean())) for each in singular]
    assert any(values["orthogonality_error"] == pytest.approx(error, rel=1e-3) for error in errors)
    assert min(errors) > 0.05, "coefficients that tune singular values to about 1 only"

    parts = [f"optimizer_ms/{name}" for name in ("momentum", "newton_schulz", "update", "adamw", "other", "total")]
    assert all(values[part] > 0 for part in parts)
    assert ("optimizer_ms/gather" in values) == ("optimizer_ms/scatter" in values) == (mesh_shape[-1] > 1)


def _span(kind: str, start: float, end: float, lane: str = "compute") -> Span:
    return Span(Op(kind=kind, key=str(start), rank=0, lane=lane), start, end)


def test_communication_is_exposed_in_the_step_where_nothing_is_computed() -> None:
    found = part_seconds(
        [
            _span(OpKind.GATHER, 0, 3, TRANSFER),  # In backward, and one second of the step.
            Span(WHOLE_STEP, 2, 20),
            _span(OpKind.NEWTON_SCHULZ, 4, 8),
            _span(OpKind.SCATTER, 7, 11, TRANSFER),
            _span(OpKind.UPDATE, 11, 12),
        ]
    )
    assert found == {
        "gather": 3,
        "newton_schulz": 4,
        "scatter": 4,
        "update": 1,
        "total": 18,
        "exposed_communication": 1 + 3,
        "other": 18 - 5 - 4,
    }


def _steps(every: list[int], *, fails: bool) -> None:
    place, is_second = distributed_over((2,), 0), dist.get_rank() == 1
    parameter = nn.Parameter(place(torch.ones(6, 4)))
    optimizer = ParallelMuon([("w", parameter)], lr=LR, algorithm="muon")
    StepMonitor(optimizer, every_n_steps=every[is_second])
    for step in range(2):
        parameter.grad = place(random_tensors({"w": (6, 4)}, step)["w"])
        broken = mock.patch.object(step_monitor, "part_seconds", side_effect=OSError("disk"))
        with broken if fails and step and is_second else nullcontext():
            optimizer.step()


@pytest.mark.parametrize(
    ("every", "fails", "words"),
    [([2, 3], False, ["every_n_steps"]), ([2, 2], True, ["disk", "rank 1 of the group failed"])],
)
def test_ranks_that_differ_or_fail_raise_together(
    gloo: ProcessPool, every: list[int], fails: bool, words: list[str]
) -> None:
    with pytest.raises(RanksFailedError) as raised:
        gloo.run(_steps, every, fails=fails, world_size=2, timeout=20)
    assert not raised.value.running, "a rank hangs"
    text = "".join(failure.message for failure in raised.value.failures.values())
    assert all(word in text for word in words)
