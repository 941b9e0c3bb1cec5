"""No rank waits for a connection that another rank does not open, whichever gradients a rank lacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon import DCTTopK, FlexDeMo, Full, ModeOptions, ParallelMuon, make_mode
from lightning_muon.comm.groups import axis_group
from tests.support import lazy_connections
from tests.support.lazy_connections import nccl_like_mesh
from tests.support.processes import ProcessPool, RanksFailedError

_NUM_LAYERS = 4


def _model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(24, 24) for _ in range(_NUM_LAYERS)])


def _loss(model: nn.ModuleList, *, skips: bool = False) -> Tensor:
    """Rank 1 may skip the layer that comes first in backward; its messages come later than those of rank 0."""
    x = torch.randn(8, next(model.parameters()).size(1))
    for layer in list(model)[: len(model) - (skips and dist.get_rank() == 1)]:
        x = layer(x)
    return x.square().mean()


def _train(name: str, shape: tuple[int, ...], first_skip: int) -> None:
    model, mesh = _model(), nccl_like_mesh(*shape)
    mode = make_mode(name, mesh, ModeOptions(bucket_bytes=3000))
    mode.prepare(model)
    optimizer = ParallelMuon(model, lr=1e-3)
    mode.attach(model, [optimizer])
    for step in range(3):
        _loss(model, skips=step >= first_skip).backward()
        mode.finish_gradients()
        optimizer.step()
        mode.end_step()
        mode.finish_parameters()
        optimizer.zero_grad()
    mode.close()


def _train_on_more_layers() -> None:
    """All ranks use both layers from the second step on, so that the bucket has another size than at first."""
    torch.manual_seed(0)
    model, mesh = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(2)]), nccl_like_mesh(2)
    mode = make_mode("ddp", mesh, ModeOptions())
    mode.prepare(model)
    optimizer = ParallelMuon(model, lr=1e-3)
    mode.attach(model, [optimizer])
    for num_layers in (1, 2, 1 if dist.get_rank() == 1 else 2):
        _loss(model[:num_layers]).backward()  # type: ignore[arg-type]
        mode.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    mode.close()


def _train_decoupled_nodes(replicator: Any) -> None:
    """Nodes send each other messages, or sum values on the way."""
    model, mesh = _model(), nccl_like_mesh(dist.get_world_size(), 1)
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = FlexDeMo(model, lr=1e-3, mesh=mesh, replicator=replicator, bucket_bytes=3000)
    optimizer.step()  # Makes the plan; without a gradient nothing is sent.
    for step in range(3):
        _loss(model, skips=step == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()


def _train_hybrid() -> None:
    """Messages inside of replicas and over all ranks, which not all ranks have for each other."""
    model, mesh = _model(), nccl_like_mesh(2, 2)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = ParallelMuon(model, lr=1e-3, dedupe="always", bucket_bytes=1000)
    for _ in range(3):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


_CASES = [
    *((_train, ("zero2", (3,), first_skip), 3) for first_skip in (0, 1)),
    *((_train, ("zero2", (2, 2), first_skip), 4) for first_skip in (0, 1)),
    *((_train, ("ddp", (2,), first_skip), 2) for first_skip in (0, 1)),
    (_train_on_more_layers, (), 2),
    *((_train_decoupled_nodes, (replicator,), 3) for replicator in (DCTTopK(top_k=8), Full())),
    (_train_hybrid, (), 4),
]


@pytest.mark.parametrize(("train", "arguments", "world_size"), _CASES, ids=lambda each: getattr(each, "__name__", None))
def test_no_rank_waits_for_a_connection_for_ever(
    gloo: ProcessPool, train: Callable[..., None], arguments: tuple[Any, ...], world_size: int
) -> None:
    gloo.run(train, *arguments, world_size=world_size)


def _blocks_alone() -> None:
    """The backend of these tests: what one rank sends first waits for the other."""
    axes = axis_group(nccl_like_mesh(2), (0,))
    lazy_connections.SECONDS = 1.0
    dist.all_reduce(torch.ones(1), group=axes.group)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1000), group=axes.group)


def test_the_backend_of_these_tests_blocks_at_first_use(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError, match="waits for ever for the connection 'allreduce 6'"):
        gloo.run_fresh(_blocks_alone, world_size=2)
