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
from tests.integration import training
from tests.integration.integrations.fabric import loop
from tests.integration.training import PACKAGES, dataset, language_model, load, loader, strategy_class, trainer
from tests.support.faults import OutOfMemoryError, fail_in
from tests.support.processes import ProcessPool, RanksFailedError


def _fail_on_one_rank(sharding: str, where: str, fault: str, directory: str) -> None:
    """Rank 1 raises; rank 0 gets SIGTERM while it clears up, as launchers send it to the ranks that are left."""
    pl = load(PACKAGES[0])
    model = language_model(pl)
    at_ends = ("setup", "on_train_end")

    def fail(*_: Any) -> None:
        if dist.get_rank() != 1 or (model.trainer.global_step != 1 and where not in at_ends):
            return
        if fault == "stop":
            raise StopIteration("row 7")
        if fault != "worker":
            raise OSError("file 4") if fault == "file" else MemoryError("5 GiB")
        worker, *_ = multiprocessing.active_children()
        worker.kill()
        worker.join()

    class GetsSigterm(pl.Callback):
        def on_exception(self, *_: Any) -> None:
            if dist.get_rank() == 0 and where not in at_ends:  # Where SIGTERM has no handler.
                os.kill(os.getpid(), signal.SIGTERM)

    if where == "backward":
        model.network.head.register_full_backward_hook(fail)
    else:
        own = getattr(type(model), where)
        setattr(type(model), where, lambda *args, **kwargs: fail() or own(*args, **kwargs))
    strategy = strategy_class(PACKAGES[0])(sharding=sharding, optimizer=MuonConfig())
    # It cannot save alone.
    saving = pl.callbacks.ModelCheckpoint(directory, save_on_exception=True, every_n_train_steps=100)
    workers = 2 if fault == "worker" else 0
    fitter = trainer(
        pl, strategy=strategy, callbacks=[GetsSigterm(), saving][: 1 + (fault == "memory")],
        enable_checkpointing=fault == "memory",
    )  # fmt: skip
    try:
        fitter.fit(model, DataLoader(dataset(), 1, num_workers=workers))
        fitter.test(model, loader())  # Where rank 0 may be before rank 1 fails.
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


def _fit_twice(where: str, sharding: str) -> tuple[Any, Any]:
    """Weights after a fit that fails in its second step, or in the evaluation after its first one, and another fit."""
    pl = training.load()
    results = []
    for fails in (True, False):
        model = training.language_model(pl)
        faults: list[Any] = []

        def start(fitter: Any, *_: Any, model: Any = model, faults: list[Any] = faults) -> None:
            if fitter.global_step == 1 and not fitter.sanity_checking:
                faults.append(fail_in(model.network.blocks[1].norm, where))
                if where == "callback":
                    raise OutOfMemoryError(where)

        hooks = {"evaluation": "on_validation_epoch_start", "callback": "on_before_backward"}
        callback = pl.callbacks.LambdaCallback(**{hooks.get(where, "on_train_batch_start"): start})
        options = {"strategy": training.strategy_class()(sharding=sharding), "num_sanity_val_steps": 0}
        first = training.trainer(pl, callbacks=[callback] if fails else [], max_steps=2 if fails else 1, **options)
        batches = {}
        if where == "evaluation":
            batches["val_dataloaders"] = training.loader(num_samples=8)
            first.val_check_interval = first.limit_train_batches = 1
        with pytest.raises(OutOfMemoryError) if fails else nullcontext():
            first.fit(model, training.loader(), **batches)
        for fault in faults:
            fault.remove()
        options["strategy"] = training.strategy_class()(sharding=sharding)
        training.trainer(pl, max_epochs=1, **options).fit(model, training.loader())
        results.append(training.full_weights(model))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("where", "sharding"), [("backward", "fsdp"), ("evaluation", "fsdp"), ("callback", "fsdp"), ("backward", "zero2")]
)
def test_a_second_fit_does_not_know_of_the_first_one(gloo: ProcessPool, where: str, sharding: str) -> None:
    failed, reference = gloo.run(_fit_twice, where, sharding, world_size=2)[0]
    assert training.max_difference(failed, reference) == 0.0


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


def _gather_a_weight_alone() -> None:
    pl = training.load()
    model = training.language_model(pl)
    model.on_train_batch_end = lambda *_: model.global_rank == 0 and model.network.blocks[1].norm.weight.full_tensor()
    training.trainer(pl, strategy="parallel_muon", max_epochs=1).fit(model, training.loader())


def test_a_weight_that_one_rank_gathers_alone_ends_all_ranks(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        gloo.run_fresh(_gather_a_weight_alone, world_size=2, grace=10.0)
    assert "Rank 0: waits in redistribute_local_tensor" in str(failed.value)
    assert failed.value.exit_codes == {0: 1, 1: 1}


def _errors_of_evaluations() -> list[str]:
    pl, errors = load(PACKAGES[0]), []

    def stop(*_: Any) -> None:
        raise StopIteration("row 7")

    for name in ("validate", "test", "predict"):
        model = language_model(pl)
        setattr(type(model), {"validate": "validation"}.get(name, name) + "_step", stop)
        with pytest.raises(RuntimeError) as raised:
            getattr(trainer(pl), name)(model, loader())
        errors.append(str(raised.value))
    return errors


def test_the_end_of_another_iteration_ends_no_evaluation(gloo: ProcessPool) -> None:
    steps = ("validation_step", "test_step", "predict_step")
    assert gloo.run(_errors_of_evaluations, world_size=1) == [[f"{step} raised StopIteration: row 7" for step in steps]]
