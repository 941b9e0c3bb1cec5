"""Steps of the optimizer that ``prepare`` returns."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from lightning_muon.params.layout import local_tensor
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, own_rows, training_on_cpu
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, adamw, micro_batch, network, reference
from tests.integration.training import loss_of, max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool


def _backward_of_torch() -> dict[str, Tensor]:
    """A program that calls ``loss.backward`` itself, with a scalar weight that FSDP2 does not reduce."""
    with accelerator_on_cpu(accumulate=1) as accelerator:
        model: Any = network()
        model.scale = torch.nn.Parameter(torch.tensor(0.9))
        model, optimizer = accelerator.prepare(model, adamw(model))
        for step in range(3):
            tokens, targets = own_rows(accelerator, micro_batch(step, 0))
            loss_of(model.scale * model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        scales = accelerator.gather(model.scale.detach().view(1))
        assert torch.equal(scales, scales[:1].expand(2))
        return accelerator.get_state_dict(model)


def test_gradients_are_whole_whoever_called_backward(gloo: ProcessPool) -> None:
    module: Any = network()
    module.scale = torch.nn.Parameter(torch.tensor(0.9))
    optimizer = MuonAndAdamW(module, MATRICES, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **HYPER)
    for step in range(3):
        module.zero_grad()
        tokens, targets = micro_batch(step, 0)
        loss_of(module.scale * module(tokens), targets).backward()
        optimizer.step()
    found = gloo.run(_backward_of_torch, world_size=2)[0]
    assert max_difference(found, dict(module.state_dict())) <= 1e-6


def _also_by_torch(sharding: str, *, beside: bool) -> dict[str, Tensor]:
    """``loss.backward()`` in the last micro-batch: after a backward of Accelerate in this one, or in the one before."""
    with training_on_cpu(is_fsdp=sharding == "fsdp", sharding=sharding) as (accelerator, model, optimizer):
        for step in range(2):
            for index in range(2):
                tokens, targets = own_rows(accelerator, micro_batch(step, index))
                with accelerator.accumulate(model):
                    losses = [loss_of(model(tokens), targets) / (1 + beside) for _ in range(1 + beside)]
                    if index == 0 or beside:
                        accelerator.backward(losses.pop())
                    for loss in losses:
                        (loss / 2).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return accelerator.get_state_dict(model)


@pytest.mark.parametrize(("sharding", "beside"), [("fsdp", False), ("ddp", False), ("ddp", True)])
def test_backward_passes_of_both_kinds_go_into_one_step(gloo: ProcessPool, sharding: str, beside: bool) -> None:
    found = gloo.run(_also_by_torch, sharding, beside=beside, world_size=2)[0]
    assert max_difference(found, reference(steps=2)) <= 1e-6


def _unreduced() -> None:
    with training_on_cpu(accumulate=1) as (accelerator, model, optimizer):
        for is_last in (False, True):  # A step that was reduced does not hide the next one.
            tokens, targets = own_rows(accelerator, micro_batch(0, 0))
            with accelerator.no_sync(model) if is_last else nullcontext():
                loss_of(model(tokens), targets).backward()
                optimizer.step()
            assert not is_last, "the step has used gradients of this rank alone"
            optimizer.zero_grad()


def test_a_step_after_unreduced_gradients_is_an_error(gloo: ProcessPool) -> None:
    match = "optimizer.step after micro-batches that were all inside"
    gloo.expect_error_on_all_ranks(_unreduced, exception=RuntimeError, match=match, world_size=2)


def _through_another_method() -> dict[str, Tensor]:
    with training_on_cpu(accumulate=1, is_fsdp=False, sharding="zero2") as (accelerator, model, optimizer):
        for step in range(3):
            tokens, targets = own_rows(accelerator, micro_batch(step, 0))
            accelerator.backward(loss_of(model.forward(tokens), targets))
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.get_state_dict(model)


def test_a_loss_that_does_not_come_from_calling_the_model(gloo: ProcessPool) -> None:
    found = gloo.run(_through_another_method, world_size=2)[0]
    assert max_difference(found, reference(steps=3, accumulate=1)) <= 1e-6


def _skipped(choice: str, *, sharding: str) -> tuple[list[bool], list[float], bool]:
    """Whether each step was skipped, the rate after each, and whether a skipped one has changed weights."""
    options = {} if choice == "auto" else {"optimizer": choice}
    with accelerator_on_cpu(accumulate=1, is_fsdp=sharding == "fsdp", sharding=sharding, **options) as accelerator:
        model: Any = network()
        optimizer: Any = adamw(model)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        told: list[bool] = []
        rates: list[float] = []
        has_changed = False
        for step in range(3):
            tokens, targets = own_rows(accelerator, micro_batch(step, 0))
            before = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
            is_bad = step == 1 and accelerator.process_index == 1
            accelerator.backward(loss_of(model(tokens), targets) * (float("nan") if is_bad else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            after = [local_tensor(parameter) for parameter in model.parameters()]
            told += [accelerator.optimizer_step_was_skipped]
            rates += [optimizer.param_groups[0]["lr"] / HYPER["lr"]]
            has_changed |= told[-1] and not all(map(torch.equal, before, after))
        return told, rates, has_changed


@pytest.mark.parametrize(("choice", "sharding"), [("keep", "fsdp"), ("auto", "ddp")])
def test_a_skipped_step_is_told_and_schedulers_wait(gloo: ProcessPool, choice: str, sharding: str) -> None:
    # Accelerate steps a scheduler once for each process.
    expected = ([False, True, False], [1 / 4, 1 / 4, 1 / 16], False)
    assert gloo.run(_skipped, choice, sharding=sharding, world_size=2) == [expected] * 2


def _joined(*, even: bool) -> bool:
    with training_on_cpu(accumulate=1) as run, run[0].join_uneven_inputs([run[1]], even_batches=even):
        return True


def test_uneven_inputs_are_an_error(gloo: ProcessPool) -> None:
    assert gloo.run(_joined, even=True, world_size=2) == [True] * 2
    gloo.expect_error_on_all_ranks(_joined, even=False, match="as many batches on each rank", world_size=2)
