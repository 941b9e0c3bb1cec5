"""Gradients divided by tokens come from one reducing backward pass of a step; a second one is refused."""

import contextlib
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration.integrations.accelerate.loop import training_on_cpu
from tests.integration.integrations.fabric import loop
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, adamw, launch, network, own_rows, set_up
from tests.integration.training import max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

_NUM_KEPT = (2, 5)  # Targets of a row in each micro-batch; the mean over passes is not that over tokens.


def _batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    tokens, targets = loop.micro_batch(step, index)
    targets[:, _NUM_KEPT[index] :] = -100
    return tokens, targets


def _backward(fabric: Any, model: Any, step: int, index: int) -> None:
    tokens, targets = own_rows(fabric, _batch(step, index))
    fabric.strategy.report_tokens((targets != -100).sum())
    fabric.backward(loop.summed_loss(model(tokens), targets))


def _two_passes(sharding: str, *, zero_grad: bool) -> dict[str, Tensor]:
    fabric, model, optimizer = set_up(sharding=sharding, loss_scaling="tokens")
    for step in range(3):
        for index in range(2):
            _backward(fabric, model, step, index)
            if zero_grad and index == 0:
                optimizer.zero_grad()
        optimizer.step()
        if zero_grad:  # Gradients that were used need not be zeroed before the next pass is counted.
            optimizer.zero_grad()
    return loop.end(fabric, model)


def _alone(seed: int, index: int) -> dict[str, Tensor]:
    """Steps with the micro-batch ``index`` only."""
    module = network(seed)
    optimizer = MuonAndAdamW(module, MATRICES, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **HYPER)
    for step in range(3):
        module.zero_grad()
        tokens, targets = _batch(step, index)
        (loop.summed_loss(module(tokens), targets) / (targets != -100).sum()).backward()
        optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_a_second_pass_that_adds_to_gradients_is_an_error(gloo: ProcessPool, sharding: str) -> None:
    gloo.expect_error_on_all_ranks(
        _two_passes,
        sharding,
        zero_grad=False,
        exception=RuntimeError,
        match=r"a second backward pass of a step .* all but the last inside of no_backward_sync",
        world_size=2,
    )


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_what_was_thrown_away_is_not_a_first_pass(gloo: ProcessPool, sharding: str) -> None:
    found = gloo.run(_two_passes, sharding, zero_grad=True, world_size=2)[0]
    assert max_difference(found, _alone(0, 1)) <= 1e-6


def _two_models(sharding: str) -> list[dict[str, Tensor]]:
    """Each has a loss and tokens of its own, though both have run before the first backward pass."""
    fabric = launch(sharding=sharding, loss_scaling="tokens")
    pairs: list[Any] = [fabric.setup(module, adamw(module)) for module in (network(0), network(1))]
    for step in range(3):
        batches = [own_rows(fabric, _batch(step, index)) for index in range(2)]
        losses = [
            loop.summed_loss(pair[0](tokens), targets) for pair, (tokens, targets) in zip(pairs, batches, strict=True)
        ]
        for loss, (_, targets) in zip(losses, batches, strict=True):
            fabric.strategy.report_tokens((targets != -100).sum())
            fabric.backward(loss)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    result = [loop.weights(model) for model, _ in pairs]
    fabric.strategy.teardown()
    return result


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_models_with_losses_of_their_own_have_one_pass_each(gloo: ProcessPool, sharding: str) -> None:
    for index, found in enumerate(gloo.run(_two_models, sharding, world_size=2)[0]):
        assert max_difference(found, _alone(index, index)) <= 1e-6


def _models_accumulate_in_turn() -> None:
    fabric = launch(loss_scaling="tokens")
    models: list[Any] = [fabric.setup(module, adamw(module))[0] for module in (network(0), network(1))]
    for index in range(2):
        for model in models:
            with fabric.no_backward_sync(model, enabled=index == 0):
                _backward(fabric, model, 0, index)


def test_micro_batches_of_several_models_begin_and_end_together(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(
        _models_accumulate_in_turn,
        exception=RuntimeError,
        match=r"no_backward_sync of some models, but not of \w*Network",
        world_size=2,
    )


def _one_rank_reports_no_tokens(framework: str) -> None:
    with contextlib.ExitStack() as stack:
        if framework == "accelerate":
            options = {"is_fsdp": False, "sharding": "ddp", "loss_scaling": "tokens"}
            runner, model, optimizer = stack.enter_context(training_on_cpu(**options))
            report = runner.report_tokens
        else:
            runner, model, optimizer = set_up(loss_scaling="tokens")
            report = runner.strategy.report_tokens
        for index in range(2):
            tokens, targets = loop.micro_batch(0, index)
            with runner.accumulate(model) if framework == "accelerate" else runner.no_backward_sync(model, index == 0):
                if index or dist.get_rank() == 0:
                    report(targets.numel())
                runner.backward(loop.summed_loss(model(tokens), targets))
                optimizer.step() if index else None


@pytest.mark.parametrize("framework", ["fabric", "accelerate"])
def test_a_rank_that_reports_no_tokens_is_an_error_on_all(gloo: ProcessPool, framework: str) -> None:
    match = "rank 1 reported no tokens in micro-batch 1 of 2"
    gloo.expect_error_on_all_ranks(_one_rank_reports_no_tokens, framework, match=match, world_size=2)
