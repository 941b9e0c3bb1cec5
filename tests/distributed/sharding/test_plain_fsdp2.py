"""A plain loop over FSDP2 is told of a failed backward, and of steps that no backward has led to."""

import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_muon import full_state_dict
from lightning_muon.comm import agreement
from lightning_muon.compat import torch as compat
from tests.distributed import backward_passes
from tests.distributed.sharding.training import mesh_of
from tests.support.faults import OutOfMemoryError, fail_in
from tests.support.processes import ProcessPool


def _plain(*, reset: str, knows_module: bool = True) -> tuple[list[str], bool]:
    """A loop of fully_shard and ParallelMuon alone, one batch of which fails.

    What the steps after it raise, and whether weights and state are those of a run that never saw the batch.
    """
    problems: list[str] = []
    results = []
    for fails in (False, True):
        net = backward_passes.sharded((2,))
        given: Any = net if knows_module else list(net.named_parameters())
        optimizer = backward_passes.make_optimizer(given, muon_patterns=["second.weight"])
        for step in range(5):
            if step == 2 and fails:
                fault = fail_in(net.branch, "backward")
                with pytest.raises(OutOfMemoryError):
                    backward_passes.plain(net, optimizer, 77)
                fault.remove()
                {"no": lambda _: None, "by torch": compat.reset_fsdp, "by hand": compat.reset_fsdp_by_hand}[reset](net)
                optimizer.zero_grad()
            backward_passes.plain(net, optimizer, step)
            try:
                optimizer.step()
            except RuntimeError as problem:
                problems.append(str(problem))
        tensors = [*net.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
        results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)])
    return problems, all(map(torch.equal, *results))


@pytest.mark.parametrize("knows_module", [True, False])
def test_a_plain_loop_over_fsdp2_is_told_to_reset_it(gloo: ProcessPool, knows_module: bool) -> None:
    for problems, _ in gloo.run(_plain, reset="no", knows_module=knows_module, world_size=2):
        assert len(problems) == 3 and all("still in the middle of that pass" in problem for problem in problems)


@pytest.mark.parametrize("reset", ["by torch", "by hand"])
def test_a_plain_loop_that_resets_fsdp2_goes_on_exactly(gloo: ProcessPool, reset: str) -> None:
    for problems, is_equal in gloo.run(_plain, reset=reset, world_size=2):
        assert problems == [] and is_equal


def _steps_without_gradients() -> list[str]:
    """What steps raise: before training, with one of two optimizers, without a loss, after zero_grad, at last."""
    net = backward_passes.sharded((2,))
    halves: list[list[Any]] = [[], []]
    for name, parameter in net.named_parameters():
        halves[name.startswith("second")].append((name, parameter))
    whole = backward_passes.make_optimizer(net, muon_patterns=["second.weight"])
    parts = [backward_passes.make_optimizer(half, algorithm="adamw") for half in halves]
    problems: list[str] = []

    def step(optimizer: Any, *closure: Any) -> None:
        try:
            optimizer.step(*closure)
            problems.append("")
        except RuntimeError as problem:
            problems.append(str(problem)[:50])
        optimizer.zero_grad()

    step(whole)
    step(whole)
    for number in range(3):
        backward_passes.plain(net, whole, number)
        for optimizer in (whole, *parts):
            optimizer.step()
        whole.zero_grad()
    for part in parts:
        step(part)
    step(whole, lambda: None)
    backward_passes.plain(net, whole, 3)
    whole.zero_grad()  # The program throws them away, for example because they are too large.
    step(whole)
    backward_passes.plain(net, whole, 4)
    step(whole)
    step(whole)
    return problems


def test_a_step_without_a_backward_pass_is_an_error(gloo: ProcessPool) -> None:
    for problems in gloo.run(_steps_without_gradients, world_size=2):
        assert problems[:-1] == [""] * 7
        assert problems[-1].startswith("no parameter of the optimizer has a gradient")


def _shard_after_the_optimizer() -> list[Any]:
    """Weights where the optimizer is made before and after fully_shard, and what a step raises if it has run before."""
    found: list[Any] = []
    for is_first in (True, False):
        torch.manual_seed(0)
        net = backward_passes.Net()
        optimizer = backward_passes.make_optimizer(net) if is_first else None
        fully_shard(net, mesh=mesh_of((2,)))
        optimizer = optimizer or backward_passes.make_optimizer(net)
        for step in range(2):
            backward_passes.plain(net, optimizer, step)
            optimizer.step()
        net.reshard()
        found.append([parameter.full_tensor() for parameter in net.parameters()])
    net = backward_passes.Net()
    optimizer = backward_passes.make_optimizer(net)
    backward_passes.plain(net, optimizer, 0)
    optimizer.step()
    fully_shard(net, mesh=mesh_of((2,)))
    backward_passes.plain(net, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"embed\.weight of the module is no longer the parameter that ParallelMuon"):
        optimizer.step()
    return found


def test_an_optimizer_made_before_fully_shard_trains_the_shards(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    begin = list(backward_passes.Net().parameters())
    for before, after in gloo.run(_shard_after_the_optimizer, world_size=2):
        assert all(map(torch.equal, before, after)) and not torch.equal(before[0], begin[0])


def _step_late() -> list[str]:
    """What a rank says whose other rank comes late to the first step, to one of the next, and to whole weights."""
    said: list[str] = []
    logger, handler = logging.getLogger(agreement.__name__), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    net = backward_passes.sharded((2,))
    optimizer = backward_passes.make_optimizer(net)
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_LATE", 1)
        for step in range(3):
            backward_passes.plain(net, optimizer, step)
            time.sleep(2 * (step != 1) * dist.get_rank())
            optimizer.step()
        time.sleep(2 * dist.get_rank())
        full_state_dict(net)
    logger.removeHandler(handler)
    return said


def test_a_rank_that_steps_alone_says_where_it_waits(gloo: ProcessPool) -> None:
    waits, comes_late = gloo.run(_step_late, world_size=2)
    assert len(waits) == 3 and not comes_late
    assert all(
        re.match(r"rank 0 has waited for 1 s for other ranks, at .*test_plain_fsdp2\.py:\d+\.", each) for each in waits
    )
    with (
        pytest.raises(RuntimeError, match=r"rank 0 has waited until the timeout of .* at .*test_plain_fsdp2\.py:\d+\."),
        agreement.named_waits(late=False),
    ):
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")
