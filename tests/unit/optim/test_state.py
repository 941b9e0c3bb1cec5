import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lightning_muon import FlexDeMo, ParallelMuon
from tests.support.tensors import are_equal, set_gradients


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 3, bias=False))


def _lose(how: str, optimizer: Any, net: Any) -> None:
    some = [p for p in (net[1].weight, net[0].bias) if p in optimizer.state]
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = defaultdict(dict)
    elif how == "plain dict":
        optimizer.state = {} if isinstance(optimizer, ParallelMuon) else defaultdict(dict)
    elif how == "copy":
        optimizer.state = defaultdict(dict, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})
    for parameter in some:
        if how == "pop":
            optimizer.state.pop(parameter)
        elif how == "empty":
            optimizer.state[parameter] = {}


@pytest.mark.parametrize("how", ["clear", "replace", "plain dict", "copy", "pop", "empty"])
def test_state_that_is_lost_begins_with_zeros_as_in_torch(how: str) -> None:
    mine, theirs = _net(), _net()
    optimizer = ParallelMuon(mine.parameters(), lr=0.02, compute_dtype="bfloat16")
    biases = [p for p in theirs.parameters() if p.ndim == 1]
    muon = torch.optim.Muon([p for p in theirs.parameters() if p.ndim == 2], lr=0.02, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(biases, lr=0.02, weight_decay=0.1, fused=True)
    for step in range(5):
        if step in (2, 3):
            for each, net in ((optimizer, mine), (muon, theirs), (adamw, theirs)):
                _lose(how, each, net)
        set_gradients(mine.parameters(), step)
        set_gradients(theirs.parameters(), step)
        for each in (optimizer, muon, adamw):
            each.step()
    assert are_equal(mine.parameters(), theirs.parameters())


def _as_saved(net: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> dict[str, Any]:
    return get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**options))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_torch_saves_and_loads_an_optimizer_without_a_step(kind: Any, options: dict[str, bool]) -> None:
    """``get_optimizer_state_dict`` has optimizers without state take a step; it must not be taken."""
    made: dict[str, Any] = {"lr": 0.02, "compute_dtype": "float32"} | ({"base": "adamw"} if kind is FlexDeMo else {})
    plain, asked, resumed = _net(), _net(), _net()
    optimizers = [kind(net, **made) for net in (plain, asked, resumed)]
    saved = copy.deepcopy(_as_saved(asked, optimizers[1], **options))
    assert all(not value.any() for state in optimizers[1].state.values() for value in state.values())
    for step in range(2):
        for net, optimizer in zip((plain, asked), optimizers, strict=False):
            set_gradients(net.parameters(), step)
            optimizer.step()
    for step in range(2):  # From the beginning once more, in an optimizer that has learnt something else.
        set_gradients(resumed.parameters(), 10 + step)
        optimizers[2].step()
    resumed.load_state_dict(_net().state_dict())
    set_optimizer_state_dict(resumed, optimizers[2], saved, options=StateDictOptions(**options))
    for step in range(2):
        set_gradients(resumed.parameters(), step)
        optimizers[2].step()
    fresh = _net()
    later = kind(fresh, **made)
    now = copy.deepcopy(_as_saved(asked, optimizers[1], **options))  # torch shares the tensors that it loads.
    set_optimizer_state_dict(fresh, later, now, options=StateDictOptions(**options))
    fresh.load_state_dict(asked.state_dict())
    for net, optimizer in ((plain, optimizers[0]), (asked, optimizers[1]), (resumed, optimizers[2]), (fresh, later)):
        set_gradients(net.parameters(), 2)
        optimizer.step()
    for other in (asked, resumed, fresh):
        assert are_equal(plain.parameters(), other.parameters())
