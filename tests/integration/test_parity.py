"""The same model, data and optimizer in every framework: the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lightning_muon
import lightning_muon.accelerate
from lightning_muon.integrations.fabric.registry import strategy_class as fabric_strategy_class
from lightning_muon.integrations.options import Options
from tests.integration.integrations.transformers.runs import (
    GLOBAL_BATCH,
    LR,
    WEIGHT_DECAY,
    Samples,
    causal_lm,
    samples,
    trainer,
    whole_weights,
    written_out,
)
from tests.integration.training import EXACT, PACKAGES, load, max_difference, strategy_class
from tests.integration.training import trainer as lightning_trainer
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool

NUM_STEPS, MAX_NORM = 20, 0.3
Batch = dict[str, Tensor]


def _data() -> Samples:
    # Means over equally many tokens on each rank, so that their mean is that of all.
    return samples(NUM_STEPS * GLOBAL_BATCH, even=True)


def _batches() -> list[Batch]:
    """Those of this rank, one for each step."""
    share = GLOBAL_BATCH // dist.get_world_size()
    firsts = range(dist.get_rank() * share, NUM_STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    data = _data()
    return [{key: torch.stack([each[key] for each in data[i : i + share]]) for key in data[0]} for i in firsts]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name]},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY)


def _plain_loop() -> nn.Module:
    model = causal_lm()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    groups = [
        {"params": [pair for pair in named if "norm" not in pair[0]]},
        {"params": [pair for pair in named if "norm" in pair[0]], "weight_decay": 0.0},
    ]
    optimizer = lightning_muon.ParallelMuon.from_config(groups, EXACT, lr=LR, weight_decay=WEIGHT_DECAY)
    optimizer.attach(model)
    for batch in _batches():
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _lightning() -> nn.Module:
    pl = load(PACKAGES[0])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = causal_lm()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return _adamw(self)

    module = Module()
    strategy = strategy_class(PACKAGES[0])(optimizer=EXACT)
    fitter = lightning_trainer(
        pl, strategy=strategy, max_epochs=1, gradient_clip_val=MAX_NORM, use_distributed_sampler=False
    )
    fitter.fit(module, DataLoader(_batches(), batch_size=None))
    return module.net


def _fabric() -> nn.Module:
    load(PACKAGES[0])
    from lightning.fabric import Fabric

    strategy = fabric_strategy_class("lightning.fabric")(optimizer=EXACT)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    network = causal_lm()
    model, optimizer = fabric.setup(network, _adamw(network))
    for batch in _batches():
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return network


def _accelerate() -> nn.Module:
    accelerator = lightning_muon.accelerate.Accelerator(options=Options(optimizer=EXACT))
    network = causal_lm()
    model, optimizer = accelerator.prepare(network, _adamw(network))
    for batch in _batches():
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def _transformers(directory: str) -> nn.Module:
    options = {"max_steps": NUM_STEPS, "max_grad_norm": MAX_NORM, "lr_scheduler_type": "constant"}
    run = trainer(directory, causal_lm(), data=_data(), **options)
    run.train()
    return run.model


def _weights_of_all(directory: str) -> dict[str, dict[str, Tensor]]:
    found = {run.__name__: whole_weights(run()) for run in (_plain_loop, _lightning, _fabric)}
    on_cpu: dict[str, Callable[[], nn.Module]] = {
        "_accelerate": _accelerate,
        "_transformers": lambda: _transformers(directory),
    }
    for name, run in on_cpu.items():
        with fsdp2_on_cpu():
            found[name] = whole_weights(run())
    return found


def test_all_frameworks_give_the_same_weights(gloo: ProcessPool, tmp_path: Any) -> None:
    expected = written_out(num_steps=NUM_STEPS, schedule=lambda step: 1.0, max_norm=MAX_NORM, data=_data())
    found = gloo.run(_weights_of_all, str(tmp_path), timeout=150)[0]
    start = whole_weights(causal_lm())
    assert min((expected[name] - start[name]).abs().max() for name in start) > 0.01
    assert len(found) == 5
    for name, weights in found.items():
        assert max_difference(weights, expected) < 1e-6, name
