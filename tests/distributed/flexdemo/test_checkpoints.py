"""State of FlexDeMo without Lightning: torch's checkpoints (DCP), other numbers of nodes, skipped steps."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, Random
from tests.distributed.flexdemo.setup import Case, Ranks, assert_equal, local
from tests.matrix.row import Row
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

STOP, END = 3, 5
REPLICATOR = DCTTopK(chunk_size=8, top_k=5)
SPARSE: dict[str, Any] = {"base": "sgd", "dense_below": 16, "bucket_bytes": 700, "replicator": REPLICATOR}


class Run(Ranks):
    """The odd model of the matrix, sharded by FSDP2 inside of each node, whose ranks see different data."""

    def __init__(self, mesh_shape: tuple[int, int], options: Mapping[str, Any]) -> None:
        self.mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.row = Row(ranks=self.mesh.size(), parts=("conv", "frozen", "unused", "tied"))
        self.model = self.row.make_model()
        for unit in (*self.model.blocks, self.model):
            fully_shard(unit, mesh=self.mesh["shard"])
        self.optimizer = FlexDeMo(self.model, lr=0.01, mesh=self.mesh, **(SPARSE | dict(options)))

    def set_gradients(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.row.loss(self.model, self.row.batch(step, 0, self.mesh.get_rank())).backward()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        self.model.reshard()
        return dict(self.model.named_parameters())

    def go_on(self, steps: Sequence[int]) -> dict[str, Tensor]:
        """Take steps; returns trained weights and their optimizer state on this node after them."""
        self.train(steps, agree=False)
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        found: dict[str, Tensor] = dict(trained)
        for name, parameter in trained.items():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return wholes(found)

    def state(self, options: StateDictOptions) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }


def _save(mesh_shape: tuple[int, int], options: dict[str, Any], how: str, path: str) -> tuple[dict[str, Tensor], ...]:
    """State when it was saved, and at the end of the run that went on."""
    run = Run(mesh_shape, options)
    saved = run.go_on(range(STOP))
    if how == "directory":
        dcp.save(run.state(StateDictOptions()), checkpoint_id=path)
    else:
        state = run.state(StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:  # Only this one gets it.
            torch.save(state, f"{path}/state.pt")
    return saved, run.go_on(range(STOP, END))


def _resume(mesh_shape: tuple[int, int], options: dict[str, Any], how: str, path: str) -> tuple[dict[str, Tensor], ...]:
    """State when it was loaded, and at the end."""
    run, chosen = Run(mesh_shape, options), StateDictOptions()
    run.train([7], agree=False)
    if how == "directory":
        state = run.state(chosen)
        dcp.load(state, checkpoint_id=path)
    else:
        chosen = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "broadcast")
        is_given = how != "broadcast" or dist.get_rank() == 0
        state = torch.load(f"{path}/state.pt") if is_given else {"model": {}, "optimizer": {}}
    set_model_state_dict(run.model, state["model"], options=chosen)
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=chosen)
    assert run.optimizer.num_exchanges == STOP
    return run.go_on(()), run.go_on(range(STOP, END))


@pytest.mark.parametrize(
    ("mesh_shape", "options", "how"),
    [
        ((2, 2), {}, "directory"),
        ((3, 1), {"replicator": DiLoCo(period=2), "base": "adamw"}, "directory"),
        ((2, 2), {"replicator": Random(rate=0.25)}, "whole"),
        ((2, 2), {"base": "adamw"}, "broadcast"),
    ],
    ids=str,
)
def test_a_run_that_is_loaded_goes_on_with_equal_bits(
    gloo: ProcessPool, tmp_path: Path, mesh_shape: tuple[int, int], options: dict[str, Any], how: str
) -> None:
    size = mesh_shape[0] * mesh_shape[1]
    before = gloo.run(_save, mesh_shape, options, how, str(tmp_path), world_size=size)
    after = gloo.run(_resume, mesh_shape, options, how, str(tmp_path), world_size=size)
    first, last, name = before[0][0], before[-1][0], "blocks.0.up.weight"
    residual = first.get(f"{name}.residual", [first[name], last[name]])
    assert not torch.equal(residual[0], residual[1]), "nodes that are equal show nothing"
    for (saved, end), (loaded, resumed_end) in zip(before, after, strict=True):
        assert_equal(loaded, saved)
        assert_equal(resumed_end, end)


def _saved_whole(case: Case) -> dict[str, Any]:
    ranks = Ranks(case)
    ranks.train(agree=False)
    state = ranks.optimizer.state_dict()
    return state | {"state": {number: wholes(entry) for number, entry in state["state"].items()}}


def _loaded(case: Case, state: dict[str, Any]) -> list[dict[str, Tensor]]:
    """State of each parameter on this node, and its weights; then it trains on."""
    ranks = Ranks(case)
    ranks.optimizer.load_state_dict(deepcopy(state))
    found = [
        wholes({**ranks.optimizer.state[parameter], "node_weights": parameter})
        for parameter in ranks.parameters.values()
    ]
    ranks.train(range(case.num_steps, 2 * case.num_steps), agree=False)
    assert ranks.optimizer.num_exchanges == 2 * case.num_steps
    if "replicator" not in case.options:
        ranks.check_nodes_agree()
    return found


# Nodes that average with the third and the sixth step.
LOCAL: dict[str, Any] = {"replicator": DiLoCo(period=3), "base": "muon", "compute_dtype": "float32", "lr": 0.05}


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({"dense_below": 16}, (4, 1), (2, 1)),
        ({"dense_below": 16}, (2, 1), (3, 1)),
        (LOCAL, (4, 1), (2, 2)),
        (LOCAL, (2, 2), (2, 1)),
    ],
    ids=str,
)
def test_another_number_of_nodes_goes_on_from_the_mean(
    gloo: ProcessPool, options: dict[str, Any], before: tuple[int, int], after: tuple[int, int]
) -> None:
    case = Case(mesh_shape=before, options=options, num_steps=4)
    state = gloo.run(_saved_whole, case, world_size=case.world_size)[0]
    case = replace(case, mesh_shape=after)
    for rank, found in enumerate(gloo.run(_loaded, case, state, world_size=case.world_size)):
        own = {"residual"} if options is not LOCAL else {"node_weights", "momentum_buffer"}
        for saved, loaded in zip(state["state"].values(), found, strict=True):
            for key in own & saved.keys():
                of_nodes, values = saved[key], loaded[key] if key != "residual" else loaded[key][rank // after[1]]
                assert of_nodes.shape[0] == before[0] and not torch.equal(of_nodes[0], of_nodes[1])
                is_kept = after[0] == before[0]
                expected = of_nodes[rank // after[1]] if is_kept else of_nodes.double().mean(0).to(values.dtype)
                torch.testing.assert_close(values, expected, rtol=0, atol=0 if is_kept else 1e-6)
            if "outer_momentum" in saved:
                assert torch.equal(loaded["outer_momentum"], saved["outer_momentum"])


def _skip(options: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights and residuals before and after a step with a NaN on one rank, at the end, and at that of an equal run."""
    case = Case(mesh_shape=(dist.get_world_size(), 1), options=options)
    ranks, undisturbed = Ranks(case), Ranks(case)
    ranks.train([0])
    before = ranks.weights(), ranks.residuals()
    ranks.set_gradients(5)
    grad = ranks.parameters["tall"].grad
    if dist.get_rank() == 1:
        local(grad).view(-1)[2] = torch.nan  # type: ignore[arg-type]
    ranks.optimizer.step()
    after = ranks.weights(), ranks.residuals()
    ranks.train([1, 2])
    undisturbed.train(range(3))
    return [before, after, (ranks.weights(), ranks.residuals()), (undisturbed.weights(), undisturbed.residuals())]


@pytest.mark.parametrize(("num_nodes", "options"), [(2, {}), (3, {"replicator": Random(rate=0.25)})], ids=str)
def test_a_skipped_step_leaves_no_trace(gloo: ProcessPool, num_nodes: int, options: dict[str, Any]) -> None:
    for before, after, end, undisturbed in gloo.run(_skip, SPARSE | options, world_size=num_nodes):
        for index in range(2):
            assert_equal(after[index], before[index])
            assert_equal(end[index], undisturbed[index])
