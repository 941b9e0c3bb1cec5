"""Checkpoints of torch (DCP) without Lightning: residuals of every node, other numbers of ranks, whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
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
from tests.distributed.flexdemo.models import Plan
from tests.distributed.flexdemo.setup import assert_equal, full
from tests.support.processes import ProcessPool

STOP, END = 3, 5
SPARSE: dict[str, Any] = {"dense_below": 16, "chunk_bytes": 700, "replicator": DCTTopK(chunk_size=8, top_k=5)}


class Run:
    """A model of FSDP2 whose ranks of all nodes see data of their own, and FlexDeMo."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.plan = plan
        self.mesh = init_device_mesh("cpu", plan.mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.node = self.mesh.get_local_rank("replicate")
        # One row for more ranks, rows that do not divide.
        self.model = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 1))
        fully_shard(self.model[0], mesh=self.mesh["shard"])
        fully_shard(self.model, mesh=self.mesh["shard"])
        self.optimizer = FlexDeMo(self.model, **({"lr": 0.01, "mesh": self.mesh} | SPARSE | dict(plan.options)))

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            seed = 100 * step + 10 * self.node + self.mesh.get_local_rank("shard")
            data = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            self.model(data).square().mean().backward()
            self.optimizer.step()
        self.model.reshard()  # type: ignore[operator]

    def everything(self) -> dict[str, Tensor]:
        """Weights and optimizer state of this node, as they are now."""
        self.model.reshard()  # type: ignore[operator]
        found = {name: full(parameter.detach()).clone() for name, parameter in self.model.named_parameters()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{names[parameter]}.{key}": full(value).clone() for key, value in state.items()}  # type: ignore[index]
        return found

    def state(self, **options: bool) -> dict[str, Any]:
        chosen = StateDictOptions(**options)
        return {
            "model": get_model_state_dict(self.model, options=chosen),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=chosen),
        }

    def set_state(self, state: dict[str, Any], **options: bool) -> None:
        chosen = StateDictOptions(**options)
        set_model_state_dict(self.model, state["model"], options=chosen)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=chosen)


Results = list[tuple[dict[str, Tensor], dict[str, Tensor]]]


def _save(plan: Plan, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State when it was saved, and at the end of the run that went on."""
    run = Run(plan)
    run.train(range(STOP))
    dcp.save(run.state(), checkpoint_id=path)
    saved = run.everything()
    run.train(range(STOP, END))
    return saved, run.everything()


def _resume(plan: Plan, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State when it was loaded, and at the end."""
    run = Run(plan, seed=1)
    run.train([7])
    state = run.state()
    dcp.load(state, checkpoint_id=path)
    run.set_state(state)
    assert run.optimizer.num_exchanges == STOP
    loaded = run.everything()
    run.train(range(STOP, END))
    return loaded, run.everything()


def _residuals(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith(".residual")}


def _assert_nodes_differ(state: Mapping[str, Tensor]) -> None:
    """No test of residuals means anything where they are zero or equal."""
    of_weights = {name: value for name, value in _residuals(state).items() if value.ndim == 3 and value.numel() > 90}
    assert len(of_weights) == 2
    for value in of_weights.values():
        assert not torch.equal(value[0], value[1])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"base": "adamw", "weight_decay": 0.1},
    {"base": "muon", "compute_dtype": "float32", "wire_dtype": "float32"},
    {"delay": 1},
    {"replicator": Random(rate=0.25), "value_format": "int8"},
    {"replicator": DiLoCo(period=2), "base": "adamw"},
    {"replicator": DiLoCo(period=2, overlap=True)},
]


@pytest.mark.parametrize(("mesh_shape", "options"), list(zip(cycle([(2, 2), (3, 1)]), OPTIONS, strict=False)), ids=str)
def test_a_run_that_is_loaded_from_disk_goes_on_with_equal_bits(
    gloo: ProcessPool, tmp_path: Path, mesh_shape: tuple[int, int], options: dict[str, Any]
) -> None:
    plan = Plan(mesh_shape=mesh_shape, options=options)
    before: Results = gloo.run(_save, plan, str(tmp_path), world_size=plan.world_size)
    after: Results = gloo.run(_resume, plan, str(tmp_path), world_size=plan.world_size)
    is_alone = isinstance(options.get("replicator"), DiLoCo)
    if is_alone:
        assert not torch.equal(before[0][0]["0.weight"], before[-1][0]["0.weight"])
    else:
        _assert_nodes_differ(before[0][0])
    for (saved, end), (loaded, resumed_end) in zip(before, after, strict=True):
        assert_equal(loaded if is_alone else _residuals(loaded), saved if is_alone else _residuals(saved))
        assert_equal(resumed_end, end)


def _save_whole(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    run = Run(plan)
    run.train(range(STOP))
    # Only rank 0 gets it. What is whole anyway shares memory with the optimizer.
    state = deepcopy(run.state(full_state_dict=True, cpu_offload=True))
    saved = run.everything()
    run.train(range(STOP, END))
    return state, saved, run.everything()


def _resume_whole(plan: Plan, state: dict[str, Any], broadcast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = Run(plan, seed=1)
    state = deepcopy(state)
    if broadcast and torch.distributed.get_rank():
        state = {"model": {}, "optimizer": {}}
    run.set_state(state, full_state_dict=True, broadcast_from_rank0=broadcast)
    loaded = run.everything()
    run.train(range(STOP, END))
    return loaded, run.everything()


@pytest.mark.parametrize(("options", "broadcast"), [({"base": "adamw"}, False), ({"delay": 1}, True)], ids=str)
def test_whole_tensors_have_one_entry_for_each_node(
    gloo: ProcessPool, options: dict[str, Any], broadcast: bool
) -> None:
    plan = Plan(mesh_shape=(2, 2), options=options)
    results = gloo.run(_save_whole, plan, world_size=4)
    state, saved, _ = results[0]
    _assert_nodes_differ(saved)
    for name, residual in _residuals(saved).items():
        assert torch.equal(state["optimizer"]["state"][name.removesuffix(".residual")]["residual"], residual)
    loaded = gloo.run(_resume_whole, plan, state, broadcast, world_size=4)
    for (_, saved, end), (found, resumed_end) in zip(results, loaded, strict=True):
        assert_equal(found, saved)
        assert_equal(resumed_end, end)


# With broadcast_from_rank0 torch itself takes the sizes of now for those of the checkpoint, and fails on some ranks.
@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 1)), ((2, 1), (3, 1))], ids=str)
def test_whole_tensors_of_other_nodes_are_never_mixed_up(
    gloo: ProcessPool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    state, saved, _ = gloo.run(_save_whole, Plan(mesh_shape=before), world_size=before[0])[0]
    loaded = gloo.run(_resume_whole, Plan(mesh_shape=after), state, False, world_size=after[0])
    for found, _ in loaded:
        for name, residual in _residuals(saved).items():
            share = residual.double().sum(0) / after[0]
            torch.testing.assert_close(found[name].double(), share.expand(found[name].shape), rtol=0, atol=1e-6)
