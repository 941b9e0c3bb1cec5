"""The process pool itself: a distributed test proves nothing if its pool can hide a failure or hang."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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


def _raise_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 alone")
    dist.barrier()


def _sleep_on(rank: int, seconds: float) -> int:
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


def _change_globals() -> None:
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"


def _globals() -> tuple[torch.dtype, str | None, str]:
    return torch.get_default_dtype(), os.environ.get("LEFT_BEHIND"), os.environ["WORLD_SIZE"]


def _gather_over_mesh(extra_groups: int) -> torch.Tensor:
    """Full tensor of a sum of DTensors on a 2-D mesh, whose process groups have other names in every call."""
    for _ in range(extra_groups):
        dist.new_group(list(range(dist.get_world_size())))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    tensor = distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [Replicate(), Shard(0)])
    return (tensor + tensor).full_tensor()


def test_results_come_in_the_order_of_the_ranks(pool: ProcessPool) -> None:
    for world_size in (1, 3):
        total = 10 * sum(range(world_size)) + world_size
        expected = [(rank, total) for rank in range(world_size)]
        assert pool.run(_sum_of_ranks, 10, offset=1, world_size=world_size) == expected


def test_a_fresh_run_has_processes_of_its_own(pool: ProcessPool) -> None:
    kept = set(pool.run(_pid, world_size=2))
    fresh = pool.run_fresh(_pid, world_size=2)
    assert not kept & set(fresh)
    assert not any(is_alive(pid) for pid in fresh)


def test_an_error_comes_with_the_traceback_of_its_rank(pool: ProcessPool) -> None:
    with pytest.raises(RanksFailedError, match=r"rank 2 raised builtins\.ValueError: bad value on rank 2") as caught:
        pool.run(_raise_on, (2,), world_size=3)
    assert "in _raise_on" in str(caught.value)
    assert caught.value.results == {0: "rank 0 is fine", 1: "rank 1 is fine"}
    assert pool.run(_raise_on, (), world_size=3)[2] == "rank 2 is fine"


def test_ranks_that_wait_for_a_failed_one_show_their_stacks(pool: ProcessPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 0 was still running") as caught:
        pool.run(_raise_while_others_wait, world_size=2, timeout=60.0, grace=1.0)
    assert time.monotonic() - begin < 30.0
    assert caught.value.running == [0]
    assert "in _raise_while_others_wait" in str(caught.value).split("rank 0 was still running")[1]


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


def test_an_interrupted_call_leaves_no_answer_behind(pool: ProcessPool) -> None:
    def interrupt(*_: object) -> None:
        raise TimeoutError("interrupted")

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        alarm = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2))
        alarm.start()
        with pytest.raises(TimeoutError, match="interrupted"):
            pool.run(_sleep_on, 0, 2.0, world_size=2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert pool.run(_sum_of_ranks, 1, world_size=2) == [(0, 1), (1, 1)]


def test_a_call_does_not_see_globals_of_the_call_before(pool: ProcessPool) -> None:
    pool.run(_change_globals, world_size=2)
    assert pool.run(_globals, world_size=2) == [(torch.float32, None, "2")] * 2


def test_a_mesh_of_an_earlier_call_is_not_used_again(pool: ProcessPool) -> None:
    expected = 2 * torch.arange(21.0).reshape(7, 3)
    for extra_groups in (3, 0, 1):
        for result in pool.run(_gather_over_mesh, extra_groups, world_size=4):
            assert torch.equal(result, expected)


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
