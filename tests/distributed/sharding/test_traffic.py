"""What a step of each mode sends, and when, as seen at the operators of torch.distributed."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.sharding.training import Training, mesh_of
from tests.matrix.row import Row
from tests.support.processes import ProcessPool

# Every parameter has dimensions and is used. A block has 196 elements, so there is about one bucket for each.
ROW = Row(ranks=4, num_blocks=6, parts=("no bias",))
EXCHANGE, MESSAGE, ALL_REDUCE, ALL_GATHER = "alltoall_base_", "send", "allreduce_", "_allgather_base_"


@dataclass(frozen=True)
class Sent:
    phase: str  # What the rank was doing.
    operator: str
    is_payload: bool  # Whether it carries floating-point numbers; the ranks' notes to each other are integers.
    to: dict[int, int]  # Rank -> bytes that leave this one for it in an exchange or a message.

    @property
    def num_bytes(self) -> int:
        return sum(self.to.values())


class Wire(TorchDispatchMode):
    """Notes what is sent inside of it; the user sets ``phase``."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [tensor for each in args[:2] for tensor in (each if isinstance(each, list) else [each])]
            is_payload = any(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors)
            self.sent.append(Sent(self.phase, name, is_payload, _bytes_to(name, args)))
        return func(*args, **(kwargs or {}))


def _bytes_to(name: str, args: Any) -> dict[int, int]:
    if name not in (EXCHANGE, MESSAGE):
        return {}
    group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
    ranks = dist.get_process_group_ranks(group)
    if name == MESSAGE:
        return {ranks[args[2]]: args[0][0].numel() * args[0][0].element_size()}
    counts = zip(ranks, args[4], strict=True)
    return {rank: count * args[1].element_size() for rank, count in counts if rank != dist.get_rank()}


def _run(name: str, shape: tuple[int, ...], *, num_passes: int = 1, **options: Any) -> list[Sent]:
    """What this rank sends in the last step; its phases are "0" to "3" for micro-batches, "finish" and "step"."""
    training = Training.start(name, mesh_of(shape), **{"net": ROW.make_model(), "bucket_bytes": 900, **options})
    wire, mode = Wire(), training.mode
    for step in range(2):
        mode.finish_parameters()
        wire.sent.clear()
        training.optimizer.zero_grad()
        with wire:
            for number in range(num_passes):
                wire.phase = str(number)
                with nullcontext() if number == num_passes - 1 else mode.no_sync():
                    ROW.loss(training.net, ROW.batch(step, number, dist.get_rank())).backward()
            wire.phase = "finish"
            mode.finish_gradients()
            wire.phase = "step"
            training.optimizer.step()
            mode.finish_parameters()
    mode.close()
    return wire.sent


def _payload(sent: list[Sent], *phases: str) -> list[Sent]:
    return [each for each in sent if each.is_payload and each.phase in phases]


NUM_ELEMENTS = sum(parameter.numel() for parameter in ROW.make_model().parameters())


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero2_moves_each_gradient_and_value_once(
    gloo: ProcessPool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ranks = gloo.run(_run, "zero2", shape, net=ROW.make_model().to(dtype), world_size=math.prod(shape))
    # Every rank has all of the gradient and needs 1/S of the sum, so (S - 1) / S of it leaves each rank on average.
    # Owners are not equally large, so that holds for the sum over the ranks of a replica: (S - 1) N. New values: each
    # leaves its only holder once for each of the S - 1 others.
    floor = math.prod(shape[:-1]) * (shape[-1] - 1) * NUM_ELEMENTS * dtype.itemsize
    there = sum(each.num_bytes for sent in ranks for each in _payload(sent, "0", "finish") if each.operator == EXCHANGE)
    back = sum(each.num_bytes for sent in ranks for each in _payload(sent, "step") if each.operator == MESSAGE)
    assert (there, back) == (floor, floor)
    for rank, sent in enumerate(ranks):
        # With nodes as replicas, one all-reduce of a rank's own part is all that goes between them.
        to = {other // shape[-1] for each in _payload(sent, "0", "finish", "step") for other in each.to}
        assert to == {rank // shape[-1]}
        # All of it goes while backward runs.
        assert EXCHANGE not in {each.operator for each in _payload(sent, "finish")}
        # Matrices are whole where they are orthogonalized: nothing is gathered for Muon.
        assert {each.operator for each in _payload(sent, "step")} <= {MESSAGE, "recv_"}
        # The sum over the replicas is all that follows an exchange.
        assert {each.operator for each in _payload(sent, "0", "finish")} == (
            {EXCHANGE, ALL_REDUCE} if len(shape) > 1 else {EXCHANGE}
        )


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_fsdp_brings_each_matrix_to_one_owner_and_back(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    num_shards, numel, own = shape[-1], 0, [0, 0]
    for name, weight in ROW.make_model().named_parameters():
        if ("blocks" in name or "qkv" in name) and weight.ndim > 1:
            sizes = [each.numel() for each in weight.chunk(num_shards)]
            numel, own = numel + weight.numel(), [own[0] + min(sizes), own[1] + max(sizes)]
    inside = between = 0
    for rank, sent in enumerate(gloo.run(_run, "fsdp", shape, dedupe="always", world_size=math.prod(shape))):
        for other, num_bytes in (item for each in _payload(sent, "step") for item in each.to.items()):
            if rank // num_shards == other // num_shards:
                inside += num_bytes
            else:
                between += num_bytes
    # An owner has its own piece, one of the smallest to one of the largest. Replicas get each update once.
    assert 8 * (numel - own[1]) <= inside <= 8 * (numel - own[0])
    assert between == (4 * numel if len(shape) > 1 else 0)


@pytest.mark.parametrize(("shape", "reshard"), [((3,), True), ((2, 2), False)], ids=str)
def test_fsdp_gathers_in_each_micro_batch_or_once(gloo: ProcessPool, shape: tuple[int, ...], reshard: bool) -> None:
    options = {"reshard_after_backward": reshard, "accumulate": "whole"}
    for sent in gloo.run(_run, "fsdp", shape, num_passes=4, **options, world_size=math.prod(shape)):
        by_phase = [
            sum(each.operator == ALL_GATHER and each.phase == str(phase) for each in sent) for phase in range(4)
        ]
        # Forward and backward gather each block; the root keeps its weights in between.
        assert by_phase == ([2 * ROW.num_blocks + 1] * 4 if reshard else [ROW.num_blocks + 1, 0, 0, 0])
