"""ParallelMuon on weights that tensor parallelism and FSDP2 divide together, against full matrices in one process."""

from collections.abc import Mapping

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
from tests.support.tensors import random_tensors

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


def _place(tensors: Mapping[str, Tensor], meshes: Meshes) -> dict[str, nn.Parameter]:
    """Laid out as torch does it: divided by tensor parallelism first, then by FSDP2."""
    holder = nn.Module()
    assert meshes.tensor is not None
    for name, tensor in tensors.items():
        placed = distribute_tensor(tensor, meshes.tensor, [Shard(SHAPES[name][1])])
        holder.register_parameter(name, nn.Parameter(placed))
    fully_shard(holder, mesh=meshes.data)
    return dict(holder.named_parameters())


def _train_odd(sizes: Mapping[str, int], dedupe: str) -> None:
    """This rank's parts must be those of what full matrices give."""
    meshes = MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    start, *gradients = (
        random_tensors({name: shape for name, (shape, _) in SHAPES.items()}, seed) for seed in range(4)
    )
    parameters, reference = _place(start, meshes), ReferenceMuon(start, lr=0.02)
    optimizer = ParallelMuon(parameters.items(), lr=0.02, algorithm="muon", bucket_bytes=300, dedupe=dedupe, **EXACT)
    for grads in gradients:
        for name, grad in _place(grads, meshes).items():
            parameters[name].grad = grad.detach()
        optimizer.step()
        reference.step(grads)
    for name, part in _place(reference.matrices, meshes).items():
        # The same arithmetic on the whole matrix; only the order of foreach kernels differs.
        torch.testing.assert_close(
            local_tensor(parameters[name]),
            local_tensor(part),
            rtol=0,
            atol=1e-6,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("dedupe", ["never", "always"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_size": 3},
        {"shard_size": 2, "tensor_size": 2},
        {"replicate_size": 2, "tensor_size": 2},
        {"context_size": 2, "tensor_size": 2},
    ],
    ids=str,
)
def test_odd_matrices_divided_twice_are_stepped_as_wholes(
    gloo: ProcessPool, sizes: dict[str, int], dedupe: str
) -> None:
    gloo.run(_train_odd, sizes, dedupe, world_size=3 if len(sizes) == 1 else 4)
