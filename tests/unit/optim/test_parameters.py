"""Routes of parameters in groups, and the AdamW part against torch.optim.AdamW."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.optim.elementwise import adamw_step_
from lightning_muon.optim.parameters import convert_, routes_of
from lightning_muon.params.layout import PlacedState
from tests.support.step_plans import adamw_state

OPTIONS = MuonConfig()


def _group(*parameters: nn.Parameter, algorithm: str = "auto", **options: Any) -> dict[str, Any]:
    return {"params": list(parameters), "algorithm": algorithm, **options}


def test_the_group_decides_then_the_module_then_the_shape() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    table, hidden = model[0].weight, model[1].weight
    assert routes_of([_group(table)], model, OPTIONS)[table].algorithm == "adamw"
    assert routes_of([_group(table)], None, OPTIONS)[table].algorithm == "muon"
    routes = routes_of([_group(table, algorithm="muon"), _group(hidden, algorithm="adamw")], model, OPTIONS)
    assert (routes[table].algorithm, routes[hidden].algorithm) == ("muon", "adamw")
    assert routes[table].reason == "embedding, algorithm='muon'"


def test_a_parameter_outside_the_module_is_routed_by_shape() -> None:
    model, extra = nn.Linear(4, 4), nn.Parameter(torch.ones(3, 2))
    routes = routes_of([_group(*model.parameters(), extra)], model, OPTIONS)
    assert (routes[extra].name, routes[extra].kind) == ("parameter 2", "matrix")


def _between(tensor: torch.Tensor) -> torch.Tensor:
    """In columns of a wider tensor of ones."""
    wide = torch.ones(*tensor.shape[:-1], 2 * tensor.shape[-1] + 3)
    inner = wide[..., 2 : 2 + tensor.shape[-1]]
    inner.copy_(tensor)
    return inner


# All of the same elements, and each lies in memory in another way.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "between": _between,
    "strided": lambda t: t.repeat_interleave(3, 0)[::3],
    "transposed": lambda t: t.mT.contiguous().mT,
    "between, transposed": lambda t: _between(t.mT).mT,
    "channels last": lambda t: t.clone(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout_of_gradient", ["contiguous", "transposed", "between"])
@pytest.mark.parametrize("layout_of_state", ["contiguous", "transposed", "between"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_the_elements_lie_changes_nothing(layout: str, layout_of_state: str, layout_of_gradient: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 5, 7)
    mine = LAYOUTS[layout](weight)
    theirs = nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.3, foreach=False)
    state = {
        key: LAYOUTS[layout_of_state](value) if value.ndim else value for key, value in adamw_state(weight).items()
    }
    group = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.9, 0.999), "adamw_eps": 1e-8}
    addresses = [tensor.data_ptr() for tensor in (mine, state["exp_avg"], state["exp_avg_sq"])]
    for _ in range(3):
        grad = torch.randn_like(weight)
        theirs.grad = grad
        adamw_step_([mine], [LAYOUTS[layout_of_gradient](grad)], [state], group, {})
        reference.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[key], reference.state[theirs][key], rtol=0, atol=1e-6)
    assert addresses == [tensor.data_ptr() for tensor in (mine, state["exp_avg"], state["exp_avg_sq"])]


def test_adamw_decays_only_towards_its_update() -> None:
    """Weights, and moments, against the formulas; zero gradients and weights count as aligned."""
    torch.manual_seed(0)
    weight, lr, decay, beta1, beta2, eps = torch.randn(13, 7), 0.1, 0.3, 0.9, 0.99, 1e-8
    weight[0] = 0
    mine, state = weight.clone(), adamw_state(weight)
    group = {"lr": lr, "weight_decay": decay, "betas": (beta1, beta2), "adamw_eps": eps, "cautious_weight_decay": True}
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        grad = torch.randn_like(weight)
        grad[:, 0] = 0
        adamw_step_([mine], [grad], [state], group, {})
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
        update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
        weight = weight - lr * (update + decay * (update * weight >= 0) * weight)
    torch.testing.assert_close(mine, weight, rtol=0, atol=1e-6)


def test_states_are_converted_in_the_same_order_whatever_that_of_their_keys_is() -> None:
    """A collective conversion must meet the same entry on all ranks."""
    orders: list[list[float]] = []

    def convert(places: Sequence[PlacedState]) -> list[torch.Tensor]:
        orders.append([float(place.state.sum()) for place in places])
        return [place.state for place in places]

    keys = ("momentum_buffer", "second_momentum_buffer", "other")
    state = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    for each in (keys, keys[::-1]):
        convert_(
            [(torch.ones(2), {key: state[key] for key in each})],
            convert,
            lambda *given: PlacedState(given[0], given[2], (2,)),
        )
    assert orders[0] == orders[1]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        flat = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            ParallelMuon(flat)
    finally:
        dist.destroy_process_group()
