"""Trains one row of the table and measures it. Imports torch; the other modules of the table do not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

import lightning_muon
from recipes.t5_summarization.data import SummarizationData
from recipes.t5_summarization.model import T5Summarizer
from recipes.t5_summarization.report import History
from recipes.t5_summarization.table1_config import Run
from recipes.t5_summarization.table1_results import Result

_WARMUP_STEPS = 5  # The first steps make plans, buffers and process groups.
_GRADIENT_BYTES = 4  # HSDP reduces gradients in float32, with mixed precision too.


class StepClock:
    """Mean seconds of a training step, data loading included, validation and the first steps left out.

    Args:
        warmup_steps: Steps that are left out.
    """

    def __init__(self, warmup_steps: int = _WARMUP_STEPS) -> None:
        self._skip = warmup_steps
        self._last: float | None = None
        self._seconds = 0.0
        self._steps = 0

    def step_ended(self, now: float) -> None:
        """At the end of each training step, with the seconds of any clock."""
        if self._skip > 0:
            self._skip -= 1
        elif self._last is not None:
            self._seconds += now - self._last
            self._steps += 1
        self._last = now

    def interrupt(self) -> None:
        """Something else than a step runs now, such as a validation."""
        self._last = None

    @property
    def seconds_per_step(self) -> float:
        """NaN if no step was measured."""
        return self._seconds / self._steps if self._steps else float("nan")


class Meter(Callback):
    """Measures the speed, and reads off what the optimizer sent."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.sent_bytes: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """A step has ended."""
        self.clock.step_ended(time.perf_counter())

    def on_validation_start(self, *_: Any) -> None:
        """A validation is no step."""
        self.clock.interrupt()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up what the ranks of a node sent. Collective over all ranks; every rank must call it."""
        counts = [getattr(optimizer, "sent_bytes_per_step", None) for optimizer in trainer.optimizers]
        if None not in counts:
            # The mean over all ranks times the ranks of a node: nodes may differ a little in what they sent.
            mean = trainer.strategy.reduce(torch.tensor(float(sum(counts)), dtype=torch.float64), reduce_op="mean")
            self.sent_bytes = float(mean) * world(pl_module)[1]


def world(module: LightningModule) -> tuple[int, int]:
    """(nodes, ranks per node) of a module that is being trained."""
    mesh = module.device_mesh
    return mesh["replicate"].size(), mesh["shard"].size()


def hsdp_sent_bytes(num_parameters: int, *, num_nodes: int) -> float:
    """Bytes that the ranks of one node send to other nodes in a ring all-reduce of float32 gradients.

    Each of R nodes sends 2 (R - 1) / R of what is reduced, over however many ranks it is divided.

    Args:
        num_parameters: Trainable ones of the whole model; padding of uneven shards is left out.
        num_nodes: R.
    """
    return 2 * (num_nodes - 1) / num_nodes * num_parameters * _GRADIENT_BYTES


def optimizer_choice(row: Mapping[str, Any]) -> Any:
    """What ``ParallelMuonStrategy(optimizer=...)`` gets for a row.

    Args:
        row: As :func:`recipes.t5_summarization.table1_config.row_settings` returns it.
    """
    if row["optimizer"] == "adamw":
        return "keep"
    if row["optimizer"] == "muon":
        return lightning_muon.MuonConfig(**row["options"])
    arguments = dict(row["replicator"])
    replicator = getattr(lightning_muon, arguments.pop("name"))(**arguments)
    return lightning_muon.FlexDeMoConfig(replicator=replicator, **row["options"])


def learning_rates(model: Mapping[str, Any], lr_scale: float) -> dict[str, float]:
    """``lr`` times ``lr_scale``, with a token embedding that keeps its own.

    Args:
        model: Settings of the model.
        lr_scale: Of the row.
    """
    return {"lr": model["lr"] * lr_scale, "embedding_lr_scale": model.get("embedding_lr_scale", 1.0) / lr_scale}


def fit(run: Run) -> tuple[Result, bool]:
    """Train; the result, and whether this is rank 0. Collective over all ranks; every rank must call it."""
    settings, row = run.settings, run.settings["row"]
    seed_everything(run.seed, verbose=False)
    model = T5Summarizer(**{**settings["model"], **learning_rates(settings["model"], row["lr_scale"])})
    data = SummarizationData(**settings["data"])
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    history, meter = History(), Meter()
    strategy = lightning_muon.ParallelMuonStrategy(**settings["strategy"], optimizer=optimizer_choice(row))
    trainer = Trainer(
        **settings["trainer"],
        strategy=strategy,
        callbacks=[history, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, datamodule=data)
    nodes = world(model)
    # Only FlexDeMo counts; what the other rows send follows from the size of the model.
    sent_bytes = hsdp_sent_bytes(num_parameters, num_nodes=nodes[0]) if meter.sent_bytes is None else meter.sent_bytes
    result = Result(
        row=run.row,
        seed=run.seed,
        fingerprint=run.fingerprint,
        steps=trainer.global_step,
        samples_per_second=data.hparams.batch_size * nodes[0] * nodes[1] / meter.clock.seconds_per_step,
        train_loss=history.epochs[-1].train_loss,
        val_loss=history.epochs[-1].val_loss,
        val_losses=[epoch.val_loss for epoch in history.epochs],
        sent_bytes=sent_bytes,
        seconds=history.seconds,
        num_parameters=num_parameters,
        world=nodes,
    )
    return result, trainer.is_global_zero
