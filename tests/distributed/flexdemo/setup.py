"""Parameters of odd shapes on R nodes of S ranks, whose gradients are drawn, and the same in the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_muon import FlexDeMo
from tests.reference.flexdemo import ReferenceFlexDeMo, Rules
from tests.support.tensors import wholes

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
    """What all ranks do: steps with gradients drawn from (seed, step, node), equal on the ranks of a node."""

    mesh_shape: tuple[int, int]
    options: Mapping[str, Any]
    num_steps: int = 3
    seed: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    # Node -> names of the weights without a gradient on it, from a step on.
    missing: Mapping[int, Sequence[str]] = field(default_factory=dict)
    missing_from: int = 0
    frozen: Sequence[str] = ()
    dtype: torch.dtype = torch.float32
    plain: bool = False  # Weights are plain tensors, for S = 1.

    @property
    def world_size(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]

    def weights(self) -> dict[str, Tensor]:
        return self._draw(10**6 * self.seed)

    def gradients(self, step: int, node: int) -> dict[str, Tensor]:
        """Gradients of a node; what is missing on it is left out."""
        drawn = self._draw(10**6 * self.seed + 100 * (step + 1) + node)
        missing = self.missing.get(node, ()) if step >= self.missing_from else ()
        return {name: gradient for name, gradient in drawn.items() if name not in (*missing, *self.frozen)}

    def _draw(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(s, generator=generator).to(self.dtype) for name, s in self.shapes.items()}


class Ranks:
    """The calling rank's parameters and optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.node, self.shards = self.mesh.get_local_rank("replicate"), self.mesh["shard"]
        self.parameters = {name: nn.Parameter(self.place(weight)) for name, weight in case.weights().items()}
        for name in case.frozen:
            self.parameters[name].requires_grad_(False)
        options = {"lr": 0.01, "mesh": self.mesh} | dict(case.options)
        self.optimizer = FlexDeMo(self.parameters.items(), **options)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor on the ranks of a node; one without dimensions is whole on all of them."""
        if self.case.plain or not tensor.ndim:
            return tensor.clone()
        return distribute_tensor(tensor, self.shards, [Shard(0)], src_data_rank=None)

    def set_gradients(self, step: int) -> None:
        gradients = self.case.gradients(step, self.node)
        for name, parameter in self.parameters.items():
            parameter.grad = self.place(gradients[name]) if name in gradients else None

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


def train(case: Case, kind: type[Ranks] = Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and residuals after all steps."""
    ranks = kind(case)
    ranks.train()
    return ranks.weights(), ranks.residuals()


def reference(case: Case, rules: Rules, **options: Any) -> ReferenceFlexDeMo:
    """The reference after the steps of ``case``."""
    replicated = [name for name, shape in case.shapes.items() if not shape]
    found = ReferenceFlexDeMo(case.weights(), rules, replicated=replicated, **options)
    for step in range(case.num_steps):
        found.step([case.gradients(step, node) for node in range(case.mesh_shape[0])])
    return found


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=tolerance, check_dtype=False)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not unequal, f"not bit-equal: {unequal}"


def assert_mostly_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, *, bound: float
) -> None:
    """All elements within ``bound``, and 95 % of them within ``tolerance``."""
    assert_close(found, expected, bound)
    off = [(found[name].double() - expected[name].double()).abs().flatten() > tolerance for name in expected]
    share = float(torch.cat(off).double().mean())
    assert share <= 0.05, f"{share:.1%} of the elements are off by more than {tolerance}"
