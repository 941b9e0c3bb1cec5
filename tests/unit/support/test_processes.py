"""What tests can rely on: a pool that hides no failure or hang, and checks of shapes."""

import os
import signal
import time

import jaxtyping
import pytest
import torch
import torch.distributed as dist

from lightning_muon.math import newton_schulz
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import is_alive


def _sum_of_ranks() -> tuple[int, int]:
    """With the id of the process."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total), os.getpid()


def _raise_on(*kinds: type[Exception] | None) -> None:
    rank = dist.get_rank()
    kind = kinds[rank]
    if kind is not None:
        raise kind(f"bad value on rank {rank}")


def _sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def _die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        # The other ranks may still be connecting to this one; they return only once that is done.
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def test_calls_that_take_too_long_and_workers_that_die_are_named() -> None:
    pool = ProcessPool()  # To kill workers of this one costs no other test its warm pool.
    try:
        old = pool.run(_sum_of_ranks, world_size=2)
        with pytest.raises(RanksFailedError, match="rank 1 was still running") as caught:
            pool.run(_sleep_on, 1, 600.0, world_size=2, timeout=3.0)
        assert "in _sleep_on" in str(caught.value) and list(caught.value.results) == [0]
        assert not any(is_alive(pid) for _, pid in old)
        with pytest.raises(RanksFailedError, match="rank 1 died") as caught:
            pool.run(_die_on, 1, world_size=3, grace=5.0)
        assert list(caught.value.exit_codes) == [1] and caught.value.results == {0: 0, 2: 2}
        assert [total for total, _ in pool.run(_sum_of_ranks, world_size=3)] == [3, 3, 3]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("kinds", "match", "complaint"),
    [
        ((None, None), "bad", "all returned"),
        ((ValueError, None), "bad", "rank 1 did not raise"),
        ((ValueError, ValueError), "good", "rank 0: expected ValueError that matches 'good'"),
        ((ValueError, UnicodeError), "bad", "different types"),
    ],
)
def test_less_than_the_same_error_on_all_ranks_is_refused(
    gloo: ProcessPool, kinds: tuple[type[Exception] | None, ...], match: str, complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        gloo.expect_error_on_all_ranks(_raise_on, *kinds, match=match, world_size=2)


def test_shapes_in_the_annotations_of_the_maths_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        newton_schulz.orthogonalize(torch.zeros(3), steps=((1.0, 1.0, 1.0),), eps=1e-7, compute_dtype=torch.float32)
