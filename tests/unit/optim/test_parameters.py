"""Routes of parameters in groups, and the AdamW part against torch.optim.AdamW."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.optim.elementwise import adamw_step_
from lightning_muon.optim.parameters import routes_of
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
        adamw_step_([mine], [LAYOUTS[layout_of_gradient](grad)], [state], group)
        reference.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[key], reference.state[theirs][key], rtol=0, atol=1e-6)
    assert addresses == [tensor.data_ptr() for tensor in (mine, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        flat = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            ParallelMuon(flat)
    finally:
        dist.destroy_process_group()
