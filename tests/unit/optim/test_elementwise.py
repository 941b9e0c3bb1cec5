"""The AdamW part against torch.optim.AdamW."""

from __future__ import annotations

import torch
from torch import nn

from lightning_muon.optim.elementwise import adamw_step_, init_adamw_state
from lightning_muon.params.layout import TensorLayout


def test_steps_equal_those_of_torch_also_for_empty_and_scalar_tensors() -> None:
    torch.manual_seed(0)
    mine = [torch.randn(shape) for shape in ((5,), (3, 4), (), (0, 4))]
    theirs = [nn.Parameter(tensor.clone()) for tensor in mine]
    states = [init_adamw_state(tensor, TensorLayout()) for tensor in mine]
    group = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "adamw_eps": 1e-5}
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5, fused=True)
    for _ in range(4):
        grads = [torch.randn_like(tensor) for tensor in mine]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad
        adamw_step_(mine, grads, states, group)
        reference.step()
    for tensor, parameter, state in zip(mine, theirs, states, strict=True):
        assert torch.equal(tensor, parameter)
        assert state.keys() == reference.state[parameter].keys()
        assert float(state["step"]) == 4


def test_no_parameters_are_no_step() -> None:
    adamw_step_([], [], [], {"betas": (0.9, 0.999)})
