"""Ranks that wait for each other in different places end together; ranks that are slow do not."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from lightning_muon.monitor.watchdog import watching
from tests.distributed.sharding.experts import inputs_of, sharded
from tests.distributed.sharding.models import make_mesh
from tests.support.processes import ProcessPool


def _train(
    shape: tuple[int, int],
    steps: Sequence[Sequence[Sequence[int]]],
    widths: Sequence[int] = (13, 11),
    *,
    log: bool = False,
    patience: float = 4.0,
    sleep: float = 0.0,
) -> int:
    """Steps in which each rank chooses its experts; an error that comes after ten seconds is another error."""
    model, agreement = sharded(make_mesh(shape), ["Expert", "Layer"], widths)
    rank = dist.get_rank()
    with watching(agreement.order, patience=patience):
        for chosen in steps:
            start = time.monotonic()
            try:
                if rank == 1:
                    time.sleep(sleep)
                loss = model(inputs_of(rank), chosen[rank]).square().mean()
                if log:
                    dist.all_reduce(loss.detach())
                loss.backward()
                agreement.finish()
            except RuntimeError:
                assert time.monotonic() - start < 10 - patience
                raise
    assert time.monotonic() - start < 10
    return len(steps)


BOTH = ([0, 1], [0, 1])


@pytest.mark.parametrize(
    ("shape", "steps", "widths"),
    [
        pytest.param((1, 2), [([0, 1], [0])], (13, 13), id="one rank skips a unit"),
        pytest.param((1, 2), [BOTH, BOTH, ([0], [0, 1])], (13, 13), id="one rank skips a unit later"),
        pytest.param((1, 2), [([0], [1])], (13, 11), id="units of different sizes"),
        pytest.param((2, 2), [([0], [0], [0], [0, 1])], (13, 11), id="one of four ranks runs one unit more"),
        pytest.param((4, 1), [([0], [0], [0, 1], [0])], (13, 11), id="replicas only"),
    ],
)
def test_ranks_that_run_different_units_end_together(
    gloo: ProcessPool,
    shape: tuple[int, int],
    steps: Sequence[Sequence[Sequence[int]]],
    widths: Sequence[int],
) -> None:
    gloo.expect_error_on_all_ranks(
        _train,
        shape,
        steps,
        widths,
        patience=1.0,
        match=r"run different units.*layers\.0\.experts\.1",
        exception=RuntimeError,
        world_size=len(steps[0]),
    )


@pytest.mark.parametrize("steps", [[([0], [0, 1])], [BOTH, ([0], [0, 1])]], ids=["first", "later"])
def test_a_rank_in_a_unit_and_one_in_another_collective_end_together(
    gloo: ProcessPool, steps: Sequence[Sequence[Sequence[int]]]
) -> None:
    gloo.expect_error_on_all_ranks(
        _train, (1, 2), steps, log=True, patience=1.0, match="experts", exception=RuntimeError, world_size=2
    )


def test_without_shortened_patience_it_takes_less_than_ten_seconds(gloo: ProcessPool) -> None:
    start = time.monotonic()
    gloo.expect_error_on_all_ranks(
        _train, (1, 2), [BOTH, ([0], [0, 1])], match="experts.1", exception=RuntimeError, world_size=2
    )
    assert time.monotonic() - start < 10


def test_a_slow_rank_is_waited_for(gloo: ProcessPool) -> None:
    steps = [BOTH, ([1], [1]), BOTH]
    assert gloo.run(_train, (1, 2), steps, patience=0.5, sleep=1.5, world_size=2) == [3, 3]


def _fail_on_one_rank() -> str:
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    try:
        with watching(agreement.order, patience=1.0):
            model(inputs_of(0), [0])
            if dist.get_rank() == 1:
                raise ValueError("no such file")
            model.layers[0](inputs_of(0), [0])
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_waits_for_a_failed_one_learns_why(gloo: ProcessPool) -> None:
    waiting, failed = gloo.run_fresh(_fail_on_one_rank, world_size=2, timeout=40.0)
    assert failed == "ValueError: no such file"
    assert waiting.startswith("RuntimeError") and "rank 1" in waiting and "no such file" in waiting
