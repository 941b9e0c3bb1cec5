"""Mistakes: the same clear error on every rank, and no hang."""

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from lightning_muon import MuonConfig
from tests.integration.training import PACKAGES, Network, language_model, load, loader, strategy_class, trainer
from tests.support.processes import ProcessPool, RanksFailedError


def _fit(package: str, *, network: Any = Network, configure: Any = None, sizes: Any = None, **kwargs: Any) -> None:
    pl = load(package)
    strategy = strategy_class(package)(**(sizes or {}))
    trainer(pl, strategy=strategy, **kwargs).fit(language_model(pl, network=network, configure=configure), loader())


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"replicate_size": 2, "shard_size": 4}, "2 replicas x 4 shards = 8 ranks, but there are 3"),
        ({"tensor_parallel_size": 3}, "tensor_size=3, but no layer of LanguageModel is divided"),
        ({"wrap_policy": ["Blok"]}, "wrap_policy: no module is a Blok"),
        ({"optimizer": MuonConfig(adamw_patterns=("*.hed.*",))}, "hed"),
    ],
)
def test_a_wrong_argument_is_named(gloo: ProcessPool, sizes: dict[str, Any], match: str) -> None:
    gloo.expect_error_on_all_ranks(_fit, PACKAGES[0], sizes=sizes, world_size=3, match=match)


def _fail_on_one_rank(sharding: str, where: str, overlap: str) -> None:
    """Rank 1 raises; rank 0 gets SIGTERM while it clears up, as launchers send it to the ranks that are left."""
    pl = load(PACKAGES[0])
    model = language_model(pl)

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1 and model.trainer.global_step == 1:
            raise OSError("file 4")

    class GetsSigterm(pl.Callback):
        def on_exception(self, *_: Any) -> None:
            if dist.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        def teardown(self, *_: Any) -> None:
            self.on_exception()

    if where == "backward":
        model.network.head.register_full_backward_hook(fail)
    else:
        setattr(type(model), where, fail)
    strategy = strategy_class(PACKAGES[0])(sharding=sharding, optimizer=MuonConfig(overlap=overlap))
    try:
        trainer(pl, strategy=strategy, callbacks=[GetsSigterm()]).fit(model, loader())
    except OSError:
        os._exit(3)  # As a program ends that does not catch it; the worker of this test would live on.


@pytest.mark.parametrize(
    ("sharding", "where", "overlap"),
    [
        ("fsdp", "backward", "backward"),
        ("zero2", "on_train_batch_start", "step"),
        ("ddp", "on_before_optimizer_step", "step"),
    ],
)
def test_the_error_of_the_first_rank_is_the_last_one_of_all(sharding: str, where: str, overlap: str) -> None:
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(_fail_on_one_rank, sharding, where, overlap, world_size=2, timeout=60.0)
    assert raised.value.exit_codes == {1: 3}
    assert raised.value.failures[0].message == "rank 1 has failed: OSError: file 4"
