"""``MuonMonitor`` in trainings by Lightning, Fabric, Accelerate and transformers: what loggers get is what is so."""

import csv
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_muon.hf
from lightning_muon import FlexDeMoConfig, MuonMonitor, ParallelMuonStrategy, StepMonitor
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration import training
from tests.integration.integrations.accelerate.loop import run_steps, training_on_cpu
from tests.integration.integrations.fabric import loop as fabric_loop
from tests.integration.integrations.transformers import runs
from tests.support.processes import ProcessPool

MATRICES = fabric_loop.MATRICES
EVERY, ACCUMULATED, NUM_STEPS = 2, 2, 6
STRATEGIES: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: ParallelMuonStrategy(optimizer=training.EXACT),
    "zero2": lambda: ParallelMuonStrategy(sharding="zero2", optimizer=training.EXACT),
    "flexdemo": lambda: ParallelMuonStrategy(replicate_size=2, shard_size=1, optimizer=FlexDeMoConfig(base="muon")),
    "ddp": lambda: "ddp",  # Lightning's, with AdamW.
}


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean()))


def _by_group(weights: dict[str, Tensor], *, has_muon: bool) -> dict[str, Tensor]:
    """The first weight that Muon updates, and the first other one: names in loggers -> weights."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        is_muon = has_muon and weight.ndim == 2 and "blocks" in name
        found.setdefault("group0.muon" if is_muon else "group0", weight)
    return found


def _train(folder: str, kind: str) -> dict[str, Any]:
    """The same as is logged in the last measured step, from whole weights before and after it, and what was sent."""
    pl = training.load()
    expected, errors = dict[str, float](), list[float]()
    module = training.language_model(pl)
    rate = 1e-2 * MEASURED_MUON_LR_FACTOR
    scale = rate * 0.2 * math.sqrt(48)  # For each matrix of 48 x 16.

    class Weights(pl.Callback):
        """Behind the monitor, so that the step is over."""

        before: dict[str, Tensor]

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            self.before = training.full_weights(module.network)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            after = training.full_weights(module.network)
            if trainer.global_step < NUM_STEPS or not after:
                return
            change = {name: after[name] - self.before[name] for name in after}
            for what, weights in (("update_rms", change), ("weight_rms", after)):
                for group, values in _by_group(weights, has_muon=kind != "ddp").items():
                    expected[f"{what}/{group}"] = _rms(values)
            for name in MATRICES:
                update = (self.before[name] * (1 - rate * 0.05) - after[name]).double() / scale
                errors.append(_rms(torch.linalg.svdvals(update).square() - 1))

    trainer = training.trainer(
        pl,
        strategy=STRATEGIES[kind](),
        logger=pl.loggers.CSVLogger(folder, "csv", kind),
        log_every_n_steps=1,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[MuonMonitor(EVERY), Weights()],
    )
    trainer.fit(module, training.loader(num_samples=64), training.loader())
    if "fsdp" in kind:  # Half of each matrix travels to its owner, and half back; the mean over two ranks.
        expected |= {"muon_lr/group0.48x16": scale, "lr/group0": 1e-2, "bytes/shard": 4 * len(MATRICES) * 48 * 16 / 2}
    if kind == "flexdemo":
        expected["bytes/replicate"] = trainer.optimizers[0].sent_bytes_per_step
    trainer.strategy.teardown()
    return {"expected": expected, "errors": errors}


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_loggers_get_what_weights_say(gloo: ProcessPool, tmp_path: Path, kind: str) -> None:
    result, _ = gloo.run(_train, str(tmp_path), kind, world_size=2)
    expected = result["expected"]
    rows = [row for row in _rows(tmp_path / "csv" / kind / "metrics.csv") if "update_rms/group0" in row]
    assert [row["step"] for row in rows] == [1, 3, 5], "each is given once"
    logged = rows[-1]
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-4) and len(expected) > 1
    parts = ("total", "momentum", "gather", "newton_schulz", "scatter", "update", "adamw", "other")
    assert all(logged[f"optimizer_ms/{part}"] > 0 for part in (parts if kind == "fsdp" else parts[:1]))
    if kind in ("fsdp", "zero2"):
        assert logged["bytes/shard"] > 0 and logged["skipped_steps"] == 0
        assert any(logged["orthogonality_error"] == pytest.approx(error, rel=1e-3) for error in result["errors"])
        assert min(result["errors"]) > 0.05, "coefficients that tune singular values to about 1 only"


def _by_hand(framework: str) -> dict[str, float]:
    is_fabric = framework == "fabric"
    with nullcontext(fabric_loop.set_up()) if is_fabric else training_on_cpu() as (*loop, optimizer):
        monitor = StepMonitor(optimizer, every_n_steps=EVERY)
        (fabric_loop.run_steps if is_fabric else run_steps)(*loop, optimizer)
        monitor.close()
        return monitor.take()


def _transformers(folder: str, parallel: str) -> list[dict[str, float]]:
    with runs.accelerator_of(parallel):
        run = runs.trainer(folder, runs.causal_lm(), eval_strategy="steps", eval_steps=1)
        run.add_callback(lightning_muon.hf.MuonMonitor(run, EVERY))
        run.train()
        return [entry for entry in run.state.log_history if "update_rms/group0.muon" in entry or "loss" in entry]


def test_other_frameworks_get_the_same_numbers(gloo: ProcessPool) -> None:
    names = {"update_rms/group0.muon", "weight_rms/group0", "optimizer_ms/newton_schulz", "bytes/shard", "lr/group0"}
    (fabric, _), (accelerate, other) = (gloo.run(_by_hand, each, world_size=2) for each in ("fabric", "accelerate"))
    assert names < fabric.keys() == accelerate.keys() == other.keys()
    # The same training.
    same = [name for name in names if not name.startswith("optimizer_ms")]
    assert [fabric[name] for name in same] == pytest.approx([accelerate[name] for name in same], rel=1e-5)


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_the_trainer_of_transformers_logs_both(gloo: ProcessPool, tmp_path: Path, parallel: str) -> None:
    names = {"update_rms/group0.muon", "weight_rms/group0", "optimizer_ms/newton_schulz", "lr/group0"}
    history, _ = gloo.run(_transformers, str(tmp_path), parallel, world_size=2)
    measured = [entry for entry in history if "update_rms/group0.muon" in entry]
    assert [entry["step"] for entry in measured] == [2, 4] and not names - measured[0].keys()
    assert f"bytes/{'shard' if parallel == 'fsdp' else 'replicate'}" in measured[0]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4], "losses are logged as without it"
