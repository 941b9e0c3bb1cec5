"""The same model, data and optimizer in every framework: the same weights."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_muon
import lightning_muon.accelerate
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from lightning_muon.engine.options import Options
from lightning_muon.optim.matrix_step import MatrixStep
from tests.integration.integrations.transformers import runs
from tests.integration.training import EXACT, load, max_difference, strategy_class
from tests.integration.training import trainer as lightning_trainer
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What all frameworks are told."""

    optimizer: lightning_muon.MuonConfig = EXACT
    num_steps: int = 6
    max_norm: float = 0.3


def _data(case: Case) -> runs.Samples:
    # Means over equally many tokens on each rank, so that their mean is that of all.
    return runs.samples(case.num_steps * runs.GLOBAL_BATCH, even=True)


def _batches(case: Case) -> list[Batch]:
    """Those of this rank, one for each step."""
    share = runs.GLOBAL_BATCH // dist.get_world_size()
    firsts = range(dist.get_rank() * share, case.num_steps * runs.GLOBAL_BATCH, runs.GLOBAL_BATCH)
    data = _data(case)
    return [{key: torch.stack([each[key] for each in data[i : i + share]]) for key in data[0]} for i in firsts]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name]},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=runs.LR, weight_decay=runs.WEIGHT_DECAY)


def _lightning(case: Case) -> nn.Module:
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
    strategy = strategy_class()(optimizer=case.optimizer)
    fitter = lightning_trainer(
        pl, strategy=strategy, max_epochs=1, gradient_clip_val=case.max_norm, use_distributed_sampler=False
    )
    fitter.fit(module, DataLoader(_batches(case), batch_size=None))
    return module.net


def _fabric(case: Case) -> nn.Module:
    load()
    from lightning.fabric import Fabric

    strategy = strategy_class("lightning.fabric")(optimizer=case.optimizer)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    network = runs.causal_lm()
    model, optimizer = fabric.setup(network, _adamw(network))
    for batch in _batches(case):
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return network


def _accelerate(case: Case) -> nn.Module:
    accelerator = lightning_muon.accelerate.Accelerator(options=Options(optimizer=case.optimizer))
    network = runs.causal_lm()
    model, optimizer = accelerator.prepare(network, _adamw(network))
    for batch in _batches(case):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def _weights_of_all() -> dict[str, dict[str, Tensor]]:
    found = {run.__name__: runs.whole_weights(run(Case())) for run in (_lightning, _fabric)}
    with fsdp2_on_cpu():
        return found | {"_accelerate": runs.whole_weights(_accelerate(Case()))}


def test_all_frameworks_give_the_same_weights(gloo: ProcessPool) -> None:
    case = Case()
    expected = runs.written_out(
        num_steps=case.num_steps, schedule=lambda step: 1.0, max_norm=case.max_norm, data=_data(case)
    )
    start = runs.whole_weights(runs.causal_lm())
    assert min((expected[name] - start[name]).abs().max() for name in start) > 0.01
    for name, weights in gloo.run(_weights_of_all, world_size=2)[0].items():
        # Sums in another order, of steps that are as many times as long as AdamW's.
        assert max_difference(weights, expected) < 1e-6 * MEASURED_MUON_LR_FACTOR, name


_ACTS, _DOES_NOT_ACT = 1e-3, 1e9


def _early_gathers_that_count(run: Callable[[Case], nn.Module], max_norm: float) -> list[int]:
    """Of each step; the weights have the bits of a run without any overlap."""
    with fsdp2_on_cpu() if run is _accelerate else nullcontext():
        config = replace(EXACT, chunk_bytes=1)
        case = Case(num_steps=3, max_norm=max_norm)
        expected = runs.whole_weights(run(replace(case, optimizer=replace(config, overlap="off"))))
        with mock.patch.object(MatrixStep, "run", autospec=True, side_effect=MatrixStep.run) as step:
            found = runs.whole_weights(run(replace(case, optimizer=replace(config, overlap="backward"))))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    return [len(call.args[1].valid) for call in step.call_args_list]


@pytest.mark.parametrize("run", [_lightning, _fabric, _accelerate])
def test_early_gathers_stay_valid_where_clipping_does_not_act(gloo: ProcessPool, run: Any) -> None:
    for acts, does_not_act in zip(
        gloo.run(_early_gathers_that_count, run, _ACTS, world_size=2),
        gloo.run(_early_gathers_that_count, run, _DOES_NOT_ACT, world_size=2),
        strict=True,
    ):
        assert acts == [0] * 3
        # The first step makes the plan.
        assert does_not_act[0] == 0
        assert min(does_not_act[1:]) > 0
        assert len(set(does_not_act[1:])) == 1
