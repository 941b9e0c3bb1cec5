"""ParallelMuon on weights that tensor parallelism and FSDP2 divide together, against full matrices in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_muon import ParallelMuon
from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.params.layout import local_tensor
from tests.matrix.row import EXACT
from tests.reference.muon import ReferenceMuon
from tests.support.processes import ProcessPool

LR, NUM_STEPS = 0.02, 3
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


def _train_odd(sizes: Mapping[str, int], options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """This rank's parts, and the same parts of what full matrices give."""
    meshes = MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    parameters = _place(_tensors(0), meshes)
    optimizer = ParallelMuon(parameters.items(), lr=LR, algorithm="muon", bucket_bytes=300, **options)
    reference = ReferenceMuon(_tensors(0), lr=LR)
    for step in range(NUM_STEPS):
        for name, grad in _place(_tensors(1 + step), meshes).items():
            parameters[name].grad = grad.detach()
        optimizer.step()
        reference.step(_tensors(1 + step))
    return [
        {name: local_tensor(tensor.detach()) for name, tensor in each.items()}
        for each in (parameters, _place(reference.matrices, meshes))
    ]


@pytest.mark.parametrize("dedupe", ["never", "always"])
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (3, {"tensor_size": 3}),
        (4, {"shard_size": 2, "tensor_size": 2}),
        (4, {"replicate_size": 2, "tensor_size": 2}),
        (4, {"context_size": 2, "tensor_size": 2}),
    ],
)
def test_odd_matrices_divided_twice_are_stepped_as_wholes(
    gloo: ProcessPool, world_size: int, sizes: dict[str, int], dedupe: str
) -> None:
    for found, expected in gloo.run(_train_odd, sizes, EXACT | {"dedupe": dedupe}, world_size=world_size):
        for name, part in expected.items():
            # The same arithmetic on the whole matrix; only the order of foreach kernels differs.
            torch.testing.assert_close(found[name], part, rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
