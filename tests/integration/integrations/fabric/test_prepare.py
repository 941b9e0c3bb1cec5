"""Modules whose weights have no memory when they are set up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.integrations.fabric.loop import adamw, launch, network, reference, run_steps, weights
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool


def _empty(sharding: str, file: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after ``setup``, and after a training that starts from the weights in ``file``."""
    fabric = launch(sharding=sharding)
    with fabric.init_module(empty_init=True):
        model: Any = network(seed=dist.get_rank())
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = fabric.setup(model, adamw(model))
    initial = weights(model)
    fabric.load_raw(file, model)
    run_steps(fabric, model, optimizer)
    result = weights(model)
    fabric.strategy.teardown()
    return initial, result


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_empty_modules_are_initialized_and_load_weights(gloo: ProcessPool, sharding: str, tmp_path: Path) -> None:
    plain = network().state_dict()
    torch.save(plain, tmp_path / "raw.pt")
    initial, trained = gloo.run(_empty, sharding, str(tmp_path / "raw.pt"), world_size=2)[0]
    for name, weight in plain.items():
        # Of the size that reset_parameters gives them.
        assert 0.5 < (initial[name].norm() + 0.1) / (weight.norm() + 0.1) < 2.0, name
    assert max_difference(trained, reference()) <= 1e-6
