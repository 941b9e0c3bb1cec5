"""What FSDP2 keeps of gradients between the micro-batches of an accumulated batch, and what it sends."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_muon import ModeOptions, ParallelMuon, make_mode
from lightning_muon.compat.torch import has_partial_sums, unreduced_gradients
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.units import fsdp_modules, fsdp_roots
from tests.distributed.sharding.test_traffic import ALL_GATHER, ALL_REDUCE, Wire
from tests.distributed.sharding.training import Training, mesh_of
from tests.matrix.row import Row
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes as whole_tensors

REDUCE_SCATTER = "_reduce_scatter_base_"
PASSES = 3
ROW = Row(ranks=4, accumulate=PASSES, parts=("unused", "scale", "frozen", "skips"))  # The last one leaves out a unit.


def _start(shape: tuple[int, ...], accumulate: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Training:
    return Training.start("fsdp", mesh_of(shape), net=ROW.make_model().to(dtype), accumulate=accumulate, **options)


def _backward(training: Training, number: int) -> None:
    with nullcontext() if number == PASSES - 1 else training.mode.no_sync():
        _loss(training.net, number, dist.get_rank()).backward()


def _loss(net: nn.Module, number: int, rank: int) -> Tensor:
    return ROW.loss(net, ROW.batch(0, number, rank))


def _measure(shape: tuple[int, ...], accumulate: str) -> tuple[list[list[str]], int, int, int]:
    """Payloads of each micro-batch; after the first one elements of whole gradients, of shards, and partial sums."""
    training, operators, held = _start(shape, accumulate), list[list[str]](), (0, 0, 0)
    for number in range(PASSES):
        with Wire() as wire:
            _backward(training, number)
            if number == PASSES - 1:  # Before torch 2.13 a unit that it leaves out is reduced here.
                training.mode.finish_gradients()
        operators.append([each.operator for each in wire.sent if each.is_payload])
        if number == 0:
            wholes = [each for root in fsdp_roots(training.net) for each in unreduced_gradients(root)]
            shards = [local_tensor(p.grad) for p in training.net.parameters() if p.grad is not None and p.ndim]
            sizes = [sum(each.numel() for each in some) for some in (wholes, shards)]
            held = (*sizes, sum(map(has_partial_sums, fsdp_modules(training.net))))
    return operators, *held


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_what_is_sent_and_held(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    net = ROW.make_model()
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad and p.ndim)
    trained -= sum(p.numel() for p in net.tail.unused.parameters())
    for operators, wholes, shards, partial in gloo.run(_measure, shape, "sharded", world_size=math.prod(shape)):
        num_units = len(operators[0]) - operators[0].count(ALL_GATHER)
        # The last micro-batch leaves out a unit, which has nothing to be summed then; from torch 2.13 on zeros.
        assert [each.count(REDUCE_SCATTER) for each in operators[:-1]] == [num_units] * (PASSES - 1)
        # Each unit is summed over the replicas once, and what no unit has over all ranks.
        assert [each.count(ALL_REDUCE) for each in operators] == [0, 0, num_units * (len(shape) > 1) + 1]
        assert wholes == 0
        assert (shards, partial) == ((0, num_units) if len(shape) > 1 else (pytest.approx(trained / 2, abs=60), 0))
    for operators, wholes, _, partial in gloo.run(_measure, shape, "whole", world_size=math.prod(shape)):
        assert [set(each) for each in operators[:-1]] == [{ALL_GATHER}] * (PASSES - 1)
        assert wholes >= trained - 10 and partial == 0


def _sums_of_bfloat16(shape: tuple[int, ...]) -> tuple[set[Any], bool]:
    """Dtypes of whole gradients after a micro-batch, and whether there are sums of shards."""
    training = _start(shape, "sharded", torch.bfloat16, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    _backward(training, 0)
    wholes = {each.dtype for root in fsdp_roots(training.net) for each in unreduced_gradients(root)}
    return wholes, any(map(has_partial_sums, fsdp_modules(training.net)))


def test_sums_are_not_rounded_in_between(gloo: ProcessPool) -> None:
    assert gloo.run(_sums_of_bfloat16, (2,), world_size=2) == [({torch.float32}, False)] * 2
    assert gloo.run(_sums_of_bfloat16, (2, 2), world_size=4) == [(set(), True)] * 4


def _divide_anew(shape: tuple[int, ...]) -> None:
    training = _start(shape, "sharded")
    for divisor in (5, 6):  # Without zero_grad in between.
        _backward(training, 0)
        _backward(training, PASSES - 1)
        training.mode.set_gradient_divisor(divisor)
        training.mode.finish_gradients()


def test_gradients_of_an_earlier_step_are_not_divided_twice(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_divide_anew, (2,), match="earlier step .* zero_grad", world_size=2)


def _two_optimizers(accumulate: Any, *, drops: bool) -> dict[str, Tensor]:
    """Two of three micro-batches on (replicate, shard), between which one of two optimizers drops its gradients."""
    net = ROW.make_model()
    mode = make_mode("fsdp", mesh_of((2, 2)), ModeOptions(accumulate=accumulate, wrap_policy=()))
    mode.prepare(net)
    own = set(net.blocks[0].parameters())
    groups = [[each for each in net.parameters() if (each in own) == is_own] for is_own in (True, False)]
    optimizers = [ParallelMuon(group, algorithm="adamw") for group in groups]
    mode.attach(net, optimizers)
    for number in range(2):
        with nullcontext() if number else mode.no_sync():
            _loss(net, number, dist.get_rank()).backward()
        if drops and not number:
            optimizers[0].zero_grad()
    mode.finish_gradients()
    return whole_tensors({name: p.grad for name, p in net.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("accumulate", ["sharded", "whole"])
def test_one_optimizer_drops_what_is_its_own(gloo: ProcessPool, accumulate: str) -> None:
    dropped, kept = (gloo.run(_two_optimizers, accumulate, drops=drops, world_size=4)[0] for drops in (True, False))
    net = ROW.make_model()
    for rank in range(4):
        (_loss(net, 1, rank) / 4).backward()
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            expected = parameter.grad if name.startswith("blocks.0.") else kept[name]
            torch.testing.assert_close(dropped[name], expected, rtol=0, atol=1e-6, msg=name)
