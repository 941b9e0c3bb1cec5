"""ParallelMuon on weights that tensor parallelism and FSDP2 divide together, against full matrices in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon import ParallelMuon
from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from tests.distributed.sharding.models import attach_fsdp
from tests.reference.muon import ReferenceMuon
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

LR, NUM_STEPS = 0.02, 3
FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}
MESHES = [
    (2, {"tensor_size": 2}),
    (4, {"shard_size": 2, "tensor_size": 2}),
    (4, {"replicate_size": 2, "tensor_size": 2}),
    (4, {"context_size": 2, "tensor_size": 2}),
]
# Name -> shape and the dimension that tensor parallelism cuts; FSDP2 cuts dimension 0.
SHAPES = {
    "tall": ((13, 7), 0),
    "wide": ((7, 13), 0),
    "tall_columns": ((13, 7), 1),
    "wide_columns": ((7, 13), 1),
    "few_rows": ((3, 5), 0),
    "one_row": ((1, 6), 0),
    "stack": ((3, 5, 4), 0),
    "stack_rows": ((3, 5, 4), 1),
}


def _make(sizes: Mapping[str, int]) -> Meshes:
    return MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}


def _place(tensors: Mapping[str, Tensor], meshes: Meshes) -> dict[str, nn.Parameter]:
    """Laid out as torch does it: divided by tensor parallelism first, then by FSDP2."""
    holder = nn.Module()
    assert meshes.tensor is not None
    for name, tensor in tensors.items():
        placed = distribute_tensor(tensor, meshes.tensor, [Shard(SHAPES[name][1])])
        holder.register_parameter(name, nn.Parameter(placed))
    fully_shard(holder, mesh=meshes.data)
    return dict(holder.named_parameters())


def _local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to_local() for name, tensor in tensors.items()}  # type: ignore[attr-defined]


def _train_odd(sizes: Mapping[str, int], options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's parts, and the same parts of what full matrices give."""
    meshes = _make(sizes)
    parameters = _place(_tensors(0), meshes)
    optimizer = ParallelMuon(parameters.items(), lr=LR, algorithm="muon", chunk_bytes=300, **FLOAT32, **options)
    reference = ReferenceMuon(_tensors(0), lr=LR)
    for step in range(NUM_STEPS):
        for name, grad in _place(_tensors(1 + step), meshes).items():
            parameters[name].grad = grad.detach()
        optimizer.step()
        reference.step(_tensors(1 + step))
    return _local(parameters), _local(_place(reference.matrices, meshes))


@pytest.mark.parametrize("dedupe", ["never", "always"])
@pytest.mark.parametrize(("world_size", "sizes"), [*MESHES, (3, {"tensor_size": 3}), (4, {"tensor_size": 4})])
def test_odd_matrices_divided_twice_are_stepped_as_wholes(
    gloo: ProcessPool, world_size: int, sizes: dict[str, int], dedupe: str
) -> None:
    for found, expected in gloo.run(_train_odd, sizes, {"dedupe": dedupe}, world_size=world_size):
        for name, part in expected.items():
            # The same arithmetic on the whole matrix; only the order of foreach kernels differs.
            torch.testing.assert_close(found[name], part, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


class Net(nn.Module):
    """Each tensor rank has 7 rows or columns of the plan's layers, which two shards divide unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 7, bias=False)
        self.head = nn.Linear(7, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.middle(self.norm(x + self.down(torch.tanh(self.up(x)))))
        return nn.functional.cross_entropy((self.head(x) * self.scale).flatten(0, 1), tokens.flatten())


MATRICES = ("up.weight", "down.weight", "middle.weight")


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(11, (4, 6), generator=generator) for _ in range(NUM_STEPS)]


def _train(sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], list[str]]:
    meshes = _make(sizes)
    torch.manual_seed(dist.get_rank())
    model = Net()
    parallelize_module(model, meshes.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mode = attach_fsdp(model, meshes.data)
    optimizer = ParallelMuon(model, lr=LR, **FLOAT32)
    for batch in _batches():
        optimizer.zero_grad()
        model(batch.chunk(meshes.num_data_ranks)[meshes.data_rank]).backward()
        mode.finish_gradients()
        optimizer.step()
    kinds = [str(placement) for placement in model.up.weight.placements]  # type: ignore[attr-defined]
    return weights_of(model), kinds


def _reference() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    group = ParallelMuon(model, lr=LR).defaults
    optimizer = MuonAndAdamW(model, MATRICES, lr=LR, weight_decay=group["weight_decay"], betas=group["betas"], eps=1e-8)
    for batch in _batches():
        model.zero_grad()
        model(batch).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize(("world_size", "sizes"), MESHES)
def test_a_parallelized_model_trains_like_one_process(
    gloo: ProcessPool, world_size: int, sizes: dict[str, int]
) -> None:
    expected = _reference()
    results = gloo.run(_train, sizes, world_size=world_size)
    for weights, kinds in results:
        assert "S(0, 2)" in kinds or "_S(0, 2)" in kinds  # Divided twice along dimension 0: a strided shard.
        for name, weight in expected.items():
            # Partial sums over tensor ranks and means over data ranks are added in another order: a few ulp of the
            # gradient, which Newton-Schulz and the first steps of AdamW amplify.
            torch.testing.assert_close(
                weights[name], weight, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
            # What the plan leaves out is stepped on each tensor rank by itself, and stays equal.
            assert torch.equal(weights[name], results[0][0][name])
