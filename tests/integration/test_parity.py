"""The same model, data and optimizer in every framework: the same weights."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_muon
import lightning_muon.accelerate
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from lightning_muon.engine.options import Options
from tests.integration.integrations.transformers import runs
from tests.integration.training import EXACT, load, max_difference, strategy_class
from tests.integration.training import trainer as lightning_trainer
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool

Batch = dict[str, Tensor]


NUM_STEPS, MAX_NORM = 6, 0.3


def _data() -> runs.Samples:
    # Means over equally many tokens on each rank, so that their mean is that of all.
    return runs.samples(NUM_STEPS * runs.GLOBAL_BATCH, even=True)


def _batches() -> list[Batch]:
    """Those of this rank, one for each step."""
    share = runs.GLOBAL_BATCH // dist.get_world_size()
    firsts = range(dist.get_rank() * share, NUM_STEPS * runs.GLOBAL_BATCH, runs.GLOBAL_BATCH)
    data = _data()
    return [{key: torch.stack([each[key] for each in data[i : i + share]]) for key in data[0]} for i in firsts]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name]},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=runs.LR, weight_decay=runs.WEIGHT_DECAY)


def _lightning() -> nn.Module:
    pl = load()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = runs.causal_lm()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return _adamw(self)

    module = Module()
    strategy = strategy_class()(optimizer=EXACT)
    fitter = lightning_trainer(
        pl, strategy=strategy, max_epochs=1, gradient_clip_val=MAX_NORM, use_distributed_sampler=False
    )
    fitter.fit(module, DataLoader(_batches(), batch_size=None))
    return module.net


def _fabric() -> nn.Module:
    load()
    from lightning.fabric import Fabric

    strategy = strategy_class("lightning.fabric")(optimizer=EXACT)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    network = runs.causal_lm()
    model, optimizer = fabric.setup(network, _adamw(network))
    for batch in _batches():
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return network


def _accelerate() -> nn.Module:
    accelerator = lightning_muon.accelerate.Accelerator(options=Options(optimizer=EXACT))
    network = runs.causal_lm()
    model, optimizer = accelerator.prepare(network, _adamw(network))
    for batch in _batches():
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def _weights_of_all() -> dict[str, dict[str, Tensor]]:
    found = {run.__name__: runs.whole_weights(run()) for run in (_lightning, _fabric)}
    with fsdp2_on_cpu():
        return found | {"_accelerate": runs.whole_weights(_accelerate())}


def test_all_frameworks_give_the_same_weights(gloo: ProcessPool) -> None:
    expected = runs.written_out(num_steps=NUM_STEPS, schedule=lambda step: 1.0, max_norm=MAX_NORM, data=_data())
    start = runs.whole_weights(runs.causal_lm())
    assert min((expected[name] - start[name]).abs().max() for name in start) > 0.01
    for name, weights in gloo.run(_weights_of_all, world_size=2)[0].items():
        # Sums in another order, of steps that are as many times as long as AdamW's.
        assert max_difference(weights, expected) < 1e-6 * MEASURED_MUON_LR_FACTOR, name
