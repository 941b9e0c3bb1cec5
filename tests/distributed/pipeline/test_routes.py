"""Which optimizer a parameter gets does not depend on the stage in which it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.params.routing import route_module
from tests.distributed.pipeline.models import start
from tests.support.processes import ProcessPool


class _Stack(nn.Sequential):
    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.numel()


def _linear_layers() -> nn.Module:
    return _Stack(*(nn.Linear(12, 12) for _ in range(6)))


def _tied() -> nn.Module:
    net = _Stack(nn.Embedding(20, 12), *(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 20), nn.Softmax(-1))
    net.append(nn.Linear(20, 20))
    net[4].weight = net[0].weight
    return net


def _routes(make: Callable[[], nn.Module], config: MuonConfig) -> dict[str, tuple[str, Any]]:
    """Of the parameters of this rank."""
    torch.manual_seed(0)
    engine, optimizer = start(make(), torch.optim.AdamW, optimizer=config, sharding="none")
    assert isinstance(optimizer, ParallelMuon)
    found = {route.name: (route.algorithm, route.splits) for route in optimizer.routes}
    engine.close()
    return found


_OPTIONS: list[dict[str, Any]] = [
    {},
    {"adamw_patterns": ("4.weight",)},
    {"adamw_patterns": ("1.weight",), "muon_patterns": ("[56].weight",), "fused": {"3.weight": 2}},
]


@pytest.mark.parametrize("make", [_linear_layers, _tied])
@pytest.mark.parametrize("options", _OPTIONS)
def test_routes_are_those_of_the_whole_model(gloo: ProcessPool, make: Any, options: dict[str, Any]) -> None:
    config = MuonConfig(**options)
    whole = {route.name: (route.algorithm, route.splits) for route in route_module(make(), config).values()}
    first, last = gloo.run(_routes, make, config, world_size=2)
    assert first and last and not first.keys() & last.keys()
    copies = (first | last).keys() - whole.keys()
    assert copies == ({"4.weight"} if make is _tied else set())
    assert {name: route for name, route in (first | last).items() if name not in copies} == whole
    assert all(last[name] == whole["0.weight"] for name in copies)


def _message_of_error(config: MuonConfig) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        _routes(_linear_layers, config)
    return str(caught.value)


def test_a_wrong_pattern_for_one_stage_is_an_error_on_all_ranks(gloo: ProcessPool) -> None:
    messages = gloo.run(_message_of_error, MuonConfig(fused={"5.weight": 2}), world_size=2)
    assert all("not on Muon: 5.weight" in message for message in messages)


def _shared_by_two_layers() -> nn.Module:
    net = _linear_layers()
    net[1].weight = net[0].weight  # type: ignore[index]
    return net


def _message_of_sharing() -> str:
    with pytest.raises(ValueError, match="more than one of these parts is in a stage") as caught:
        _routes(_shared_by_two_layers, MuonConfig())
    return str(caught.value)


def test_a_weight_shared_inside_of_a_stage_is_refused(gloo: ProcessPool) -> None:
    assert all(
        "0.weight and 1.weight are one parameter" in text for text in gloo.run(_message_of_sharing, world_size=2)
    )
