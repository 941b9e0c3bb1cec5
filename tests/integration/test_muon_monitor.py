"""``MuonMonitor`` in trainings by Lightning, Fabric, Accelerate and transformers: what loggers get is what is so."""

import contextlib
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_muon.hf
from lightning_muon import FlexDeMoConfig, MuonMonitor, ParallelMuonStrategy, StepMonitor
from tests.integration import training
from tests.integration.integrations.accelerate import loop as accelerate_loop
from tests.integration.integrations.fabric import loop as fabric_loop
from tests.integration.integrations.transformers import runs
from tests.support.processes import ProcessPool

EVERY, ACCUMULATED, NUM_STEPS = 2, 2, 8
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
    expected: dict[str, float] = {}

    class Weights(pl.Callback):
        """Behind the monitor, so that the step is over."""

        before: dict[str, Tensor]

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            self.before = training.full_weights(module.network)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            after = training.full_weights(module.network)
            if trainer.global_step == NUM_STEPS and after:
                change = {name: after[name] - self.before[name] for name in after}
                for group, values in _by_group(change, has_muon=kind != "ddp").items():
                    expected[f"update_rms/{group}"] = _rms(values)
                for group, values in _by_group(after, has_muon=kind != "ddp").items():
                    expected[f"weight_rms/{group}"] = _rms(values)

    module = training.language_model(pl)
    trainer = training.trainer(
        pl,
        strategy=STRATEGIES[kind](),
        logger=pl.loggers.CSVLogger(folder, "csv", kind),
        log_every_n_steps=1,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[MuonMonitor(EVERY), Weights()],
    )
    trainer.fit(module, training.loader(num_samples=64), training.loader())
    sent = getattr(trainer.optimizers[0], "sent_bytes_per_step", None)
    trainer.strategy.teardown()
    return {"expected": expected, "sent": sent}


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_loggers_get_what_weights_say(gloo: ProcessPool, tmp_path: Path, kind: str) -> None:
    result, _ = gloo.run(_train, str(tmp_path), kind, world_size=2)
    expected = result["expected"]
    assert len(expected) == (2 if kind == "ddp" else 4)
    rows = [row for row in _rows(tmp_path / "csv" / kind / "metrics.csv") if "update_rms/group0" in row]
    assert [row["step"] for row in rows] == [1, 3, 5, 7], "each is given once"
    logged = rows[-1]
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert logged["optimizer_ms/total"] > 0
    if kind == "flexdemo":
        assert logged["bytes/replicate"] == result["sent"] > 0
    if kind in ("fsdp", "zero2"):
        assert logged["bytes/shard"] > 0 and logged["orthogonality_error"] > 0 and logged["skipped_steps"] == 0


def _by_hand(framework: str) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        if framework == "fabric":
            *loop, optimizer = fabric_loop.set_up()
            run: Any = fabric_loop.run_steps
        else:
            *loop, optimizer = stack.enter_context(accelerate_loop.training_on_cpu())
            run = accelerate_loop.run_steps
        monitor = StepMonitor(optimizer, every_n_steps=EVERY)
        run(*loop, optimizer)
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
