"""Clipping of parameters that several optimizers step, or only some of which are to be clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, own_rows
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, micro_batch, network
from tests.integration.training import loss_of
from tests.support.processes import ProcessPool


def _clipped(what: str, *, several: bool, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """The norm before clipping, and the gradients after it, on rank 0."""
    with accelerator_on_cpu(accumulate=1, **options) as accelerator:
        model: Any = network()
        named = dict(model.named_parameters())
        rest = [value for name, value in named.items() if name not in MATRICES]
        groups = [[named[name] for name in MATRICES], rest] if several else [list(named.values())]
        optimizers = [torch.optim.AdamW(group, **HYPER) for group in groups]
        model, *_ = accelerator.prepare(model, *optimizers)
        tokens, targets = own_rows(accelerator, micro_batch(0, 0))
        accelerator.backward(loss_of(model(tokens), targets))
        norm = 0.0
        if what == "norm":
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        elif what == "one":
            norm = float(accelerator.clip_grad_norm_(model.head.weight, 0.1))
        else:
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        return norm, gradients


def _expected(what: str, *, without_matrices: bool) -> tuple[float, dict[str, Tensor]]:
    module = network()
    tokens, targets = micro_batch(0, 0)
    loss_of(module(tokens), targets).backward()
    clipped = [p for name, p in module.named_parameters() if not (without_matrices and name in MATRICES)]
    norm = 0.0
    if what == "norm":
        norm = float(torch.nn.utils.clip_grad_norm_(clipped, 0.1))
    elif what == "one":
        norm = float(torch.nn.utils.clip_grad_norm_(module.head.weight, 0.1))
    else:
        torch.nn.utils.clip_grad_value_(clipped, 1e-3)
    return norm, {name: p.grad for name, p in module.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("what", "several", "clip_groups"),
    [("norm", True, "all"), ("one", True, "all"), ("value", False, "elementwise"), ("norm", True, "elementwise")],
)
def test_gradients_are_clipped_as_in_one_process(gloo: ProcessPool, what: str, several: bool, clip_groups: str) -> None:
    norm, gradients = gloo.run(_clipped, what, several=several, clip_groups=clip_groups, world_size=2)[0]
    expected_norm, expected = _expected(what, without_matrices=clip_groups == "elementwise")
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-8)
