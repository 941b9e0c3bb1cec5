"""After a step of ZeRO-2 whoever reads parameters waits for their new values, and for no others."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.compat.torch import default_store
from lightning_muon.sharding.zero2 import Zero2Layout
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool

TOKENS = torch.arange(11)[None]


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


def _copies() -> None:
    """Copies of the model, and hooks that were removed, wait for nothing."""
    run = Run()
    copies = [copy.deepcopy(run.net), pickle.loads(pickle.dumps(run.net))]
    expected = run.step()
    number = len(run.layout.travelling)
    for other in copies:
        other(TOKENS)
        other.state_dict()
        assert len(run.layout.travelling) == number
    run.layout.close()
    assert not run.layout.travelling and run.has(expected), "what still arrives is taken"


def _compiled() -> None:
    """A compiled model waits in every step, and is compiled once."""
    run = Run()
    num_graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        num_graphs[-1] += 1
        return graph

    compiled = torch.compile(run.net, backend=backend)
    for _ in range(3):
        expected = run.step()
        num_graphs.append(0)
        logits = compiled(TOKENS)
        assert run.has(expected, "blocks") and torch.equal(logits, run.net(TOKENS))
    assert num_graphs[0] > 0 and num_graphs[1:] == [0, 0]


def _old_backward() -> None:
    """A backward pass of a forward before the step is refused, although values arrive late."""
    run = Run()
    old_loss = run.net(TOKENS).sum()
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
        run.net(TOKENS)
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


@pytest.mark.parametrize(
    "steps", [_inner_modules, _state_dicts, _copies, _compiled, _old_backward, _broken_off, _wait_alone]
)
def test_whoever_reads_parameters_gets_new_values(gloo: ProcessPool, steps: Callable[[], None]) -> None:
    gloo.run(steps, world_size=3 if steps is _state_dicts else 2)
