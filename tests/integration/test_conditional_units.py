"""Ranks that use different parts of a model: an error with the name on all ranks, never a hang."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration import training
from tests.support.outcome import RanksFailedError
from tests.support.processes import ProcessPool


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(training.VOCABULARY, training.WIDTH)
        self.experts = nn.ModuleList(training.Block() for _ in range(2))
        self.head = nn.Linear(training.WIDTH, training.VOCABULARY)

    def forward(self, tokens: Tensor, expert: int | None) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if expert is None else self.experts[expert](x))


def _fit(used: Sequence[int | None], **options: Any) -> None:
    """``used``: the expert of each rank."""
    pl = training.load()
    model = training.language_model(pl, network=Experts)

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return training.loss_of(self.network(batch[0], used[dist.get_rank()]), batch[1])

    type(model).training_step = training_step
    del type(model).on_train_batch_end
    training.trainer(pl, strategy=training.strategy_class()(**options), max_epochs=1).fit(model, training.loader())


def test_units_that_only_some_ranks_run_fail_on_all() -> None:
    with pytest.raises(RanksFailedError, match=r"ends: .*network\.experts\.[01].*wrap_policy") as raised:
        ProcessPool().run_fresh(_fit, (0, 0, None, None), replicate_size=2, timeout=40.0, grace=15.0)
    # gloo aborts a process that gets a message of another size.
    assert set(raised.value.exit_codes.values()) <= {1, -signal.SIGABRT} and len(raised.value.exit_codes) == 4


def _validate(used: Sequence[int]) -> None:
    pl = training.load()
    model = training.language_model(pl, network=Experts)

    def validation_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val", training.loss_of(self.network(batch[0], used[dist.get_rank()]), batch[1]), sync_dist=True)

    type(model).validation_step = validation_step
    training.trainer(pl, strategy=training.strategy_class()()).validate(model, training.loader(), verbose=False)


def test_an_evaluation_is_watched_too(gloo: ProcessPool) -> None:
    gloo.run(_validate, (1, 1), world_size=2)
    gloo.expect_error_on_all_ranks(
        _validate, (0, 1), world_size=2, exception=RuntimeError, match=r"network\.experts\.[01]"
    )
