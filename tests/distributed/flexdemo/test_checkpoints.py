"""State of FlexDeMo: checkpoints of torch (DCP), resumed runs, late updates, other numbers of nodes, skipped steps."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
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
from tests.distributed.flexdemo.models import Plan, ShardedNet
from tests.distributed.flexdemo.setup import (
    SMALL,
    Case,
    Ranks,
    assert_close,
    assert_equal,
    local,
    train,
    train_all,
)
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

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
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
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


SPARSE_OPTIONS: dict[str, Any] = SMALL | {"replicator": DCTTopK(chunk_size=8, top_k=5), "chunk_bytes": 2000}


class _Read(Ranks):
    """Before each step the state is read, for which updates on their way are waited for."""

    def set_gradients(self, step: int) -> None:
        self.optimizer.state_dict()
        super().set_gradients(step)


@pytest.mark.parametrize(
    ("mesh_shape", "options", "kind"),
    [((2, 2), {"sign": False}, Ranks), ((3, 1), {"replicator": Random(rate=0.25)}, Ranks), ((2, 1), {}, _Read)],
    ids=str,
)
def test_late_updates_are_the_same_updates(
    gloo: ProcessPool, mesh_shape: tuple[int, int], options: dict[str, Any], kind: type[Ranks]
) -> None:
    case = Case(mesh_shape=mesh_shape, options=SPARSE_OPTIONS | options)
    late = replace(case, options=case.options | {"delay": 1}, num_steps=case.num_steps + 1)
    cases = [case, late, replace(late, num_steps=case.num_steps), replace(late, num_steps=1)]
    for on_time, one_step_more, as_many_steps, first_step in gloo.run(
        train_all, cases, kind, world_size=case.world_size
    ):
        assert_equal(one_step_more[0], on_time[0])
        assert_equal(as_many_steps[1], on_time[1])
        assert_equal(first_step[0], case.weights())


def test_late_updates_do_not_hold_up_the_next_process_group(gloo: ProcessPool) -> None:
    case = Case(mesh_shape=(3, 1), options=SPARSE_OPTIONS | {"delay": 1, "replicator": Random(rate=0.25)})
    gloo.run(train, case, world_size=3)
    # Rank 2 is left out, and keeps the groups of before.
    gloo.run(train, replace(case, mesh_shape=(2, 1)), world_size=2, timeout=30.0)


def _skip_after_backward(plan: Plan) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The same with buffers that are on their way when a gradient turns out to be broken."""
    ranks = ShardedNet(plan)
    ranks.train([0])
    results = [(ranks.weights(), ranks.residuals())]
    ranks.backward(5)
    if torch.distributed.get_rank() == 1:
        grad = ranks.model.second.weight.grad
        assert grad is not None
        local(grad).view(-1)[2] = float("nan")
    ranks.optimizer.step()
    results.append((ranks.weights(), ranks.residuals()))
    ranks.train([1, 2])
    undisturbed = ShardedNet(plan)
    undisturbed.train(range(3))
    return [*results, (ranks.weights(), ranks.residuals()), (undisturbed.weights(), undisturbed.residuals())]


@pytest.mark.parametrize(
    ("mesh_shape", "replicator"), [((2, 2), DCTTopK(chunk_size=8, top_k=5)), ((3, 1), Random(rate=0.25))], ids=str
)
def test_early_sends_of_a_skipped_step_leave_no_trace(
    gloo: ProcessPool, mesh_shape: tuple[int, int], replicator: Any
) -> None:
    plan = Plan(mesh_shape=mesh_shape, options=SPARSE_OPTIONS | {"replicator": replicator})
    for before, after, end, undisturbed in gloo.run(_skip_after_backward, plan, world_size=plan.world_size):
        for index in range(2):
            assert_equal(after[index], before[index])
            assert_equal(end[index], undisturbed[index])


def _lost_state(options: dict[str, Any], *, is_new: bool, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Tensor]:
    """Two steps, then the state is lost (or the optimizer is made anew), then three more."""
    ranks_ = Ranks(Case(mesh_shape=(2, 1), options=options))
    ranks_.train(range(2))
    if is_new:
        ranks_.optimizer.state_dict()  # What is on its way arrives.
        ranks_.optimizer = FlexDeMo(ranks_.parameters.items(), **({"lr": 0.01, "mesh": ranks_.mesh} | options))
    elif dist.get_rank() in ranks:
        ranks_.optimizer.state.clear()
    ranks_.train(range(2, 5))
    return ranks_.weights()


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({}, "backward"),
        ({"base": "adamw"}, "step"),
        ({"delay": 1, "base": "muon", "compute_dtype": "float32"}, "backward"),
    ],
    ids=str,
)
def test_state_that_is_lost_is_that_of_a_new_optimizer(
    gloo: ProcessPool, options: dict[str, Any], overlap: str
) -> None:
    options = options | SMALL | {"overlap": overlap}
    new = gloo.run(_lost_state, options, is_new=True, world_size=2)
    for ranks in ((0, 1), (1,)):
        for found, expected in zip(
            gloo.run(_lost_state, options, is_new=False, ranks=ranks, world_size=2), new, strict=True
        ):
            for name, weight in expected.items():
                assert torch.equal(found[name], weight), name


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
