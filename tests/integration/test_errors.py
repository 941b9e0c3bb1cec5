"""Mistakes raise the same on every rank, a batch that failed cannot be left out, and another fit begins anew."""

import multiprocessing
import os
import re
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_muon import MuonConfig
from lightning_muon.checkpoint.manifest import damages, describe
from tests.integration import training
from tests.integration.integrations.fabric import loop
from tests.support.faults import OutOfMemoryError, fail_in
from tests.support.processes import ProcessPool, RanksFailedError

_FAULTS = {"file": OSError("file 4"), "memory": MemoryError("5 GiB"), "stop": StopIteration("row 7")}
_WITHOUT_HANDLER = ("setup", "on_train_end")  # Of SIGTERM.


def _fail_on_one_rank(sharding: str, where: str, fault: str, directory: str) -> None:
    """Rank 1 raises; rank 0 gets SIGTERM while it clears up, as launchers send it to the ranks that are left."""
    pl = training.load()
    model = training.language_model(pl)

    def fail(*_: Any) -> None:
        if dist.get_rank() != 1 or (model.trainer.global_step != 1 and where not in _WITHOUT_HANDLER):
            return
        if fault in _FAULTS:
            raise _FAULTS[fault]
        worker, *_ = multiprocessing.active_children()
        worker.kill()
        worker.join()

    def on_exception(*_: Any) -> None:
        if dist.get_rank() == 0 and where not in _WITHOUT_HANDLER:
            os.kill(os.getpid(), signal.SIGTERM)

    if where == "backward":
        model.network.head.register_full_backward_hook(fail)
    else:
        own = getattr(type(model), where)
        setattr(type(model), where, lambda *args, **kwargs: fail() or own(*args, **kwargs))
    callbacks = [pl.callbacks.LambdaCallback(on_exception=on_exception)]
    if saves := fault == "memory":  # It cannot save alone.
        callbacks.append(pl.callbacks.ModelCheckpoint(directory, save_on_exception=True, every_n_train_steps=100))
    strategy = training.strategy_class()(sharding=sharding, optimizer=MuonConfig())
    fitter = training.trainer(pl, strategy=strategy, callbacks=callbacks, enable_checkpointing=saves)
    try:
        fitter.fit(model, DataLoader(training.dataset(), 1, num_workers=2 * (fault == "worker")))
        fitter.test(model, training.loader())  # Where rank 0 may be before rank 1 fails.
    except BaseException:
        if dist.get_rank() == 0:
            raise
        os._exit(3)  # As a program ends that does not catch it; the worker of this test would live on.


@pytest.mark.parametrize(
    ("sharding", "where", "fault", "error"),
    [
        ("fsdp", "backward", "file", "OSError: file 4"),
        ("zero2", "on_train_batch_start", "memory", "MemoryError: 5 GiB"),
        ("fsdp", "on_before_optimizer_step", "worker", r"RuntimeError: DataLoader worker \(pid"),
        ("ddp", "on_before_optimizer_step", "file", "OSError: file 4"),
        ("fsdp", "setup", "memory", "MemoryError: 5 GiB"),
        ("fsdp", "on_train_end", "file", "OSError: file 4"),
        ("fsdp", "training_step", "stop", "RuntimeError: training_step raised StopIteration: row 7"),
    ],
)
def test_the_error_of_the_first_rank_is_the_last_one_of_all(
    tmp_path: Path, sharding: str, where: str, fault: str, error: str
) -> None:
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(
            _fail_on_one_rank, sharding, where, fault, str(tmp_path), world_size=2, timeout=60.0, grace=15.0
        )
    assert raised.value.exit_codes == {0: 1, 1: 3}
    assert re.search(f"rank 0 ends: rank 1 has failed: {error}", str(raised.value))
    assert not any(tmp_path.iterdir())


def _fit_twice(where: str, sharding: str, directory: str) -> tuple[Any, Any]:
    """Weights after a fit that fails in its second step, or in the evaluation after its first one, and another fit."""
    pl, results = training.load(), list[Any]()
    for fails in (True, False):
        model = training.language_model(pl)
        faults: list[Any] = []

        def start(fitter: Any, *_: Any, model: Any = model, faults: list[Any] = faults) -> None:
            if fitter.global_step == 1:
                faults.append(fail_in(model.network.blocks[1].norm, where))
                if where == "callback":
                    raise OutOfMemoryError(where)

        hooks = {"evaluation": "on_validation_epoch_start", "callback": "on_before_backward"}
        callback = pl.callbacks.LambdaCallback(**{hooks.get(where, "on_train_batch_start"): start})
        strategies = [training.strategy_class()(sharding=sharding) for _ in range(2)]
        options = {"max_steps": 1 + fails, "num_sanity_val_steps": 0, "enable_checkpointing": fails}
        if fails:
            options["callbacks"] = [callback, pl.callbacks.OnExceptionCheckpoint(directory)]
        evaluated = {"val_check_interval": 1, "limit_train_batches": 1} if where == "evaluation" else {}
        with pytest.raises(OutOfMemoryError) if fails else nullcontext():
            val_batches = training.loader(num_samples=8) if evaluated else None
            fitter = training.trainer(pl, strategy=strategies[0], **options, **evaluated)
            fitter.fit(model, training.loader(), val_batches)
        for fault in faults:
            fault.remove()
        training.trainer(pl, strategy=strategies[1], max_epochs=1).fit(model, training.loader())
        results.append(training.full_weights(model))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("where", "sharding"), [("backward", "fsdp"), ("evaluation", "fsdp"), ("callback", "fsdp"), ("backward", "zero2")]
)
def test_a_second_fit_does_not_know_of_the_first_one(
    gloo: ProcessPool, tmp_path: Path, where: str, sharding: str
) -> None:
    """Whose state was saved when all ranks had failed."""
    failed, reference = gloo.run(_fit_twice, where, sharding, str(tmp_path), world_size=2)[0]
    assert training.max_difference(failed, reference) == 0.0
    saved = tmp_path / "on_exception.ckpt"
    assert damages(saved) == [] and (describe(saved) or {})["step"] == 1


def _go_on(where: str, options: dict[str, Any], *, ranks: tuple[int, ...] = (0, 1)) -> None:
    fabric = loop.launch(**options)
    network = loop.network()
    model, optimizer = fabric.setup(network, loop.adamw(network))
    loop.run_steps(fabric, model, optimizer, steps=range(1))
    fault = fail_in(network.blocks[1].norm, where) if fabric.global_rank in ranks else None
    with suppress(OutOfMemoryError):
        loop.run_steps(fabric, model, optimizer, steps=range(1, 2), accumulate=1)
    assert fault is not None
    fault.remove()
    loop.run_steps(fabric, model, optimizer, steps=range(2, 3), accumulate=1)


@pytest.mark.parametrize(
    ("where", "options"), [("backward", {}), ("forward", {"sharding": "zero2"}), ("backward", {"sharding": "ddp"})]
)
def test_a_batch_that_failed_cannot_be_left_out(gloo: ProcessPool, where: str, options: dict[str, Any]) -> None:
    match = "backward has raised before, and the"
    gloo.expect_error_on_all_ranks(_go_on, where, options, world_size=2, exception=RuntimeError, match=match)


def test_a_rank_that_goes_on_alone_is_an_error_on_all(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        gloo.run_fresh(_go_on, "backward", {}, ranks=(1,), world_size=2, grace=10.0)
    assert "rank 0 ends: rank 1 has failed: OutOfMemoryError" in str(failed.value)
    assert failed.value.exit_codes[0] == 1
    assert "has raised before" in failed.value.failures[1].message
