"""Parameters of odd shapes on R nodes of S ranks, whose gradients are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_muon import FlexDeMo
from tests.support.tensors import random_tensors, wholes

# Rows that do not divide, primes, fewer rows than ranks (empty shards), a stack, a convolution, one and no dimension.
SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (13, 7),
    "prime": (127, 13),
    "flat": (3, 70),
    "row": (1, 19),
    "stack": (3, 10, 6),
    "convolution": (6, 4, 3, 3),
    "small": (3, 4),
    "bias": (5,),
    "one": (1,),
    "scalar": (),
}
MATRICES = ("odd", "prime", "flat", "row", "stack", "convolution", "small")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all ranks do: steps with gradients drawn from (step, node), equal on the ranks of a node."""

    mesh_shape: tuple[int, int]
    options: Mapping[str, Any]
    num_steps: int = 3
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))

    @property
    def world_size(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]

    def weights(self) -> dict[str, Tensor]:
        return random_tensors(self.shapes, 0)

    def gradients(self, step: int, node: int) -> dict[str, Tensor]:
        return random_tensors(self.shapes, 100 * (step + 1) + node)


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
        check_equal({name: parameter.detach() for name, parameter in self.parameters.items()}, self.mesh)

    def weights(self) -> dict[str, Tensor]:
        return wholes(self.parameters)

    def residuals(self) -> dict[str, Tensor]:
        """All nodes' residuals, (R, *shape)."""
        states = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return wholes({name: state["residual"] for name, state in states.items() if "residual" in state})


def check_equal(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Collective over the nodes; every rank must call it."""
    group = mesh.get_group("replicate")
    shards = [local(tensor).flatten() for tensor in tensors.values()]
    of_nodes = [torch.empty_like(torch.cat(shards)) for _ in range(mesh.size(0))]
    dist.all_gather(of_nodes, torch.cat(shards), group=group)
    sizes = [shard.numel() for shard in shards]
    pieces = zip(tensors, *(flat.split(sizes) for flat in of_nodes), strict=True)
    differing = [name for name, first, *others in pieces if not all(torch.equal(first, other) for other in others)]
    assert not differing, f"differ between nodes: {differing}"


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=tolerance, check_dtype=False)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unequal, f"not bit-equal: {unequal}"
