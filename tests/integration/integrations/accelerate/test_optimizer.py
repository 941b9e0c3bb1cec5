"""What becomes of the optimizers that ``prepare`` is given."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.integration.integrations.accelerate.loop import accelerator_on_cpu
from tests.integration.integrations.fabric.loop import MATRICES, micro_batch, network, own_rows
from tests.integration.training import EXACT, HYPER, adamw, loss_of
from tests.support.processes import ProcessPool


def _kinds(choice: str) -> list[str]:
    """What becomes of two optimizers, given in any order, of a model with a weight in 16 bits."""
    with accelerator_on_cpu(mixed_precision="bf16", optimizer=EXACT if choice == "auto" else choice) as accelerator:
        model: Any = network()
        model.head.weight.data = model.head.weight.data.bfloat16()
        parts = [[p for name, p in model.named_parameters() if (name in MATRICES) == is_muon] for is_muon in (1, 0)]
        sgd, model, adamw = accelerator.prepare(torch.optim.SGD(parts[1], lr=0.1), model, torch.optim.AdamW(parts[0]))
        assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in model.parameters())
        return [type(adamw.optimizer).__name__, type(sgd.optimizer).__name__]


@pytest.mark.parametrize(("choice", "kind"), [("auto", "ParallelMuon"), ("keep", "AdamW")])
def test_each_optimizer_is_adopted_or_kept(gloo: ProcessPool, choice: str, kind: str) -> None:
    assert gloo.run(_kinds, choice, world_size=2) == [[kind, "SGD"]] * 2


def _skipped(choice: str, *, sharding: str) -> tuple[list[bool], list[float]]:
    """Whether each step was skipped, and the rate after each."""
    options = {} if choice == "auto" else {"optimizer": choice}
    with accelerator_on_cpu(micro_batches=1, is_fsdp=sharding == "fsdp", sharding=sharding, **options) as accelerator:
        model: Any = network()
        optimizer: Any = adamw(model)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        told: list[bool] = []
        rates: list[float] = []
        for step in range(3):
            tokens, targets = own_rows(micro_batch(step, 0))
            is_bad = step == 1 and accelerator.process_index == 1
            accelerator.backward(loss_of(model(tokens), targets) * (float("nan") if is_bad else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            told += [accelerator.optimizer_step_was_skipped]
            rates += [optimizer.param_groups[0]["lr"] / HYPER["lr"]]
        return told, rates


@pytest.mark.parametrize(("choice", "sharding"), [("keep", "fsdp"), ("auto", "ddp")])
def test_a_skipped_step_is_told_and_schedulers_wait(gloo: ProcessPool, choice: str, sharding: str) -> None:
    # Accelerate steps a scheduler once for each process.
    expected = ([False, True, False], [1 / 4, 1 / 4, 1 / 16])
    assert gloo.run(_skipped, choice, sharding=sharding, world_size=2) == [expected] * 2
