"""What tests can rely on: a pool that hides no failure or hang, and checks of shapes."""

import os
import signal
import time
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
import torch.distributed as dist

from lightning_muon.math import newton_schulz
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import is_alive


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """A pool of this module's own, so that killing workers costs no other test its warm pool."""
    own = ProcessPool()
    yield own
    own.close()


def _sum_of_ranks(scale: int, *, offset: int = 0) -> tuple[int, int]:
    total = torch.tensor(scale * dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _raise_on(ranks: tuple[int, ...], kinds: tuple[type[Exception], ...] = (ValueError,)) -> str:
    rank = dist.get_rank()
    if rank in ranks:
        raise kinds[rank % len(kinds)](f"bad value on rank {rank}")
    return f"rank {rank} is fine"


def _sleep_on(rank: int, seconds: float) -> int:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # As a Trainer restores all handlers at its end.
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return os.getpid()


def _die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        # The other ranks may still be connecting to this one; they return only once that is done.
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def _pid() -> int:
    return os.getpid()


def test_a_call_that_takes_too_long_is_ended(pool: ProcessPool) -> None:
    old = pool.run(_pid, world_size=2)
    with pytest.raises(RanksFailedError, match="rank 1 was still running") as caught:
        pool.run(_sleep_on, 1, 600.0, world_size=2, timeout=3.0)
    assert "in _sleep_on" in str(caught.value)
    assert list(caught.value.results) == [0]
    assert not any(is_alive(pid) for pid in old)
    assert pool.run(_sum_of_ranks, 1, world_size=2) == [(0, 1), (1, 1)]


def test_a_worker_that_dies_is_named(pool: ProcessPool) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 died") as caught:
        pool.run(_die_on, 1, world_size=3, grace=5.0)
    assert list(caught.value.exit_codes) == [1]
    assert caught.value.results == {0: 0, 2: 2}
    assert pool.run(_sum_of_ranks, 1, world_size=3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("ranks", "match", "kinds", "complaint"),
    [
        ((), "bad", (ValueError,), "all returned"),
        ((0,), "bad", (ValueError,), "rank 1 did not raise"),
        ((0, 1), "good", (ValueError,), "rank 0: expected ValueError that matches 'good'"),
        ((0, 1), "bad", (ValueError, UnicodeError), "different types"),
    ],
)
def test_less_than_the_same_error_on_all_ranks_is_refused(
    pool: ProcessPool, ranks: tuple[int, ...], match: str, kinds: tuple[type[Exception], ...], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        pool.expect_error_on_all_ranks(_raise_on, ranks, kinds, match=match, world_size=2)


def test_shapes_in_the_annotations_of_the_maths_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        newton_schulz.orthogonalize(torch.zeros(3), steps=((1.0, 1.0, 1.0),), eps=1e-7, compute_dtype=torch.float32)
