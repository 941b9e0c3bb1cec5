"""ZeRO-2: sums at owners; after a step whoever reads parameters waits for their new values, and for no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.compat.torch import default_store
from lightning_muon.sharding.shards import ShardMap, place_shards
from lightning_muon.sharding.zero2 import Bucket, Zero2Layout
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool
from tests.support.tensors import random_tensors

# The first two matrices have an owner; the others are divided by rows, some of fewer rows than ranks.
SHAPES = {str(shape): shape for shape in ((13, 7), (7, 13), (5,), (), (2, 3, 2), (0, 3), (1, 9))}
NUM_OWNED = 2


def _reduce(dtype: torch.dtype) -> Tensor:
    """Two buckets, read after both; returns what this rank holds of the parameter that all of them hold."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES.values()]
    owned = dict.fromkeys(parameters[:NUM_OWNED], 10)
    shard_map = ShardMap(mesh_of((dist.get_world_size(),)), place_shards(parameters, owned, dist.get_world_size()))
    of_ranks = [list(random_tensors(SHAPES, rank).values()) for rank in range(dist.get_world_size())]
    own = [gradient.to(dtype) for gradient in of_ranks[dist.get_rank()]]
    buckets = [Bucket(tuple(some), shard_map) for some in (parameters[:3], parameters[3:])]
    buckets[0].reduce(own[:3])
    buckets[1].reduce(own[3:])
    found = [reduced for bucket in buckets if bucket.advance(wait=True) for reduced in bucket.gradients(4.0)]
    for index, (parameter, reduced) in enumerate(zip(parameters, found, strict=True)):
        total = sum(gradients[index].to(dtype).float() for gradients in of_ranks)
        assert torch.equal(reduced, shard_map.local(parameter, total / 4.0))  # type: ignore[operator]
    return found[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_are_made_in_the_order_of_the_ranks_in_32_bits(gloo: ProcessPool, dtype: torch.dtype) -> None:
    first, *others = gloo.run(_reduce, dtype, world_size=3)
    assert all(torch.equal(first, other) for other in others)


class Run:
    """A training whose new values are still to come, and what they are: those of another one, which has waited."""

    def __init__(self) -> None:
        mesh = mesh_of((dist.get_world_size(),))
        self.training, self.twin = (Training.start("zero2", mesh, bucket_bytes=300) for _ in range(2))
        self.net, self.num_steps = self.training.net, 0
        layout: Any = self.training.mode.layout
        self.layout: Zero2Layout = layout

    def step(self) -> dict[str, Tensor]:
        for each in (self.training, self.twin):
            each.step(self.num_steps)
        self.num_steps += 1
        assert self.layout.travelling
        return self.twin.weights()

    def has(self, expected: dict[str, Tensor], prefix: str = "") -> bool:
        named = dict(self.net.named_parameters())
        return all(torch.equal(named[name], expected[name]) for name in named if name.startswith(prefix))


def _inner_modules() -> None:
    """A module inside a unit waits for its own parameters only."""
    run = Run()
    expected = run.step()
    for name in ("blocks.1.up", "tail.head"):
        run.net.get_submodule(name)(torch.ones(7))
        assert run.has(expected, name) and run.layout.travelling


def _state_dicts() -> None:
    """A state dict has the new values, and loaded ones stay."""
    run = Run()
    expected = run.step()
    state = run.net.state_dict()
    assert not run.layout.travelling and all(torch.equal(state[name], expected[name]) for name in expected)
    old = {name: value.clone() for name, value in state.items()}
    run.step()
    run.net.load_state_dict(old)
    assert not run.layout.travelling and run.has(old)
    run.twin.net.load_state_dict(old)
    expected = run.step()
    assert torch.equal(run.net.blocks[1].up.state_dict()["weight"], expected["blocks.1.up.weight"])  # type: ignore[union-attr,operator]


def _closed() -> None:
    """The end of a training takes what still arrives."""
    run = Run()
    expected = run.step()
    run.layout.close()
    assert not run.layout.travelling and run.has(expected)


def _old_backward() -> None:
    """A backward pass of a forward before the step is refused, although values arrive late."""
    run = Run()
    old_loss = run.net(torch.arange(11)[None]).sum()
    run.training.step(0)
    run.training.mode.finish_parameters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old_loss.backward()


def _broken_off() -> None:
    """A step that was broken off is an error."""
    run = Run()
    parameters = [each for each in run.net.parameters() if each.requires_grad]
    run.layout.begin_step(parameters[:4])
    with pytest.raises(RuntimeError, match="while a step updates them"):
        run.net(torch.arange(11)[None])
    with pytest.raises(RuntimeError, match="broken off"):
        run.layout.begin_step(parameters)


def _wait_alone() -> None:
    """Rank 0 reads all values while no other rank asks for any."""
    run = Run()
    expected = run.step()
    store = default_store()
    if dist.get_rank() == 0:
        run.training.mode.finish_parameters()
        store.set("rank 0 has read", "")
    store.wait(["rank 0 has read"])
    run.training.mode.finish_parameters()
    assert run.has(expected)


@pytest.mark.parametrize("steps", [_inner_modules, _state_dicts, _closed, _old_backward, _broken_off, _wait_alone])
def test_whoever_reads_parameters_gets_new_values(gloo: ProcessPool, steps: Callable[[], None]) -> None:
    gloo.run(steps, world_size=3 if steps is _state_dicts else 2)
