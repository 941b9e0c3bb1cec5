"""Steps of the optimizer that ``prepare`` returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, own_rows
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, adamw, micro_batch, network, reference
from tests.integration.training import loss_of, max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool


def _with_closures() -> tuple[dict[str, Tensor], list[float]]:
    with accelerator_on_cpu(accumulate=1) as accelerator:
        model: Any = network()
        model, optimizer = accelerator.prepare(model, adamw(model))
        losses: list[float] = []
        for step in range(3):
            tokens, targets = own_rows(accelerator, micro_batch(step, 0))

            def closure(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(tokens), targets)
                accelerator.backward(loss)
                losses.append(float(loss.detach()))
                return loss

            optimizer.step(closure)
        return accelerator.get_state_dict(model), losses


def test_a_closure_computes_the_gradients_of_the_step(gloo: ProcessPool) -> None:
    found, losses = gloo.run(_with_closures, world_size=2)[0]
    assert len(losses) == 3
    assert max_difference(found, reference(steps=3, accumulate=1)) <= 1e-6


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
    optimizer = MuonAndAdamW(module, MATRICES, **HYPER)
    for step in range(3):
        module.zero_grad()
        tokens, targets = micro_batch(step, 0)
        loss_of(module.scale * module(tokens), targets).backward()
        optimizer.step()
    found = gloo.run(_backward_of_torch, world_size=2)[0]
    assert max_difference(found, dict(module.state_dict())) <= 1e-6
