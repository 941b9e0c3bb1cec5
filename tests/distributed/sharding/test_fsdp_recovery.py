"""After an exception in forward or backward that is caught, training goes on as if there had been no such batch."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.compat import torch as compat
from tests.distributed import backward_passes
from tests.distributed.sharding.training import Run, Training, largest_difference, loss, mesh_of, train_alone
from tests.support.faults import OutOfMemoryError, fail_in
from tests.support.processes import ProcessPool


def _run_failing_batch(training: Training, run: Run, where: str, *, num_before: int, tells: bool) -> None:
    """Some micro-batches, the next one of which fails; with a branch that no other batch uses."""
    other = replace(run, branch_of=lambda step, rank: 1)
    for micro_batch in range(num_before):
        with training.mode.no_sync():
            loss(training.net, other, 77, micro_batch, dist.get_rank()).backward()
    is_last = num_before == run.accumulate - 1
    fault = fail_in(training.net.blocks[1].norm, where)
    with nullcontext() if is_last else training.mode.no_sync(), pytest.raises(OutOfMemoryError):
        loss(training.net, other, 78, 0, dist.get_rank()).backward()
    fault.remove()
    if tells:
        (training.mode.backward_failed if where == "backward" else training.mode.forward_failed)()


def _train(name: str, shape: tuple[int, ...], run: Run, options: dict[str, Any], tells: bool) -> list[Any]:
    """Weights after some steps, for each way to fail before the second and before the third step."""
    results = []
    mesh = mesh_of(shape)
    for where in ("backward", "forward"):
        for num_before in range(run.accumulate):
            if where == "forward" and num_before:
                continue  # What was computed before stays, and is the program's to drop.
            training = Training.start(name, mesh, **options)
            for step in range(run.steps):
                if step in (1, 2):
                    _run_failing_batch(training, run, where, num_before=num_before, tells=tells)
                    if where == "backward" and tells:
                        assert all(parameter.grad is None for parameter in training.net.parameters())
                training.step(run, step)
            results.append(training.weights())
            training.mode.close()
    return results


@pytest.mark.parametrize(
    ("name", "shape", "options", "accumulate", "tells"),
    [
        ("fsdp", (1,), {}, 1, False),
        ("fsdp", (3,), {}, 2, True),
        ("fsdp", (2, 2), {"reshard_after_backward": False}, 2, False),
        ("zero2", (2,), {"bucket_bytes": 500}, 2, True),
        ("ddp", (2,), {"bucket_bytes": 500}, 2, True),
    ],
)
def test_a_batch_that_failed_on_all_ranks_leaves_no_trace(
    gloo: ProcessPool, name: str, shape: tuple[int, ...], options: dict[str, Any], accumulate: int, tells: bool
) -> None:
    run = Run(accumulate=accumulate, steps=4)
    num_ranks = math.prod(shape)
    expected = train_alone(run, num_ranks)
    for result in gloo.run(_train, name, shape, run, options, tells, world_size=num_ranks)[0]:
        # Gradients summed in another order.
        assert largest_difference(result, expected)[0] < 2e-5


def _one_rank_fails_in_a_reducer(name: str) -> None:
    training = Training.start(name, mesh_of((2,)), bucket_bytes=500)
    run = Run()
    training.step(run, 0)
    for attempt in range(2):
        training.optimizer.zero_grad()
        fault = fail_in(training.net.blocks[1].norm, "backward") if dist.get_rank() == 1 and attempt == 0 else None
        try:
            loss(training.net, run, 1, attempt, dist.get_rank()).backward()
        except OutOfMemoryError:
            training.mode.backward_failed()
            assert fault is not None
            fault.remove()
        else:
            training.mode.finish_gradients()
            return


@pytest.mark.parametrize("name", ["zero2", "ddp"])
def test_ranks_do_not_add_gradients_of_different_batches(gloo: ProcessPool, name: str) -> None:
    gloo.expect_error_on_all_ranks(
        _one_rank_fails_in_a_reducer, name, world_size=2, exception=RuntimeError, match="only leave out the same batch"
    )


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
