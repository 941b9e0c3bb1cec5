"""FlexDeMo without a Trainer: other numbers of nodes, weights that freeze, ranks that differ."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_muon import Components, DCTTopK, DiLoCo, ExchangeStep, FlexDeMo
from lightning_muon.params.layout import local_tensor
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool
from tests.support.tensors import SHAPES, are_equal, random_tensors, wholes

LOCAL: dict[str, Any] = {"replicator": DiLoCo(period=3), "base": "muon", "compute_dtype": "float32", "lr": 0.05}


class Ranks:
    """Parameters of odd shapes on nodes of ranks; gradients are drawn from (step, node), and each rank has its rows."""

    def __init__(self, mesh_shape: tuple[int, int], *, seed: int = 0, **options: Any) -> None:
        self.mesh = mesh_of(mesh_shape)
        self.node = self.mesh.get_local_rank("replicate")
        self.parameters = {name: nn.Parameter(self._place(each)) for name, each in random_tensors(SHAPES, seed).items()}
        self.optimizer = FlexDeMo(self.parameters.items(), **{"lr": 0.01, "base": "sgd", "mesh": self.mesh} | options)

    def _place(self, tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, self.mesh["shard"], [Shard(0)], src_data_rank=None) if tensor.ndim else tensor

    def set_gradients(self, step: int) -> None:
        gradients = random_tensors(SHAPES, 100 * (step + 1) + self.node)
        for name, parameter in self.parameters.items():
            parameter.grad = self._place(gradients[name]) if parameter.requires_grad else None

    def train(self, *steps: int) -> None:
        for step in steps:
            self.set_gradients(step)
            self.optimizer.step()

    def nodes_agree(self) -> bool:
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, list(wholes(self.parameters).values()))
        return all(are_equal(other, of_ranks[0]) for other in of_ranks)


def _saved(mesh_shape: tuple[int, int]) -> dict[str, Any]:
    ranks = Ranks(mesh_shape, **LOCAL)
    ranks.train(*range(4))
    state = ranks.optimizer.state_dict()
    return state | {"state": {number: wholes(entry) for number, entry in state["state"].items()}}


def _loaded(mesh_shape: tuple[int, int], state: dict[str, Any]) -> list[dict[str, Tensor]]:
    """State of each parameter on this node, and its weights; then it trains on until the next average."""
    ranks = Ranks(mesh_shape, **LOCAL)
    ranks.optimizer.load_state_dict(state)
    states = ranks.optimizer.state
    found = [wholes({**states[parameter], "node_weights": parameter}) for parameter in ranks.parameters.values()]
    ranks.train(4, 5)
    assert ranks.optimizer.num_exchanges == 6 and ranks.nodes_agree()
    return found


@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 2)), ((2, 2), (2, 1))], ids=str)
def test_nodes_that_train_by_themselves_go_on_from_their_mean_if_their_number_changes(
    gloo: ProcessPool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Saved one step behind an average."""
    state = gloo.run(_saved, before, world_size=before[0] * before[1])[0]
    for rank, found in enumerate(gloo.run(_loaded, after, state, world_size=after[0] * after[1])):
        for saved, loaded in zip(state["state"].values(), found, strict=True):
            for key in {"node_weights", "momentum_buffer"} & saved.keys():
                of_nodes, node = saved[key], rank // after[1]
                assert of_nodes.shape[0] == before[0] and not torch.equal(of_nodes[0], of_nodes[1])
                is_kept = after[0] == before[0]
                expected = of_nodes[node] if is_kept else of_nodes.double().mean(0).float()
                torch.testing.assert_close(loaded[key], expected, rtol=0, atol=0 if is_kept else 1e-6)
            assert torch.equal(loaded["outer_momentum"], saved["outer_momentum"])


def _other_options(options: dict[str, Any]) -> None:
    Ranks((2, 1), **(options if dist.get_rank() else {})).train(0)


def _other_weights(replicator: Any) -> None:
    Ranks((2, 1), seed=dist.get_rank(), replicator=replicator).train(0)


def _changed_on_one_node(name: str) -> None:
    """Two rows of a weight, which may be frozen, change places on one rank of the second node."""
    ranks = Ranks((2, 2), dense_below=16, check_every=2)
    ranks.parameters["stack"].requires_grad_(False)
    ranks.train(0)
    if dist.get_rank() == 2:
        weight = local_tensor(ranks.parameters[name].detach())
        weight.copy_(weight.flip(0))
    ranks.train(1, 2, 3)


def _badly_sharded(mesh_shape: tuple[int, int]) -> None:
    """A layer of which no rank of a node has a part, or one that FSDP2 averages over the nodes."""
    mesh, model = mesh_of(mesh_shape), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["shard"] if mesh_shape[0] == 1 else mesh)
    FlexDeMo(model, mesh=mesh).attach(model)


_CALLS: dict[str, Callable[[FlexDeMo, nn.Module], Any]] = {
    "step": lambda optimizer, _: optimizer.step(),
    "attach": FlexDeMo.attach,
    "state_dict": lambda optimizer, _: optimizer.state_dict(),
}


def _without_a_mesh(call: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = FlexDeMo(model)
    model(torch.randn(2, 4)).sum().backward()
    _CALLS[call](optimizer, model)


class _Fails(DCTTopK):
    is_broken: ClassVar[bool] = False

    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        if self.is_broken:
            raise ValueError("no blocks for me")
        return super().encode(blocks, exchange)


def _replicator_that_fails(options: dict[str, Any]) -> None:
    ranks = Ranks((2, 2), replicator=_Fails(), **options)
    _Fails.is_broken = dist.get_rank() == 1
    try:
        ranks.train(0)
    except ValueError as error:  # Of the rank whose own error it is.
        raise RuntimeError(str(error)) from error


@pytest.mark.parametrize(
    ("program", "argument", "world_size", "match"),
    [
        (_other_options, {"decay": 0.9}, 2, "differs between ranks"),
        (_other_weights, DCTTopK(), 2, "begun with different weights"),
        (_other_weights, DiLoCo(period=4), 2, "begun with different weights"),
        (_changed_on_one_node, "odd", 4, "odd"),
        (_changed_on_one_node, "stack", 4, "stack"),
        (_badly_sharded, (1, 2), 2, r"shape \(4, 4\) is not sharded"),
        (_badly_sharded, (2, 1), 2, r"averages between the nodes .*mesh=mesh\['shard'\]"),
        *((_without_a_mesh, call, 2, r"FlexDeMo\(\.\.\., mesh=init_device_mesh") for call in _CALLS),
        (_replicator_that_fails, {"dense_below": 0}, 4, "no blocks for me"),
    ],
)
def test_it_is_an_error_on_all_ranks(
    gloo: ProcessPool, program: Callable[[Any], None], argument: Any, world_size: int, match: str
) -> None:
    gloo.expect_error_on_all_ranks(program, argument, match=match, exception=Exception, world_size=world_size)


def _change(change: Callable[[FlexDeMo, list[nn.Parameter]], object]) -> bool:
    ranks = Ranks((2, 1), **LOCAL, check_every=0)
    ranks.train(*range(4))
    change(ranks.optimizer, list(ranks.parameters.values()))
    ranks.train(*range(4, 9))
    return ranks.nodes_agree()


def _forget_all(optimizer: FlexDeMo, _: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def _forget_one(optimizer: FlexDeMo, parameters: list[nn.Parameter]) -> None:
    optimizer.state.pop(parameters[0])


def _freeze_one(_: FlexDeMo, parameters: list[nn.Parameter]) -> None:
    parameters[0].requires_grad_(False)


@pytest.mark.parametrize("change", [_forget_all, _forget_one, _freeze_one])
def test_nodes_agree_on_weights_lost_or_frozen_within_a_period(gloo: ProcessPool, change: Any) -> None:
    """A frozen one is averaged once more."""
    assert all(gloo.run(_change, change, world_size=2))
