"""The engine without any framework: one training from the unsharded module to the last step, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import Options
from lightning_muon.engine.training import TrainingEngine
from tests.integration.integrations.fabric.loop import adamw, micro_batch, network, reference
from tests.integration.training import EXACT, full_weights, loss_of, max_difference
from tests.support.processes import ProcessPool

_CPU = torch.device("cpu")


def _engine(module: nn.Module, messages: list[str], **options: Any) -> TrainingEngine:
    chosen = Options(optimizer=EXACT, **options)
    meshes = chosen.mesh_sizes.make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    engine = TrainingEngine(
        module,
        chosen,
        meshes,
        mode_options=replace(chosen.mode_options, wait_for_parameters=True),
        info=messages.append,
        warn=messages.append,
    )
    engine.shard(_CPU)
    return engine


def _rows(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(part[dist.get_rank() :: dist.get_world_size()] for part in batch)


def _micro_batch(engine: TrainingEngine, step: int, index: int) -> None:
    tokens, targets = _rows(micro_batch(step, index))
    with engine.around_forward():
        loss = loss_of(engine.module(tokens), targets)
    with engine.around_backward():
        (loss / 2).backward()


def _train(sharding: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Weights after four steps of two micro-batches, what would be saved, and what was said."""
    module, messages = network(), list[str]()
    given = adamw(module)  # Before the module is sharded, as most programs do.
    engine = _engine(module, messages, sharding=sharding)
    (optimizer,) = engine.attach([given], source="the test")
    assert engine.current(given) is optimizer
    for step in range(4):
        if step == 2:
            engine.begin_evaluation()
            with torch.no_grad(), engine.around_forward():
                engine.module(_rows(micro_batch(77, 0))[0])
            engine.weights_have_changed()
            engine.end_evaluation()
        with engine.no_sync():
            _micro_batch(engine, step, 0)
        _micro_batch(engine, step, 1)
        engine.step(optimizer, lambda each: each.step())
        optimizer.zero_grad()
    engine.end_training()
    saved = engine.weights_to_save(whole=True)
    engine.close()
    return full_weights(module), saved, "\n".join(messages)


@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "ddp"])
def test_a_training_is_that_of_one_process(gloo: ProcessPool, sharding: str) -> None:
    weights, saved, said = gloo.run(_train, sharding, world_size=2)[0]
    assert max_difference(weights, reference()) <= 1e-6
    assert max_difference(saved, weights) == 0.0
    assert "AdamW -> ParallelMuon for matrices" in said


def _step_too_early() -> None:
    module = network()
    engine = _engine(module, [])
    engine.attach([adamw(module)], source="the test")
    with engine.no_sync():
        _micro_batch(engine, 0, 0)
    engine.step(engine.optimizers[0], lambda each: each.step())


def _different_optimizers() -> None:
    module = network()
    engine = _engine(module, [])
    kind = torch.optim.AdamW if dist.get_rank() else torch.optim.SGD
    engine.attach([kind(module.parameters(), lr=0.1)], source="what the test gave")


def _clip_without_optimizer() -> None:
    engine = _engine(network(), [])
    engine.clip_by_norm(list(engine.module.parameters()), 1.0)


def _state_of_before() -> None:
    module = network()
    given = adamw(module)
    loss_of(module(micro_batch(0, 0)[0]), micro_batch(0, 0)[1]).backward()
    given.step()
    _engine(module, []).attach([given], source="the test")


@pytest.mark.parametrize(
    ("program", "exception", "match"),
    [
        (_step_too_early, RuntimeError, "optimizer.step after micro-batches that were all inside of no_backward_sync"),
        (_different_optimizers, RuntimeError, "what the test gave differs between ranks"),
        (_clip_without_optimizer, RuntimeError, "a module that no optimizer was set up for"),
        (_state_of_before, ValueError, r"AdamW has state for \w+\.\S+, which was sharded since"),
    ],
)
def test_a_wrong_order_is_an_error_on_all_ranks(
    gloo: ProcessPool, program: Any, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(program, world_size=2, exception=exception, match=match)
