"""FlexDeMo and DiLoCo in one process: base optimizers bit for bit, state, and nodes without a mesh."""

import copy
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, Full, NoReplication, ParallelMuon
from tests.support.processes import ProcessPool
from tests.support.tensors import set_gradients

SHAPES = [(13, 7), (64, 64), (3, 2, 5), (1, 9), (5,), ()]
FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}


def _parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def _assert_equal(mine: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), one.shape


class _SignSGD(torch.optim.SGD):
    """With decoupled weight decay."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                shrink = 1 - group["lr"] * group["weight_decay"]
                parameter.data.mul_(shrink).add_(parameter.grad.sign(), alpha=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        (torch.optim.SGD, {}, {"base": "sgd", "sign": False}),
        (_SignSGD, {"weight_decay": 0.25}, {"base": "sgd"}),
        (partial(torch.optim.AdamW, fused=True), {"betas": (0.8, 0.9), "weight_decay": 0.2}, {"base": "adamw"}),
    ],
    ids=["sgd", "sign sgd", "adamw"],
)
def test_alone_it_is_its_base_bit_for_bit(
    kind: Any, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, theirs = _parameters(dtype=dtype), _parameters(dtype=dtype)
    _train(FlexDeMo(mine, lr=0.03, **options, **own), mine, range(5))
    _train(kind(theirs, lr=0.03, **options), theirs, range(5))
    _assert_equal(mine, theirs)


@pytest.mark.parametrize("options", [{"base": "sgd"}, {"base": "adamw"}, {}], ids=str)
def test_state_is_complete_before_the_first_step_and_loads(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7)).bfloat16()
    optimizer = FlexDeMo(model, **options, **FLOAT32)
    state = optimizer.state_dict()
    assert [entry["residual"].shape for entry in state["state"].values()] == [(1, 7, 13), (1, 7), (1, 7), (1, 7)]
    assert {entry["residual"].dtype for entry in state["state"].values()} == {torch.float32}
    _train(optimizer, list(model.parameters()), range(2))
    after = optimizer.state_dict()
    assert [set(entry) for entry in after["state"].values()] == [set(entry) for entry in state["state"].values()]
    residuals = [torch.randn(entry["residual"].shape) for entry in after["state"].values()]
    for entry, residual in zip(after["state"].values(), residuals, strict=True):
        entry["residual"] = residual
    other = FlexDeMo(copy.deepcopy(model), **options, **FLOAT32)
    other.load_state_dict(copy.deepcopy(after))
    assert other.num_exchanges == 2
    for entry, residual in zip(other.state_dict()["state"].values(), residuals, strict=True):
        assert entry["residual"].dtype == torch.float32
        assert torch.equal(entry["residual"], residual)


def test_one_node_applies_residuals_it_takes_over_once() -> None:
    parameters = _parameters()
    optimizer = FlexDeMo(parameters, lr=0.1, base="sgd", sign=False, decay=0.5)
    state = optimizer.state_dict()
    for parameter, entry in zip(parameters, state["state"].values(), strict=True):
        entry["residual"] = torch.randn(3, *parameter.shape)
    saved = [entry["residual"].mean(0) for entry in state["state"].values()]
    optimizer.load_state_dict(state)
    for step in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        _train(optimizer, parameters, range(step, step + 1))
        for parameter, old, residual in zip(parameters, before, saved, strict=True):
            assert parameter.grad is not None
            update = parameter.grad + (0.5 * residual if step == 0 else 0.0)
            torch.testing.assert_close(parameter.detach(), old - 0.1 * update)
    assert optimizer.sent_bytes_per_step == 0


def _first_call(call: str, replicates: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicates else None
    model = nn.Linear(4, 3)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = FlexDeMo(model, mesh=mesh)
    model(torch.randn(2, 4)).sum().backward()
    {"step": optimizer.step, "state_dict": optimizer.state_dict, "attach": lambda: optimizer.attach(model)}[call]()


@pytest.mark.parametrize("call", ["step", "attach", "state_dict"])
def test_nodes_without_a_mesh_or_averaged_by_fsdp_are_refused(gloo: ProcessPool, call: str) -> None:
    gloo.run(_first_call, call, world_size=1)  # One process needs no mesh.
    gloo.expect_error_on_all_ranks(_first_call, call, match=r"FlexDeMo\(\.\.\., mesh=init_device_mesh", world_size=2)
    between = r"averages between the nodes .*fully_shard\(module, mesh=mesh\['shard'\]\)"
    gloo.expect_error_on_all_ranks(_first_call, call, True, match=between)


def _add_and_freeze() -> list[list[torch.Tensor]]:
    """Weights of two nodes whose parameters change between steps, which must be those of the mean gradient."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    mine, theirs = _parameters(), _parameters()
    options: dict[str, Any] = {"replicator": Full(), "decay": 0.0, "merge": "mean", "value_format": "fp32"}
    optimizer = FlexDeMo(mine[:4], lr=0.1, base="sgd", sign=False, mesh=mesh, **options)
    reference = torch.optim.SGD(theirs[:4], lr=0.1)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": mine[4:], "lr": 0.3})
            reference.add_param_group({"params": theirs[4:], "lr": 0.3})
        for parameters in (mine, theirs):
            parameters[0].requires_grad_(step != 3)
        active = [number for number, parameter in enumerate(mine) if parameter.requires_grad]
        torch.manual_seed(step)
        optimizer.zero_grad()
        reference.zero_grad()
        for number in active:
            of_nodes = torch.randn(2, *SHAPES[number])
            mine[number].grad = of_nodes[mesh.get_local_rank("replicate")]
            theirs[number].grad = of_nodes.mean(0)
        optimizer.step()
        reference.step()
    return [[parameter.detach() for parameter in parameters] for parameters in (mine, theirs)]


def test_parameters_may_be_added_and_frozen_between_steps(gloo: ProcessPool) -> None:
    results = gloo.run(_add_and_freeze, world_size=2)
    for mine, theirs in results:
        for one, other in zip(mine, theirs, strict=True):
            # (a + b) / 2 on both sides; the product with lr may be rounded otherwise.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))


@pytest.mark.parametrize("saved_with", ["sgd", "adamw", "muon", "ParallelMuon"])
@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
def test_a_state_never_brings_another_base(saved_with: str, base: Any) -> None:
    options = FLOAT32 | {"lr": 0.02, "weight_decay": 0.0}
    others = _parameters()
    kind: Any = ParallelMuon if saved_with == "ParallelMuon" else partial(FlexDeMo, base=saved_with)
    before = kind(others, **options)
    _train(before, others, range(1))
    parameters, expected = _parameters(), _parameters()
    optimizer, fresh = FlexDeMo(parameters, base=base, **options), FlexDeMo(expected, base=base, **options)
    if saved_with == "sgd" != base:  # The default of earlier versions.
        with pytest.raises(ValueError, match=r"saved with base='sgd'.*base='sgd', replicator=DCTTopK\(top_k=32\)"):
            optimizer.load_state_dict(before.state_dict())
        return
    optimizer.load_state_dict(before.state_dict())
    for mine, theirs in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert all(mine[key] == theirs[key] for key in ("algorithm", "momentum", "nesterov"))
    assert [route.algorithm for route in optimizer.routes] == [route.algorithm for route in fresh.routes]
    if base != "adamw":  # whose moments go on
        _train(optimizer, parameters, range(1, 2))
        _train(fresh, expected, range(1, 2))
        _assert_equal(parameters[:2], expected[:2])


LR = 0.05


def _optimizer(replicator: Any, **options: Any) -> tuple[FlexDeMo, list[nn.Parameter]]:
    parameters = _parameters()
    return FlexDeMo(parameters, lr=LR, replicator=replicator, **({"base": "sgd", "sign": False} | options)), parameters


def test_training_begins_with_weights_loaded_before_step_one() -> None:
    optimizer, parameters = _optimizer(DiLoCo(period=2, outer_lr=0.5, outer_momentum=0.0, nesterov=False))
    optimizer.state_dict()
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2.0)
    gradients: list[list[Tensor]] = []
    for step in range(2):
        set_gradients(parameters, step)
        gradients.append([parameter.grad for parameter in parameters if parameter.grad is not None])
        optimizer.step()
    for parameter, one, two in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), 2 - 0.5 * LR * (one + two), rtol=0, atol=1e-6)


def test_a_weight_trained_later_begins_where_it_is() -> None:
    optimizer, parameters = _optimizer(DiLoCo(period=1, outer_lr=0.5, outer_momentum=0.0, nesterov=False))
    parameters[0].requires_grad_(False)
    optimizer.state_dict()
    with torch.no_grad():
        parameters[0].fill_(2.0)
    set_gradients(parameters[1:], 0)
    optimizer.step()
    assert (parameters[0] == 2).all()
    parameters[0].requires_grad_(True)
    set_gradients(parameters, 1)
    optimizer.step()
    assert parameters[0].grad is not None
    expected = 2 - 0.5 * LR * parameters[0].grad
    torch.testing.assert_close(parameters[0].detach(), expected, rtol=0, atol=1e-6)


def test_common_weights_do_not_hide_a_nodes_own_from_saving() -> None:
    optimizer, parameters = _optimizer(DiLoCo(period=4))
    _train(optimizer, parameters, range(2))
    own = [parameter.detach().clone() for parameter in parameters]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with optimizer.common_weights():
        assert not torch.equal(parameters[0], own[0])
        state = optimizer.state_dict()["state"]
    for number, weights in enumerate(own):
        assert torch.equal(state[number]["node_weights"][0], weights)
        assert torch.equal(parameters[number], weights)


@pytest.mark.parametrize(
    ("saved_with", "replicator"),
    list(permutations([DiLoCo(period=2), NoReplication(), DCTTopK()], 2)),
    ids=lambda replicator: type(replicator).__name__,
)
def test_a_state_of_another_way_of_synchronizing_is_refused(saved_with: Any, replicator: Any) -> None:
    before, parameters = _optimizer(saved_with, base="adamw", sign="auto")
    _train(before, parameters, range(2))
    optimizer, _ = _optimizer(replicator, base="adamw", sign="auto")
    words = {DCTTopK: "components of momenta", DiLoCo: "DiLoCo", NoReplication: "NoReplication"}
    with pytest.raises(ValueError, match=f"saved with {words[type(saved_with)]}, the replicator is .*now"):
        optimizer.load_state_dict(before.state_dict())
