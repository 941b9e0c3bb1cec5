"""Where the ranks of an attempt of a launcher meet, and what NCCL is asked for before."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_muon import ParallelMuonStrategy
from lightning_muon.integrations.strategy import store_of_attempt


@pytest.mark.parametrize(("given", "asked"), [(None, "1"), ("0", "0")])
def test_what_nccl_sends_goes_before_products(monkeypatch: pytest.MonkeyPatch, given: str | None, asked: str) -> None:
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY")
    ParallelMuonStrategy()
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == asked


def test_an_attempt_meets_in_a_store_without_old_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            stores = list(threads.map(lambda rank: store_of_attempt(rank, 3, timedelta(seconds=20)), (2, 0, 1)))
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", "rank 2")
            assert [store.get("address") for store in stores] == [b"rank 2"] * 3
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        store_of_attempt(1, 3, timedelta(seconds=0.3))
