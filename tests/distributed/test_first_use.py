"""No rank waits for a connection that another rank does not open, whichever gradients a rank lacks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon import DCTTopK, FlexDeMo, Full, ModeOptions, ParallelMuon, make_mode
from tests.support.lazy_connections import nccl_like_mesh
from tests.support.processes import ProcessPool


class _Layers(nn.Sequential):
    def forward(self, x: Tensor, num_layers: int) -> Tensor:
        for layer in list(self)[:num_layers]:
            x = layer(x)
        return x


def _model(num_layers: int = 4, width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return _Layers(*(nn.Linear(width, width) for _ in range(num_layers)))


def _loss(model: nn.Sequential, num_layers: Sequence[int] = (4, 4)) -> Tensor:
    """Rank 1 may run fewer layers than the others: its messages come later."""
    x = torch.randn(8, model[0].in_features)
    return model(x, num_layers[dist.get_rank() == 1]).square().mean()


def _train(
    name: str,
    shape: tuple[int, ...],
    steps: Sequence[Sequence[int]],
    width: int,
    dedupe: Literal["auto", "always"] = "auto",
    **options: Any,
) -> None:
    model, mesh = _model(max(map(max, steps)), width), nccl_like_mesh(*shape)
    mode = make_mode(name, mesh, ModeOptions(**options))
    mode.prepare(model)
    optimizer = ParallelMuon(model, lr=1e-3, bucket_bytes=1000, dedupe=dedupe)
    mode.attach(model, [optimizer])
    for num_layers in steps:
        _loss(model, num_layers).backward()
        mode.finish_gradients()
        optimizer.step()
        mode.finish_parameters()
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
        _loss(model, (4, 4 - (step == 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()


# Layers that rank 1 leaves out from the first step on, or later.
_SKIPS = [(4, 3)] * 3, [(4, 4), (4, 3), (4, 3)]
_CASES = [
    *(
        (_train, (name, shape, steps, 24), {"bucket_bytes": 3000}, math.prod(shape))
        for name, shape in (("zero2", (3,)), ("zero2", (2, 2)), ("ddp", (2,)))
        for steps in _SKIPS
    ),
    # All ranks use both layers from the second step on, so that the bucket has another size than at first.
    (_train, ("ddp", (2,), [(1, 1), (2, 2), (2, 1)], 512), {}, 2),
    *((_train_decoupled_nodes, (replicator,), {}, 3) for replicator in (DCTTopK(top_k=8), Full())),
    # Messages inside of replicas and over all ranks, which not all ranks have for each other.
    (_train, ("fsdp", (2, 2), [(4, 4)] * 3, 24), {"dedupe": "always"}, 4),
]


@pytest.mark.parametrize(("train", "arguments", "options", "world_size"), _CASES)
def test_no_rank_waits_for_a_connection_for_ever(
    gloo: ProcessPool, train: Callable[..., None], arguments: Any, options: Any, world_size: int
) -> None:
    gloo.run(train, *arguments, **options, world_size=world_size)
