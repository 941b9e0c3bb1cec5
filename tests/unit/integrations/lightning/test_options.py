from typing import Any

import pytest

from lightning_muon import ParallelMuonStrategy
from lightning_muon.optim.flexdemo.config import FlexDeMoConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "zero3"}, r"sharding must be one of .*'zero2'.*got 'zero3'"),
        ({"loss_scaling": "sum"}, r"loss_scaling must be one of \('mean', 'tokens'\), got 'sum'"),
        ({"clip_groups": "muon"}, r"clip_groups must be one of \('all', 'elementwise'\), got 'muon'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"sharding": "ddp", "tensor_size": 2}, "tensor_size=2 needs sharding='fsdp', got 'ddp'"),
        ({"sharding": "zero2", "tensor_parallel_size": 2}, "tensor_size=2 needs sharding='fsdp'"),
        (
            {"sharding": "zero2", "early_all_gather": True},
            "early_all_gather=True means nothing.*fsdp",
        ),
        ({"sharding": "ddp", "reshard_after_forward": False}, "reshard_after_forward=False means nothing"),
        ({"sharding": "none", "reshard_after_backward": False}, "reshard_after_backward=False means nothing"),
        ({"bucket_bytes": 1000}, r"bucket_bytes=1000 means nothing with sharding='fsdp'; .*\['zero2', 'ddp'\]"),
        ({"sharding": "ddp", "wrap_policy": ()}, r"wrap_policy=\(\) means nothing with sharding='ddp'"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelMuonStrategy(**options)


def test_everything_goes_with_what_it_needs() -> None:
    ParallelMuonStrategy(tensor_size=2, context_size=2, reshard_after_backward=False, early_all_gather=True)
    ParallelMuonStrategy(sharding="zero2", context_size=2, loss_scaling="tokens", clip_groups="elementwise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"sharding": name}, f"needs sharding='fsdp', got '{name}'") for name in ("ddp", "zero2", "none")),
        ({"tensor_size": 2}, "does not go with tensor_size=2"),
        ({"tensor_parallel_size": 2}, "does not go with tensor_size=2"),
        ({"data_parallel_size": 4}, "data_parallel_size=4 replaces by Lightning's; give replicate_size and shard_size"),
    ],
)
def test_nodes_need_a_mesh_and_a_sharding_that_know_them(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelMuonStrategy(optimizer=FlexDeMoConfig(), **options)
    ParallelMuonStrategy(optimizer=FlexDeMoConfig(), replicate_size=2, context_size=2, loss_scaling="tokens")
