"""What ParallelMuon and FlexDeMo have in common: routes, state, plans that are made anew, copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import FlexDeMo, ParallelMuon
from tests.support.tensors import are_equal, set_gradients

FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}


@pytest.fixture(params=[ParallelMuon, FlexDeMo])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 13), nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 20, bias=False))


def _make(kind: Any, params: Any, **options: Any) -> Any:
    return kind(params, lr=0.05, **({"base": "muon"} if kind is FlexDeMo else {}), **FLOAT32, **options)


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        set_gradients(model.parameters(), step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_freezing_thawing_and_new_groups_count_from_the_next_step(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, [{"params": list(model[:2].named_parameters())}])
    _train(model, optimizer, range(2))
    frozen = model[1].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    _train(model, optimizer, range(2, 3))
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": model[3].parameters()})  # Without names, which the first group has.
    assert optimizer.param_groups[1]["param_names"] == ["1.0"]
    later = model[3].weight.detach().clone()
    _train(model, optimizer, range(3, 4))
    assert not torch.equal(frozen, before)
    assert not torch.equal(model[3].weight, later)


def test_groups_get_defaults_and_keep_other_keys(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, [{"params": [model[1].weight], "adjust_lr_fn": None}])
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "original"
    assert optimizer.param_groups[0]["lr"] == 0.05
    others = dict.fromkeys(("initial_lr", "max_momentum", "etas", "foreach", "no_weight_decay", "depth"), 1)
    optimizer.add_param_group({"params": [model[3].weight], **others})
    assert optimizer.param_groups[1].items() >= others.items()


def test_integers_beside_adapters_are_left_out(kind: Any) -> None:
    model = nn.ModuleDict({"quantized": nn.Module(), "lora_B": nn.Linear(4, 6)})
    model["quantized"].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.warns(UserWarning, match=r"1 parameters of integers \(quantized weights\) are left out"):
        optimizer = _make(kind, model)
    before = _train(model["lora_B"], optimizer, range(1))
    _train(model["lora_B"], optimizer, range(1, 2))
    assert not torch.equal(before[0], model["lora_B"].weight) and model["quantized"].weight.eq(1).all()
    assert optimizer.param_groups[0]["param_names"] == ["lora_B.weight", "lora_B.bias"]


def test_the_closure_is_evaluated_with_gradients_before_the_step(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, model)
    before = model[3].weight.detach().clone()

    def closure() -> torch.Tensor:
        assert torch.equal(model[3].weight, before)
        loss = model(torch.arange(4)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert not torch.equal(model[3].weight, before)


def test_copies_train_on_with_equal_bits(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, model)
    _train(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = _train(model, optimizer, range(2, 4))
    for other_model, other in copies:
        assert are_equal(_train(other_model, other, range(2, 4)), expected)
        assert [route.name for route in other.routes] == [route.name for route in optimizer.routes]


def test_steps_without_gradients_change_nothing_as_in_torch(kind: Any) -> None:
    """A scheduler that is tried out, batches that are left out."""
    model = _model()
    optimizer = _make(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert are_equal(before, model.parameters())
        _train(model, optimizer, range(step, step + 1))
        optimizer.zero_grad()
        assert not are_equal(before, model.parameters())


def test_a_float16_gradient_with_a_large_norm_is_applied() -> None:
    parameter = nn.Parameter(torch.zeros(8, 8, dtype=torch.float16))
    bias = nn.Parameter(torch.zeros(8))
    optimizer = ParallelMuon([parameter, bias], lr=0.1)
    parameter.grad = torch.full((8, 8), 60000.0, dtype=torch.float16)
    bias.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert parameter.detach().isfinite().all() and (parameter < 0).all()
    parameter.grad[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("options", [{"base": "sgd"}, {"base": "adamw"}, {"base": "muon", **FLOAT32}, None], ids=str)
def test_where_the_elements_lie_changes_nothing(options: Any) -> None:
    """Parameters between other elements and turned gradients, for FlexDeMo on each base, and for ParallelMuon."""
    results = []
    for is_odd in (False, True):
        wide = [torch.ones(6, 20), torch.ones(9), torch.ones(20, 5), torch.ones(3, 4)]
        parts = [wide[0][:, 2:12], wide[1][1:8:2], wide[2].mT[:, :10], wide[3]]
        parameters = [nn.Parameter(part if is_odd else part.contiguous()) for part in parts]
        optimizer = (
            FlexDeMo(parameters, lr=0.05, **options) if options else ParallelMuon(parameters, lr=0.05, **FLOAT32)
        )
        for step in range(2):
            set_gradients(parameters, step)
            if is_odd:
                parameters[3].grad = parameters[3].grad.mT.contiguous().mT
            optimizer.step()
        results.append(parameters)
        if is_odd:
            assert (wide[0][:, :2] == 1).all() and (wide[0][:, 12:] == 1).all()
            assert (wide[1][::2] == 1).all() and (wide[2][10:] == 1).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))


def _in_groups(module: nn.Module) -> ParallelMuon:
    groups = ([each for each in module.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = ParallelMuon([{"params": group} for group in groups])
    optimizer.attach(module)
    return optimizer


def _step(module: nn.Module, optimizer: ParallelMuon) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


REPLACES: dict[str, Callable[[nn.Sequential], object]] = {
    "layer": lambda module: module.__setitem__(1, nn.Linear(5, 4)),
    "weight": lambda module: setattr(module[1], "weight", nn.Parameter(torch.ones(4, 5))),
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "weight_norm": lambda module: nn.utils.parametrizations.weight_norm(module[1]),
}


@pytest.mark.parametrize("make", [ParallelMuon, _in_groups])
@pytest.mark.parametrize("what", REPLACES)
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_replaces_a_parameter_is_an_error(make: Any, what: str, is_trained: bool) -> None:
    module = _layers()
    optimizer = make(module)
    if is_trained:
        _step(module, optimizer)
    REPLACES[what](module)
    with pytest.raises(RuntimeError, match=r"[01]\.weight of the module is no longer the parameter"):
        _step(module, optimizer)


def test_an_optimizer_that_no_gradient_reaches_says_so() -> None:
    module = _layers()
    optimizer = ParallelMuon(module.parameters())
    module = _layers()
    with pytest.warns(UserWarning, match="has a gradient in its first step"), pytest.warns(UserWarning, match="shape"):
        _step(module, optimizer)
