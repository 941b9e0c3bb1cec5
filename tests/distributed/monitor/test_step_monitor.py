"""``StepMonitor`` against weights before and after, bytes counted at torch's collectives, and FLOPs by hand."""

import json
import math
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import ParallelMuon, StepMonitor
from lightning_muon.comm import collectives
from lightning_muon.monitor import step_monitor
from lightning_muon.monitor.step_monitor import flops_of_token, part_seconds
from lightning_muon.monitor.timeline import WHOLE_STEP, read_parts
from lightning_muon.schedule.program import TRANSFER, Op, OpKind
from lightning_muon.schedule.simulate import Span
from tests.distributed.sharding.training import distributed_over
from tests.support.outcome import RanksFailedError
from tests.support.processes import ProcessPool
from tests.support.tensors import random_tensors, whole

MATRICES = {"odd": (13, 7), "square": (24, 24), "flat": (3, 40)}
VECTORS = {"bias": (9,), "gain": (5,)}
LR, FACTOR, DECAY = 0.02, 2.5, 0.1
EXACT: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}
EVERY = 3
# 5 steps of 2 s^2 (2 l + s) with sides s <= l.
FLOPS = sum(5 * 2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in MATRICES.values())


@contextmanager
def counted_bytes(num_shards: int) -> Generator[Counter[str]]:
    """Bytes that this rank gives to torch's collectives for other ranks, by the axis of a (replicate, shard) mesh."""
    found, me = Counter[str](), dist.get_rank() if dist.is_initialized() else 0
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def add(group: Any, peer: int, size: int) -> None:
        world = dist.get_global_rank(group, peer)
        if world != me:
            found["shard" if world // num_shards == me // num_shards else "replicate"] += size

    def counting_all_to_all(out: Tensor, sent: Tensor, _: list[int], to: list[int], group: Any, **options: Any) -> Any:
        for peer, numel in enumerate(to):
            add(group, peer, numel * sent.element_size())
        return all_to_all(out, sent, _, to, group=group, **options)

    def counting_batch(messages: list[Any]) -> Any:
        for each in messages:
            if each.op is dist.isend:
                add(each.group, each.group_peer, each.tensor.nbytes)
        return batch(messages)

    patched = {"all_to_all_single": counting_all_to_all, "batch_isend_irecv": counting_batch}
    with mock.patch.multiple(dist, **patched):
        yield found


def _rms(tensors: list[Tensor]) -> float:
    return math.sqrt(float(torch.cat([each.flatten().double() for each in tensors]).square().mean()))


def _train(mesh_shape: tuple[int, ...], folder: str) -> dict[str, Any]:
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
    optimizer = ParallelMuon(groups, muon_lr_factor=FACTOR, chunk_bytes=1000, dedupe="always", **EXACT)
    clock = iter(range(10**6))
    with mock.patch.object(step_monitor, "time", SimpleNamespace(monotonic=lambda: next(clock))):
        monitor = StepMonitor(
            optimizer, every_n_steps=EVERY, flops_per_token=1000.0, peak_flops=1e6, data_copies=1, folder=folder
        )
        taken: list[dict[str, float]] = []
        for step in range(1, 2 * EVERY + 1):
            for name, grad in random_tensors(MATRICES | VECTORS, step).items():
                parameters[name].grad = place[name](grad)
            before = {name: whole(parameter) for name, parameter in parameters.items()}
            monitor.count(10)
            with counted_bytes(mesh_shape[-1]) as sent:
                optimizer.step()
            taken.append(monitor.take())
    after = {name: whole(parameter) for name, parameter in parameters.items()}
    monitor.close()
    executor = optimizer._planned.matrix_step.executor  # type: ignore[union-attr]
    is_gone = executor.recorder is None and not collectives.observers and not optimizer._optimizer_step_pre_hooks
    return {"taken": taken, "before": before, "after": after, "sent": sent, "is_gone": is_gone}


def _orthogonalized(result: dict[str, Any], name: str) -> Tensor:
    """What Newton-Schulz has made of a matrix, from the weights before and after."""
    rate = LR * FACTOR * 0.2 * math.sqrt(max(MATRICES[name]))
    before, after = (result[when][name].double() for when in ("before", "after"))
    return (before * (1 - LR * FACTOR * DECAY) - after) / rate


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_the_numbers_are_those_of_weights_messages_and_shapes(
    gloo: ProcessPool, mesh_shape: tuple[int, ...], tmp_path: Path
) -> None:
    num_ranks, folder = math.prod(mesh_shape), tmp_path / "muon_monitor"
    folder.mkdir()
    (folder / "steps.jsonl").write_text('{"step": 0}\n{"step": 0, "sec')  # Of a process that was killed.
    results = gloo.run(_train, mesh_shape, str(tmp_path), world_size=num_ranks)
    result, values = results[0], results[0]["taken"][-1]
    assert all(each["taken"] == result["taken"] and each["is_gone"] for each in results)
    assert [bool(taken) for taken in result["taken"]] == [False, False, True] * 2

    for name, members in (("group0.muon", MATRICES), ("group1", VECTORS)):
        change = [result["after"][each] - result["before"][each] for each in members]
        assert values[f"update_rms/{name}"] == pytest.approx(_rms(change), rel=1e-6)
        assert values[f"weight_rms/{name}"] == pytest.approx(
            _rms([result["after"][each] for each in members]), rel=1e-6
        )
    assert values["lr/group1"] == LR
    for rows, cols in MATRICES.values():
        rate = LR * FACTOR * 0.2 * math.sqrt(max(rows, cols))
        assert values[f"muon_lr/group0.{rows}x{cols}"] == pytest.approx(rate)

    sent = {axis: sum(each["sent"][axis] for each in results) / num_ranks for axis in ("shard", "replicate")}
    assert {axis: values.get(f"bytes/{axis}", 0) for axis in sent} == sent
    assert list(map(bool, sent.values())) == [mesh_shape[-1] > 1, len(mesh_shape) > 1], "or nothing was compared"

    lines = [json.loads(each) for each in (folder / "steps.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [0, EVERY, 2 * EVERY]
    line = lines[-1]
    singular = torch.linalg.svdvals(_orthogonalized(result, line["matrix"]))
    error = math.sqrt(float((singular.square() - 1).square().mean()))
    assert values["orthogonality_error"] == pytest.approx(error, rel=1e-3)
    assert error > 0.05, "coefficients that tune singular values to about 1 only"

    # The clock goes on by one each time that it is read, once for the interval of three steps.
    assert values["tokens_per_second"] == 30 * num_ranks
    assert values["tflops/model"] == pytest.approx(30 * 1000 / 1e12) and values["mfu/model"] == pytest.approx(0.03)
    done = round(1e9 * sum(line["newton_schulz_gflop"]))
    assert done == FLOPS
    assert values["tflops/optimizer"] == pytest.approx(3 * done / num_ranks / 1e12)
    assert values["mfu/optimizer"] == pytest.approx(values["tflops/optimizer"] * 1e6)

    parts = [f"optimizer_ms/{name}" for name in ("momentum", "newton_schulz", "update", "adamw", "other", "total")]
    assert all(values[part] > 0 for part in parts)
    assert ("optimizer_ms/gather" in values) == ("optimizer_ms/scatter" in values) == (mesh_shape[-1] > 1)

    step, device_type, recording = read_parts(folder) or (0, "", None)
    assert (step, device_type) == (2 * EVERY, "cpu") and recording is not None
    assert sorted(recording.program) == list(range(num_ranks))
    of_op = [pair for rank in recording.matrices.values() for pair in rank.items()]
    assert sorted(name for op, names in of_op if "newton" in op for name in names) == sorted(MATRICES)


def _span(kind: str, start: float, end: float, lane: str = "compute") -> Span:
    return Span(Op(kind=kind, key=str(start), rank=0, lane=lane), start, end)


def test_communication_is_exposed_in_the_step_where_nothing_is_computed() -> None:
    found = part_seconds(
        [
            _span(OpKind.EXCHANGE, 0, 3, TRANSFER),  # In backward, and one second of the step.
            Span(WHOLE_STEP, 2, 20),
            _span(OpKind.NEWTON_SCHULZ, 4, 8),
            _span(OpKind.SCATTER, 7, 11, TRANSFER),
            _span(OpKind.UPDATE, 11, 12),
        ]
    )
    assert {name: seconds for name, seconds in found.items() if seconds} == {
        "nodes": 3,
        "newton_schulz": 4,
        "scatter": 4,
        "update": 1,
        "total": 18,
        "exposed_communication": 1 + 3,
        "other": 18 - 5 - 4,
    }


def test_what_is_multiplied_counts_for_a_token() -> None:
    tied = nn.Embedding(10, 4)
    head = nn.Linear(4, 10)
    head.weight = tied.weight
    model = nn.ModuleList([nn.Embedding(100, 4), tied, nn.Linear(4, 3), nn.LayerNorm(3), head])
    model[2].weight.requires_grad = False
    assert flops_of_token(model) == 6 * 40 + 4 * 12


def _steps(*, every: int, fails: bool = False) -> None:
    place = distributed_over((2,), 0)
    parameter = nn.Parameter(place(torch.ones(6, 4)))
    optimizer = ParallelMuon([("w", parameter)], lr=LR, algorithm="muon")
    StepMonitor(optimizer, every_n_steps=every)
    for step in range(2):
        parameter.grad = place(random_tensors({"w": (6, 4)}, step)["w"])
        broken = mock.patch.object(step_monitor, "part_seconds", side_effect=OSError("disk"))
        with broken if fails and step and dist.get_rank() == 1 else mock.patch.dict({}):
            optimizer.step()


def test_ranks_that_differ_or_fail_raise_together(gloo: ProcessPool) -> None:
    def message(**options: Any) -> str:
        with pytest.raises(RanksFailedError) as raised:
            gloo.run(_by_rank, options, world_size=2, timeout=20)
        assert not raised.value.running, "a rank hangs"
        return "".join(failure.message for failure in raised.value.failures.values())

    assert "every_n_steps" in message(every=[2, 3])
    assert "disk" in (text := message(every=[2, 2], fails=True)) and "rank 1 has failed to measure step 2" in text


def _by_rank(options: dict[str, Any]) -> None:
    every, *_ = options["every"][dist.get_rank() :]
    _steps(every=every, fails=options.get("fails", False))
