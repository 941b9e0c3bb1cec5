"""Training with sequences divided over context ranks, against one process with whole sequences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_muon import ParallelMuon
from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence
from tests.distributed.sharding.models import attach_fsdp, full
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

LR, NUM_STEPS, NUM_TOKENS, WIDTH = 0.02, 3, 11, 6
MATRICES = ("query.weight", "key_value.weight", "out.weight")
ADAM: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


class Attention(nn.Module):
    """Causal attention over the whole sequence for this rank's positions; keys and values are gathered."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.query = nn.Linear(WIDTH, 5)
        self.key_value = nn.Linear(WIDTH, 10, bias=False)
        self.out = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch["positions"]
        x = self.tokens(batch["tokens"]) + self.places(positions)
        keys, values = gather_sequence(self.key_value(x), self.mesh).chunk(2, -1)
        scores = self.query(x) @ keys.mT
        future = torch.arange(keys.shape[1]) > positions[..., None]
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
        logits = self.head(x + torch.tanh(self.out(mixed))) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(NUM_TOKENS, (4, 13), generator=generator) for _ in range(NUM_STEPS)]
    positions = torch.arange(12).expand(4, -1)
    return [{"tokens": each[:, :-1], "targets": each[:, 1:], "positions": positions} for each in drawn]


def _my_part(batch: dict[str, Tensor], meshes: Meshes) -> dict[str, Tensor]:
    samples = {key: value.chunk(meshes.num_data_ranks)[meshes.data_rank] for key, value in batch.items()}
    return split_sequence(samples, meshes.user["context"])


def _train(sizes: dict[str, int]) -> dict[str, Tensor]:
    meshes = MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    torch.manual_seed(dist.get_rank())
    model = Attention(meshes.user["context"])
    mode = attach_fsdp(model, meshes.data)
    options: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32", "adamw_eps": ADAM["eps"]}
    optimizer = ParallelMuon(model, lr=LR, weight_decay=0.1, betas=ADAM["betas"], **options)
    for batch in _batches():
        optimizer.zero_grad()
        model(_my_part(batch, meshes)).backward()
        mode.finish_gradients()
        optimizer.step()
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}  # type: ignore[misc]


def _reference() -> dict[str, Tensor]:
    """One process with whole batches: Muon of the full matrices, and torch's AdamW for the rest."""
    torch.manual_seed(0)
    model = Attention(None)
    optimizer = MuonAndAdamW(model, MATRICES, **ADAM)
    for batch in _batches():
        model.zero_grad()
        model(batch).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "sizes"), [(4, {"replicate_size": 2, "context_size": 2}), (3, {"context_size": 3})]
)
def test_divided_sequences_train_like_whole_ones(gloo: ProcessPool, world_size: int, sizes: dict[str, int]) -> None:
    expected = _reference()
    for result in gloo.run(_train, sizes, world_size=world_size):
        assert result.keys() == expected.keys()
        for name, weight in expected.items():
            # Means of parts are added in another order than the mean of the whole: a few ulp of the gradient, which
            # Newton-Schulz and the first steps of AdamW amplify.
            torch.testing.assert_close(result[name], weight, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def _gather(dim: int, dtype: torch.dtype) -> list[Tensor]:
    """The whole, and the gradient of this rank's part for a loss that weighs elements differently on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    whole = torch.arange(24 * mesh.size(), dtype=dtype).view(2, 3 * mesh.size(), 4).transpose(1, dim)
    part = split_sequence(whole, mesh, dim=dim).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    gathered = gather_sequence(part, mesh, dim)
    (gathered * whole * (mesh.get_local_rank() + 1)).sum().backward()
    assert part.grad is not None
    return [gathered.detach(), part.grad, whole]


@pytest.mark.parametrize(
    ("world_size", "dtype", "dim"), [(1, torch.float32, 1), (3, torch.float32, 1), (3, torch.bfloat16, 2)]
)
def test_gathering_gives_the_whole_and_its_backward_the_sum(
    gloo: ProcessPool, world_size: int, dim: int, dtype: torch.dtype
) -> None:
    for rank, (gathered, grad, whole) in enumerate(gloo.run(_gather, dim, dtype, world_size=world_size)):
        assert torch.equal(gathered, whole)
        # Small whole numbers: exact in float32, and one rounding of each product and of the sum in bfloat16.
        expected = (sum(range(1, world_size + 1)) * whole).chunk(world_size, dim)[rank]
        torch.testing.assert_close(grad, expected, rtol=0 if dtype == torch.float32 else 2**-6, atol=0)
