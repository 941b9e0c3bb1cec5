"""SIGTERM, Ctrl-C and the signal of SLURM's requeue in the middle of a step: all ranks answer after the same batch."""

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import lightning_muon
from lightning_muon.checkpoint.manifest import damages
from lightning_muon.integrations.registry import make
from tests.integration import training
from tests.integration.integrations.fabric import loop
from tests.support.processes import ProcessPool


def _slurm(pl: Any) -> Any:
    """SLURM's environment for a rank of the pool; its ``scontrol`` is looked for in the current directory."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    values = {"NTASKS": size, "NTASKS_PER_NODE": size, "PROCID": rank, "LOCALID": rank, "NODEID": "0", "JOB_ID": "77"}
    os.environ.update({f"SLURM_{name}": value for name, value in values.items()})
    os.environ["PATH"] = f"{os.getcwd()}:{os.environ['PATH']}"
    environments = importlib.import_module(f"{pl.__name__}.plugins.environments")
    return environments.SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)


def _fit_until_told(
    directory: str, number: int, during: str, *, callback: str, accumulate: int, batch: int | None
) -> tuple[int | str, list[tuple[int, float]], list[str]]:
    """Exit code, batches with their losses, and checkpoints of a run; rank 1 gets a signal in some ``batch``."""
    pl, code = training.load(), "ended"
    model, seen = training.language_model(pl), list[tuple[int, float]]()

    def told(*_: Any) -> None:
        nonlocal batch
        if batch is not None and model.trainer.fit_loop.total_batch_idx >= batch and not model.trainer.sanity_checking:
            batch = None
            if dist.get_rank() == 1:
                os.kill(os.getpid(), number)

    setattr(model, during, told)
    model.on_train_batch_end = lambda output, *_: seen.append(
        (model.trainer.fit_loop.total_batch_idx, output["loss"].item())
    )
    if callback == "AutoResume":
        saves, path = make("AutoResume", training.PACKAGES[0])(directory, every_n_train_steps=100), None
    else:
        saves = pl.callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=100)
        path = "last" if os.path.exists(directory) else None
    options = {"enable_checkpointing": True, "limit_val_batches": 2, "accumulate_grad_batches": accumulate}
    fitter = training.trainer(pl, callbacks=[saves], **options)
    batches = DataLoader(training.dataset(24), 2, shuffle=True)
    try:
        fitter.fit(model, batches, training.loader(), ckpt_path=path, weights_only=False)
    except SystemExit as error:
        code = error.code
        dist.barrier()
    return code, seen, os.listdir(directory) if os.path.exists(directory) else []


@pytest.mark.parametrize(
    ("number", "during", "batch", "callback", "accumulate"),
    [
        (signal.SIGTERM, "on_train_batch_start", 2, "AutoResume", 2),
        (signal.SIGINT, "on_train_batch_start", 5, "AutoResume", 1),  # The last one of the epoch.
        (signal.SIGTERM, "on_validation_batch_start", 5, "ModelCheckpoint", 1),
    ],
)
def test_all_ranks_save_and_go_on_with_equal_bits(
    gloo: ProcessPool, tmp_path: Path, number: int, during: str, batch: int, callback: str, accumulate: int
) -> None:
    told, resumed, whole = (
        gloo.run(_fit_until_told, f"{tmp_path}/{folder}", number, during, callback=callback, accumulate=accumulate,
                 batch=at, world_size=2)
        for folder, at in (("told", batch), ("told", None), ("whole", None))
    )  # fmt: skip
    for rank in range(2):
        assert told[rank][0] == 128 + number and resumed[rank][0] == whole[rank][0] == "ended"
        assert len(told[rank][2]) == 1 and (told[rank][2] == ["last.ckpt"]) == (callback == "ModelCheckpoint")
        assert 0 < len(told[rank][1]) < 12 == len(whole[rank][1])
        assert told[rank][1] + resumed[rank][1] == whole[rank][1]


def _requeue(directory: str, receivers: tuple[int, ...]) -> list[int]:
    """Where the saved training stood, and where it is resumed."""
    os.chdir(directory)
    pl, steps = training.load(), list[int]()
    for hook, told in (("on_save_checkpoint", receivers), ("on_train_start", ())):

        class Told(pl.Callback):
            def on_before_backward(self, fitter: Any, *_: Any, told: tuple[int, ...] = told) -> None:
                if fitter.global_step == 3 and dist.get_rank() in told:
                    os.kill(os.getpid(), signal.SIGUSR1)

        def record(_: Any, fitter: Any, *others: Any) -> None:
            steps.append(fitter.global_step)
            fitter.should_stop = True

        setattr(Told, hook, record)
        options = {"max_steps": 5000, "max_epochs": -1, "default_root_dir": directory, "plugins": [_slurm(pl)]}
        fitter = training.trainer(pl, strategy=training.strategy_class()(), callbacks=[Told()], **options)
        fitter.fit(training.language_model(pl), training.loader(), training.loader())
    return steps


@pytest.mark.parametrize("receivers", [(0, 1), (1,)])
def test_a_requeued_job_goes_on_where_it_was(tmp_path: Path, receivers: tuple[int, ...]) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    scontrol.chmod(0o755)
    results = ProcessPool().run_fresh(_requeue, str(tmp_path), receivers, world_size=2)
    (saved, resumed), other = results
    assert other == [saved, resumed] and saved == resumed < 5000
    assert (tmp_path / "told").read_text() == "requeue 77\n"


_NUM_STEPS = 8


def _train(path: str, number: int) -> tuple[int, Any]:
    """Steps taken and exit code of a loop in whose fourth step rank 1 gets a signal, or none if it is 0."""
    fabric, model, optimizer = loop.set_up()
    step, code = 0, None
    try:
        with lightning_muon.StopSignals() as stop:
            while step < _NUM_STEPS:
                if number and step == 3 and dist.get_rank() == 1:
                    os.kill(os.getpid(), number)
                loop.run_steps(fabric, model, optimizer, steps=range(step, step + 1))
                step += 1
                if stop.requested():
                    fabric.save(path, {"model": model, "step": step})
                    break
    except SystemExit as error:
        code = error.code
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return step, code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, 0])
def test_loops_of_users_save_on_all_ranks_together(gloo: ProcessPool, tmp_path: Path, number: int) -> None:
    (step, code), other = gloo.run(_train, str(tmp_path / "saved"), number, world_size=2)
    assert other == (step, code) and code == (128 + number if number else None)
    assert 3 < step < _NUM_STEPS if number else step == _NUM_STEPS
    assert damages(tmp_path / "saved") == [] and (tmp_path / "saved").exists() == bool(number)


def _told_in_block(number: int, *, seconds: float) -> None:
    """This process gets a signal at the beginning of a loop that goes on for at most so many seconds."""
    with lightning_muon.StopSignals() as stop:
        os.kill(os.getpid(), number)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stop.requested():
            time.sleep(0.01)


def test_a_program_of_one_process_needs_no_process_group() -> None:
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        _told_in_block(signal.SIGTERM, seconds=10.0)
    with pytest.raises(KeyboardInterrupt):  # Nobody has asked after it.
        _told_in_block(signal.SIGINT, seconds=0.0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
