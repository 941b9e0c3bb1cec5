"""Weights in other memory orders, weights that are frozen on the way, ranks that differ in what must be equal."""

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import Components, DCTTopK, DiLoCo, ExchangeStep, FlexDeMo, Full
from tests.distributed.flexdemo.setup import Case, Ranks, local
from tests.support.processes import ProcessPool

SHAPES = [(6, 4, 3, 3), (13, 7), (5,)]


def _mesh(ranks_per_node: int = 1) -> DeviceMesh:
    shape = (dist.get_world_size() // ranks_per_node, ranks_per_node)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _gradients(step: int, node: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + node)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _train(optimizer: FlexDeMo, parameters: list[nn.Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, _gradients(step, dist.get_rank()), strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient) if parameter.requires_grad else None
        optimizer.step()


def _difference_from_mean_gradient(options: dict[str, Any]) -> float:
    """Largest difference of weights after 3 steps from those of one process with the mean gradient."""
    parameters, alone = _parameters(), _parameters()
    parameters[0].data = parameters[0].data.to(memory_format=torch.channels_last)
    optimizer = FlexDeMo(parameters, lr=0.01, mesh=_mesh(), decay=0.0, merge="mean", **options)
    base = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[options["base"]](alone, lr=0.01, weight_decay=0.0)
    for step in range(3):
        _train(optimizer, parameters, [step])
        for number, parameter in enumerate(alone):
            of_nodes = [_gradients(step, node)[number] for node in range(dist.get_world_size())]
            parameter.grad = torch.stack(of_nodes).mean(0)
        base.step()
    return max((one - other).abs().max().item() for one, other in zip(parameters, alone, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"base": "adamw", "replicator": Full(), "value_format": "fp32"},
        {"base": "adamw", "replicator": DCTTopK(chunk_size=4, top_k=16), "value_format": "fp32", "dense_below": 8},
        {"base": "sgd", "sign": False, "replicator": DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0)},
    ],
    ids=["full", "dct", "diloco"],
)
def test_weights_may_lie_in_memory_in_any_order(gloo: ProcessPool, options: dict[str, Any]) -> None:
    # AdamW divides by roots of squares: where those are small the rounding of the mean shows.
    assert max(gloo.run(_difference_from_mean_gradient, options, world_size=2)) < 1e-5


def _spread(tensor: Tensor) -> float:
    of_nodes = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(of_nodes, tensor.detach().contiguous())
    return max((one - of_nodes[0]).abs().max().item() for one in of_nodes)


def _freeze_within_a_period() -> list[float]:
    parameters = _parameters()
    optimizer = FlexDeMo(parameters, lr=0.01, mesh=_mesh(), replicator=DiLoCo(period=4))
    _train(optimizer, parameters, range(2))
    parameters[1].requires_grad_(False)
    _train(optimizer, parameters, range(2, 12))
    return [_spread(parameter) for parameter in parameters]


def test_a_weight_frozen_within_a_period_is_averaged_once_more(gloo: ProcessPool) -> None:
    assert gloo.run(_freeze_within_a_period, world_size=2) == [[0.0] * len(SHAPES)] * 2


def _step_with(options_of_ranks: list[dict[str, Any]], *, seeds: tuple[int, int] = (0, 0)) -> None:
    parameters = _parameters(seed=seeds[dist.get_rank()])
    optimizer = FlexDeMo(parameters, lr=0.01, mesh=_mesh(), **options_of_ranks[dist.get_rank()])
    _train(optimizer, parameters, [0])


@pytest.mark.parametrize(
    "options", [{"decay": 0.9}, {"merge": "mean"}, {"check_every": 7}, {"replicator": DCTTopK(top_k=3)}], ids=str
)
def test_options_that_differ_between_ranks_are_an_error(gloo: ProcessPool, options: dict[str, Any]) -> None:
    gloo.expect_error_on_all_ranks(
        _step_with, [{}, options], match="differs between ranks", exception=RuntimeError, world_size=2
    )


@pytest.mark.parametrize("replicator", [DCTTopK(), DiLoCo(period=4)], ids=["dct", "diloco"])
def test_nodes_that_begin_with_other_weights_are_an_error(gloo: ProcessPool, replicator: Any) -> None:
    match, options = "begun with different weights", [{"replicator": replicator}] * 2
    gloo.expect_error_on_all_ranks(_step_with, options, seeds=(0, 1), match=match, exception=RuntimeError, world_size=2)


def _drift(name: str) -> None:
    """Two rows of a weight, which may be frozen, change places on the second node."""
    ranks = Ranks(Case(mesh_shape=(2, 2), options={"dense_below": 16, "check_every": 2}))
    ranks.parameters["stack"].requires_grad_(False)
    for step in range(4):
        ranks.set_gradients(step)
        if step == 1 and dist.get_rank() == 2:
            weight = local(ranks.parameters[name].detach())
            weight.copy_(weight.flip(0))
        ranks.parameters["stack"].grad = None
        ranks.optimizer.step()


@pytest.mark.parametrize("name", ["odd", "stack"])
def test_a_weight_changed_on_one_node_is_named_on_all_ranks(gloo: ProcessPool, name: str) -> None:
    gloo.expect_error_on_all_ranks(_drift, name, match=name, exception=RuntimeError, world_size=4)


def _forgotten_root() -> None:
    mesh = _mesh(ranks_per_node=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["shard"])
    FlexDeMo(model, lr=0.01, mesh=mesh).attach(model)


def test_a_weight_not_sharded_inside_a_node_is_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_forgotten_root, match=r"shape \(4, 4\) is not sharded", world_size=2)


class _Fails(DCTTopK):
    is_broken: ClassVar[bool] = False

    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        if self.is_broken:
            raise ValueError("no blocks for me")
        return super().encode(blocks, exchange)


def _error_of_a_replicator() -> str:
    ranks = Ranks(Case(mesh_shape=(2, 2), options={"replicator": _Fails(), "dense_below": 0}))
    ranks.set_gradients(0)
    _Fails.is_broken = dist.get_rank() == 1
    with pytest.raises((ValueError, RuntimeError)) as error:
        ranks.optimizer.step()
    return str(error.value)


def test_a_replicator_that_fails_on_one_rank_fails_on_all(gloo: ProcessPool) -> None:
    assert all("no blocks for me" in message for message in gloo.run(_error_of_a_replicator, world_size=4))


def test_a_flattened_state_of_diloco_is_refused_with_its_reason() -> None:
    model = nn.Linear(3, 2)
    optimizer = FlexDeMo(model, replicator=DiLoCo(period=2), sign=False)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(ValueError, match="without flatten_optimizer_state_dict"):
        set_optimizer_state_dict(model, optimizer, state, options=options)
