"""A plain loop over FSDP2 is told of a failed backward, and of steps that no backward has led to."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.compat import torch as compat
from tests.distributed import backward_passes
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
