"""State of FlexDeMo: checkpoints of torch (DCP), resumed runs, other numbers of nodes, lost state, skipped steps."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, Random
from tests.distributed.flexdemo.models import ShardedNet
from tests.distributed.flexdemo.setup import Case, Ranks, assert_close, assert_equal, local
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

STOP, END = 3, 5
SPARSE: dict[str, Any] = {"dense_below": 16, "bucket_bytes": 700, "replicator": DCTTopK(chunk_size=8, top_k=5)}


class Run(ShardedNet):
    """With its state as torch saves it."""

    def __init__(self, mesh_shape: tuple[int, int], options: Mapping[str, Any]) -> None:
        super().__init__(mesh_shape, SPARSE | dict(options))

    def go_on(self, steps: Sequence[int]) -> dict[str, Tensor]:
        """Take steps; returns trained weights and their optimizer state on this node after them."""
        self.train(steps, agree=False)
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        found: dict[str, Tensor] = dict(trained)
        for name, parameter in trained.items():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return wholes(found)

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


def _save(mesh_shape: tuple[int, int], options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], ...]:
    """State when it was saved, and at the end of the run that went on."""
    run = Run(mesh_shape, options)
    saved = run.go_on(range(STOP))
    dcp.save(run.state(), checkpoint_id=path)
    return saved, run.go_on(range(STOP, END))


def _resume(mesh_shape: tuple[int, int], options: dict[str, Any], path: str) -> tuple[dict[str, Tensor], ...]:
    """State when it was loaded, and at the end."""
    run = Run(mesh_shape, options)
    run.train([7], agree=False)
    state = run.state()
    dcp.load(state, checkpoint_id=path)
    run.set_state(state)
    assert run.optimizer.num_exchanges == STOP
    return run.go_on(()), run.go_on(range(STOP, END))


def _residuals(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith(".residual")}


def _assert_nodes_differ(state: Mapping[str, Tensor]) -> None:
    """No test of residuals means anything where they are zero or equal."""
    for name in ("blocks.0.up.weight", "tail.qkv.weight"):
        residual = state[f"{name}.residual"]
        assert not torch.equal(residual[0], residual[1])


OPTIONS: list[dict[str, Any]] = [
    {},
    {"base": "adamw", "weight_decay": 0.1},
    {"base": "muon", "compute_dtype": "float32", "wire_dtype": "float32"},
    {"replicator": Random(rate=0.25)},
    {"replicator": DiLoCo(period=2), "base": "adamw"},
    {"replicator": DiLoCo(period=2)},
]


@pytest.mark.parametrize(("mesh_shape", "options"), list(zip(cycle([(2, 2), (3, 1)]), OPTIONS, strict=False)), ids=str)
def test_a_run_that_is_loaded_from_disk_goes_on_with_equal_bits(
    gloo: ProcessPool, tmp_path: Path, mesh_shape: tuple[int, int], options: dict[str, Any]
) -> None:
    size = mesh_shape[0] * mesh_shape[1]
    before = gloo.run(_save, mesh_shape, options, str(tmp_path), world_size=size)
    after = gloo.run(_resume, mesh_shape, options, str(tmp_path), world_size=size)
    is_alone = isinstance(options.get("replicator"), DiLoCo)
    if is_alone:
        assert not torch.equal(before[0][0]["blocks.0.up.weight"], before[-1][0]["blocks.0.up.weight"])
    else:
        _assert_nodes_differ(before[0][0])
    for (saved, end), (loaded, resumed_end) in zip(before, after, strict=True):
        assert_equal(loaded, saved)
        assert_equal(resumed_end, end)


def _save_whole(mesh_shape: tuple[int, int], options: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    run = Run(mesh_shape, options)
    saved = run.go_on(range(STOP))
    # Only rank 0 gets it. What is whole anyway shares memory with the optimizer.
    state = deepcopy(run.state(full_state_dict=True, cpu_offload=True))
    return state, saved, run.go_on(range(STOP, END))


def _resume_whole(
    mesh_shape: tuple[int, int], options: dict[str, Any], state: dict[str, Any], broadcast: bool
) -> tuple[dict[str, Tensor], ...]:
    run = Run(mesh_shape, options)
    state = deepcopy(state)
    if broadcast and dist.get_rank():
        state = {"model": {}, "optimizer": {}}
    run.set_state(state, full_state_dict=True, broadcast_from_rank0=broadcast)
    return run.go_on(()), run.go_on(range(STOP, END))


@pytest.mark.parametrize(("options", "broadcast"), [({"base": "adamw"}, False), ({}, True)], ids=str)
def test_whole_tensors_have_one_entry_for_each_node(
    gloo: ProcessPool, options: dict[str, Any], broadcast: bool
) -> None:
    results = gloo.run(_save_whole, (2, 2), options, world_size=4)
    state, saved, _ = results[0]
    _assert_nodes_differ(saved)
    for name, residual in _residuals(saved).items():
        assert torch.equal(state["optimizer"]["state"][name.removesuffix(".residual")]["residual"], residual)
    loaded = gloo.run(_resume_whole, (2, 2), options, state, broadcast, world_size=4)
    for (_, saved, end), (found, resumed_end) in zip(results, loaded, strict=True):
        assert_equal(found, saved)
        assert_equal(resumed_end, end)


# With broadcast_from_rank0 torch itself takes the sizes of now for those of the checkpoint, and fails on some ranks.
@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 1)), ((2, 1), (3, 1))], ids=str)
def test_whole_tensors_of_other_nodes_are_never_mixed_up(
    gloo: ProcessPool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    state, saved, _ = gloo.run(_save_whole, before, {}, world_size=before[0])[0]
    for found, _ in gloo.run(_resume_whole, after, {}, state, False, world_size=after[0]):
        for name, residual in _residuals(saved).items():
            share = residual.double().mean(0)
            torch.testing.assert_close(found[name].double(), share.expand(found[name].shape), rtol=0, atol=1e-6)


def _skip(options: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights and residuals before and after a step with a NaN on one rank, at the end, and at that of an equal run."""
    case = Case(mesh_shape=(dist.get_world_size(), 1), options=options)
    ranks, undisturbed = Ranks(case), Ranks(case)
    ranks.train([0])
    before = ranks.weights(), ranks.residuals()
    ranks.set_gradients(5)
    grad = ranks.parameters["prime"].grad
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


def _lost_state(options: dict[str, Any], *, is_new: bool, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Tensor]:
    """Two steps, then the state is lost (or the optimizer is made anew), then three more."""
    ranks_ = Ranks(Case(mesh_shape=(2, 1), options=options))
    ranks_.train(range(2))
    if is_new:
        ranks_.optimizer = FlexDeMo(ranks_.parameters.items(), **({"lr": 0.01, "mesh": ranks_.mesh} | options))
    elif dist.get_rank() in ranks:
        ranks_.optimizer.state.clear()
    ranks_.train(range(2, 5))
    return ranks_.weights()


@pytest.mark.parametrize(
    "options", [{"base": "sgd"}, {"base": "adamw"}, {"base": "muon", "compute_dtype": "float32"}], ids=str
)
def test_state_that_is_lost_is_that_of_a_new_optimizer(gloo: ProcessPool, options: dict[str, Any]) -> None:
    options = options | {"dense_below": 16}
    new = gloo.run(_lost_state, options, is_new=True, world_size=2)
    for ranks in ((0, 1), (1,)):
        lost = gloo.run(_lost_state, options, is_new=False, ranks=ranks, world_size=2)
        for found, expected in zip(lost, new, strict=True):
            assert_equal(found, expected)


def _losing_between_averages(steps_with_a_loss: tuple[int, ...]) -> dict[str, Tensor]:
    average = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    ranks = Ranks(Case(mesh_shape=(2, 1), options={"replicator": average, "sign": False, "lr": 0.05}))
    for step in range(6):
        if step in steps_with_a_loss:
            ranks.optimizer.state.clear()
        ranks.train([step], agree=False)
    ranks.check_nodes_agree()
    return ranks.weights()


@pytest.mark.parametrize("steps", [(3,), (1, 4)], ids=str)
def test_lost_state_keeps_progress_since_the_last_average(gloo: ProcessPool, steps: tuple[int, ...]) -> None:
    """An average with an outer learning rate of 1 is the mean of the weights, from whatever it counts."""
    expected = gloo.run(_losing_between_averages, (), world_size=2)[0]
    for found in gloo.run(_losing_between_averages, steps, world_size=2):
        assert_close(found, expected, 1e-6)
