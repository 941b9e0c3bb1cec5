"""FlexDeMo and DiLoCo in one process: base optimizers bit for bit, state, parameters that change."""

import copy
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, Full, NoReplication, ParallelMuon
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, train

SHAPES = [(13, 7), (64, 64), (3, 2, 5), (1, 9), (5,), ()]
FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}


def _parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        (torch.optim.SGD, {}, {"base": "sgd", "sign": False}),
        (partial(torch.optim.AdamW, fused=True), {"betas": (0.8, 0.9), "weight_decay": 0.2}, {"base": "adamw"}),
    ],
    ids=["sgd", "adamw"],
)
def test_alone_it_is_its_base_bit_for_bit(
    kind: Any, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, theirs = _parameters(dtype=dtype), _parameters(dtype=dtype)
    train(FlexDeMo(mine, lr=0.03, **options, **own), range(5))
    train(kind(theirs, lr=0.03, **options), range(5))
    assert are_equal(mine, theirs)


def test_residuals_of_bfloat16_weights_stay_float32() -> None:
    model = nn.Linear(13, 7).bfloat16()
    optimizer = FlexDeMo(model)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        assert entry["residual"].dtype == torch.float32
        entry["residual"] = torch.randn(entry["residual"].shape)
    other = FlexDeMo(copy.deepcopy(model))
    other.load_state_dict(state)
    for loaded, entry in zip(other.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert loaded.keys() == entry.keys() and torch.equal(loaded["residual"], entry["residual"])


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
        train(optimizer, [step])
        for parameter, old, residual in zip(parameters, before, saved, strict=True):
            assert parameter.grad is not None
            update = parameter.grad + (0.5 * residual if step == 0 else 0.0)
            torch.testing.assert_close(parameter.detach(), old - 0.1 * update)
    assert optimizer.sent_bytes_per_step == 0


def _add_and_freeze() -> None:
    """Two nodes whose parameters change between steps, beside one process with their mean gradient."""
    mesh, mine, theirs = mesh_of((2, 1)), _parameters(), _parameters()
    options: dict[str, Any] = {"replicator": Full(), "decay": 0.0, "merge": "mean", "value_format": "fp32"}
    optimizer = FlexDeMo(mine[:4], lr=0.1, base="sgd", sign=False, mesh=mesh, **options)
    reference = torch.optim.SGD(theirs[:4], lr=0.1)
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": mine[4:], "lr": 0.3})
            reference.add_param_group({"params": theirs[4:], "lr": 0.3})
        torch.manual_seed(step)
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            of_nodes, is_frozen = torch.randn(2, *SHAPES[number]), step == 3 and number == 0
            one.requires_grad_(not is_frozen)
            one.grad = None if is_frozen else of_nodes[mesh.get_local_rank("replicate")]
            other.grad = None if is_frozen else of_nodes.mean(0)
        optimizer.step()
        reference.step()
    # (a + b) / 2 on both sides; the product with lr may be rounded otherwise.
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_parameters_may_be_added_and_frozen_between_steps(gloo: ProcessPool) -> None:
    gloo.run(_add_and_freeze, world_size=2)


@pytest.mark.parametrize("saved_with", ["sgd", "adamw", "muon", "ParallelMuon"])
@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
def test_a_state_never_brings_another_base(saved_with: str, base: Any) -> None:
    options = FLOAT32 | {"lr": 0.02, "weight_decay": 0.0}
    others = _parameters()
    kind: Any = ParallelMuon if saved_with == "ParallelMuon" else partial(FlexDeMo, base=saved_with)
    before = kind(others, **options)
    train(before, range(1))
    parameters, expected = _parameters(), _parameters()
    optimizer, fresh = FlexDeMo(parameters, base=base, **options), FlexDeMo(expected, base=base, **options)
    if saved_with == "sgd" != base:  # The default of earlier versions.
        with pytest.raises(ValueError, match=r"saved with base='sgd'.*base='sgd', replicator=DCTTopK\(top_k=32\)"):
            optimizer.load_state_dict(before.state_dict())
        return
    optimizer.load_state_dict(before.state_dict())
    assert [route.algorithm for route in optimizer.routes] == [route.algorithm for route in fresh.routes]
    if base != "adamw":  # whose moments go on
        train(optimizer, range(1, 2))
        train(fresh, range(1, 2))
        assert are_equal(parameters[:2], expected[:2])


LR = 0.05


def _optimizer(replicator: Any, **options: Any) -> tuple[FlexDeMo, list[nn.Parameter]]:
    parameters = _parameters()
    return FlexDeMo(parameters, lr=LR, replicator=replicator, **({"base": "sgd", "sign": False} | options)), parameters


def test_training_begins_with_weights_set_before_step_one() -> None:
    """Also that of one which trains later."""
    optimizer, parameters = _optimizer(DiLoCo(period=1, outer_lr=0.5, outer_momentum=0.0, nesterov=False))
    optimizer.state_dict()
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2.0)
    parameters[0].requires_grad_(False)
    for step in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        train(optimizer, [step])
        for parameter, old in zip(parameters, before, strict=True):
            moved = 0.0 if parameter.grad is None else 0.5 * LR * parameter.grad
            torch.testing.assert_close(parameter.detach(), old - moved, rtol=0, atol=1e-6)
        parameters[0].requires_grad_(True)


@pytest.mark.parametrize(
    ("saved_with", "replicator"),
    [(DiLoCo(period=2),) * 2, *permutations([DiLoCo(period=2), NoReplication(), DCTTopK()], 2)],
    ids=lambda replicator: type(replicator).__name__,
)
def test_a_state_of_another_way_of_synchronizing_is_refused(saved_with: Any, replicator: Any) -> None:
    """And one without the weights of the node, as a flattened one of torch."""
    before, _ = _optimizer(saved_with, base="adamw", sign="auto")
    train(before, range(2))
    state = before.state_dict()
    for entry in state["state"].values() if saved_with == replicator else ():
        del entry["node_weights"]
    optimizer, _ = _optimizer(replicator, base="adamw", sign="auto")
    words = {DCTTopK: "components of momenta", DiLoCo: "DiLoCo", NoReplication: "NoReplication"}
    with pytest.raises(ValueError, match=f"saved with {words[type(saved_with)]}, the replicator is .*now"):
        optimizer.load_state_dict(state)
