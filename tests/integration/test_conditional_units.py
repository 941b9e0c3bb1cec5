"""Ranks that use different parts of a model: exact, or an error with the name on all ranks, never a hang."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.training import (
    EXACT,
    PACKAGES,
    VOCABULARY,
    WIDTH,
    Block,
    full_weights,
    language_model,
    load,
    loader,
    loss_of,
    max_difference,
    strategy_class,
    trainer,
)
from tests.support.outcome import RanksFailedError
from tests.support.processes import ProcessPool


class Experts(nn.Module):
    """Each rank uses the expert that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, expert: int | None) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if expert is None else self.experts[expert](x))


def _fit(sharding: str, used: Sequence[int | None], *, num_ranks: int, **options: Any) -> dict[str, Any]:
    """``used``: the expert of each rank; one process computes for all of them."""
    pl = load(PACKAGES[0])
    model = language_model(pl, network=Experts)
    shares = num_ranks // dist.get_world_size()

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        losses = []
        for share in range(shares):
            rank = dist.get_rank() * shares + share
            mine = [part[share::shares] for part in batch]
            losses.append(loss_of(self.network(mine[0], used[rank]), mine[1]))
        return torch.stack(losses).mean()

    type(model).training_step = training_step
    del type(model).on_train_batch_end
    strategy = strategy_class(PACKAGES[0])(sharding=sharding, optimizer=EXACT, **options)
    trainer(pl, strategy=strategy, max_epochs=1).fit(model, loader())
    return full_weights(model)


@pytest.mark.parametrize("used", [(0, 1), (None, 1)], ids=str)
def test_what_only_some_ranks_use_is_exact(gloo: ProcessPool, used: Sequence[int | None]) -> None:
    expected = gloo.run(_fit, "none", used, num_ranks=2, world_size=1)[0]
    for sharding, options in (("zero2", {}), ("ddp", {}), ("fsdp", {"wrap_policy": ()})):
        weights = gloo.run(_fit, sharding, used, num_ranks=2, world_size=2, **options)[0]
        assert max_difference(weights, expected) < 1e-5, sharding


def _seconds_to_fail(used: Sequence[int | None], **sizes: int) -> tuple[float, str]:
    """From the forward pass in which the ranks part to the exception, and what it says."""
    started: list[float] = []
    forward = Experts.forward

    def timed(self: Experts, tokens: Tensor, expert: int | None) -> Tensor:
        started.append(time.monotonic())
        return forward(self, tokens, expert)

    with mock.patch.object(Experts, "forward", timed), pytest.raises(RuntimeError) as caught:
        _fit("fsdp", used, num_ranks=len(used), **sizes)
    return time.monotonic() - started[0], str(caught.value)


def test_units_that_only_some_ranks_run_fail_soon_on_all(gloo: ProcessPool) -> None:
    used = (0, 0, None, None)
    for seconds, message in gloo.run_fresh(_seconds_to_fail, used, replicate_size=2):
        assert seconds < 10
        assert re.search(r"network\.experts\.[01].*wrap_policy", message), message


def _validate(used: Sequence[int]) -> None:
    pl = load(PACKAGES[0])
    model = language_model(pl, network=Experts)

    def validation_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val", loss_of(self.network(batch[0], used[dist.get_rank()]), batch[1]), sync_dist=True)

    type(model).validation_step = validation_step
    trainer(pl, strategy=strategy_class(PACKAGES[0])()).validate(model, loader(), verbose=False)


def test_an_evaluation_is_watched_too(gloo: ProcessPool) -> None:
    gloo.run(_validate, (1, 1), world_size=2)
    gloo.expect_error_on_all_ranks(
        _validate, (0, 1), world_size=2, exception=RuntimeError, match=r"network\.experts\.[01]"
    )


def _corrupt_data() -> None:
    pl = load(PACKAGES[0])
    data = loader().dataset

    class Corrupt(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(data)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> Any:
            if index >= 16 and dist.get_rank() == 1:
                raise OSError("file 4 is corrupt")
            return data[index]

    model = language_model(pl)
    batches = torch.utils.data.DataLoader(Corrupt(), batch_size=4)
    trainer(pl, strategy=strategy_class(PACKAGES[0])(), use_distributed_sampler=False).fit(model, batches)


def test_a_rank_that_fails_in_its_data_tells_the_others_why(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        gloo.run(_corrupt_data, world_size=2, grace=15.0)
    assert "file 4 is corrupt" in caught.value.failures[1].message
    # As an exception, or on stderr if its thread could not be freed.
    assert "rank 1 has failed: OSError: file 4 is corrupt" in str(caught.value)
