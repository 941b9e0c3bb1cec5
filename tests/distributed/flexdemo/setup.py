"""Parameters of odd shapes on R nodes of S ranks, whose gradients are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_muon import FlexDeMo
from tests.support.tensors import SHAPES, random_tensors, wholes


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all ranks do: steps with gradients drawn from (step, node), equal on the ranks of a node."""

    mesh_shape: tuple[int, int]
    options: Mapping[str, Any]
    num_steps: int = 3

    @property
    def world_size(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]

    def weights(self) -> dict[str, Tensor]:
        return random_tensors(SHAPES, 0)

    def gradients(self, step: int, node: int) -> dict[str, Tensor]:
        return random_tensors(SHAPES, 100 * (step + 1) + node)


class Ranks:
    """The calling rank's parameters and optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.node, self.shards = self.mesh.get_local_rank("replicate"), self.mesh["shard"]
        self.parameters = {name: nn.Parameter(self.place(weight)) for name, weight in case.weights().items()}
        options = {"lr": 0.01, "base": "sgd", "mesh": self.mesh} | dict(case.options)
        self.optimizer = FlexDeMo(self.parameters.items(), **options)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor on the ranks of a node; one without dimensions is whole on all of them."""
        if not tensor.ndim:
            return tensor.clone()
        return distribute_tensor(tensor, self.shards, [Shard(0)], src_data_rank=None)

    def set_gradients(self, step: int) -> None:
        gradients = self.case.gradients(step, self.node)
        for name, parameter in self.parameters.items():
            parameter.grad = self.place(gradients[name])

    def train(self, steps: Sequence[int] | None = None, *, agree: bool = True) -> None:
        """Steps; if ``agree``, the weights are equal on all nodes after each, bit for bit."""
        for step in range(self.case.num_steps) if steps is None else steps:
            self.set_gradients(step)
            self.optimizer.step()
            if agree:
                self.check_nodes_agree()

    def check_nodes_agree(self) -> None:
        """Collective over the nodes; every rank must call it."""
        for name, parameter in self.parameters.items():
            own = local(parameter.detach()).contiguous()
            of_nodes = [torch.empty_like(own) for _ in range(self.mesh.size(0))]
            dist.all_gather(of_nodes, own, group=self.mesh.get_group("replicate"))
            assert all(torch.equal(of_nodes[0], other) for other in of_nodes), f"{name} differs between nodes"

    def weights(self) -> dict[str, Tensor]:
        return wholes(self.parameters)

    def residuals(self) -> dict[str, Tensor]:
        """All nodes' residuals, (R, *shape)."""
        states = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return wholes({name: state["residual"] for name, state in states.items() if "residual" in state})


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unequal, f"not bit-equal: {unequal}"
