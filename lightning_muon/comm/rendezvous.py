"""A store of its own for each attempt of ``torchrun --max-restarts``.

The agent of torchrun keeps one store through all attempts (unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``), so a
process that was started again finds the addresses of processes that are gone, and waits for them.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_PREFIX = "lightning_muon/attempt"
_SECONDS_BETWEEN_LOOKS = 0.05


def is_in_shared_store() -> bool:
    """Whether an agent of torchrun started this process, with a store that outlives it; local."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """A store that no earlier process has written to. Every process that torchrun has started must call it.

    Rank 0 names the attempt. The others cannot read the name under a fixed key, where that of an earlier one may be:
    each asks by a new word, which rank 0 answers, until all have agreed.

    Raises:
        TimeoutError: On this rank, if the others do not come.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        waiting = set(range(1, num_ranks))
        while waiting:
            for other in sorted(waiting):
                if store.check([f"{_PREFIX}/{word}/{other}"]):
                    waiting.discard(other)
                elif store.check([f"{_PREFIX}/ask/{other}"]):
                    store.set(f"{_PREFIX}/answer/{store.get(f'{_PREFIX}/ask/{other}').decode()}", word)
            _pause(deadline, f"ranks {sorted(waiting)} have not come")
        return dist.PrefixStore(f"{_PREFIX}/{word}", store)
    store.set(f"{_PREFIX}/ask/{rank}", word)
    while not store.check([f"{_PREFIX}/answer/{word}"]):
        _pause(deadline, "rank 0 has not come")
    name = store.get(f"{_PREFIX}/answer/{word}").decode()
    store.set(f"{_PREFIX}/{name}/{rank}", "here")
    return dist.PrefixStore(f"{_PREFIX}/{name}", store)


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"the processes of this attempt did not meet: {problem}")
    time.sleep(_SECONDS_BETWEEN_LOOKS)
