"""What ParallelMuon and FlexDeMo have in common: routes, state, plans that are made anew, copies, skipped steps."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import FlexDeMo, NonFiniteGradientError, ParallelMuon
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


def test_steps_with_a_nan_are_skipped_until_there_are_too_many(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, model, max_skipped_steps=2)
    before = _train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for count in (1, 2):
        set_gradients(model.parameters(), count)
        model[3].weight.grad[3, 3] = float("nan")
        optimizer.step()
        assert optimizer.skipped_steps == count
    assert are_equal(model.parameters(), before)
    for number, entry in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][number][key]) for key, value in entry.items())
    with pytest.raises(NonFiniteGradientError, match=r"3\.weight"):
        optimizer.step()
    _train(model, optimizer, range(3, 4))
    assert not are_equal(model.parameters(), before)


def test_copies_train_on_with_equal_bits(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, model)
    _train(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = _train(model, optimizer, range(2, 4))
    for other_model, other in copies:
        assert are_equal(_train(other_model, other, range(2, 4)), expected)
        assert [route.name for route in other.routes] == [route.name for route in optimizer.routes]


def test_a_saved_state_is_no_part_and_may_lack_hyper_parameters(kind: Any) -> None:
    optimizer = _make(kind, _model(), weight_decay=0.125)
    saved = optimizer.state_dict()
    saved["state"][0]["own"] = 1
    assert all("own" not in state for state in optimizer.state.values())
    assert set(optimizer.state_dict()["state"][0]) == set(saved["state"][0]) - {"own"}
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["weight_decay"]
    other = _make(kind, _model(), weight_decay=0.125)
    other.load_state_dict(state)
    assert other.param_groups[0]["weight_decay"] == 0.125


def test_steps_without_gradients_change_nothing_as_in_torch(kind: Any) -> None:
    """A scheduler that is tried out, batches that are left out, a head that is not used in every step."""
    model = _model()
    optimizer = _make(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert all(map(torch.equal, before, model.parameters()))
        _train(model, optimizer, range(step, step + 1))
        optimizer.zero_grad(set_to_none=step > 0)
        assert step or all((parameter.grad == 0).all() for parameter in model.parameters())
        optimizer.zero_grad()
        assert not all(map(torch.equal, before, model.parameters()))


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
def test_parameters_between_other_elements_are_trained_alone(options: Any) -> None:
    """The same as contiguous ones, for FlexDeMo on each base, and for ParallelMuon."""
    results = []
    for is_between in (False, True):
        wide = [torch.ones(6, 20), torch.ones(9), torch.ones(20, 5)]
        parts = [wide[0][:, 2:12], wide[1][1:8:2], wide[2].mT[:, :10]]
        if not is_between:
            parts = [part.contiguous() for part in parts]
        parameters = [nn.Parameter(part) for part in parts]
        optimizer = (
            FlexDeMo(parameters, lr=0.05, **options) if options else ParallelMuon(parameters, lr=0.05, **FLOAT32)
        )
        for step in range(2):
            set_gradients(parameters, step)
            optimizer.step()
        results.append(parameters)
        if is_between:
            assert (wide[0][:, :2] == 1).all() and (wide[0][:, 12:] == 1).all()
            assert (wide[1][::2] == 1).all() and (wide[2][10:] == 1).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))


def _named(module: nn.Module) -> ParallelMuon:
    return ParallelMuon(module, lr=0.1)


def _in_groups(module: nn.Module) -> ParallelMuon:
    groups = ([each for each in module.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = ParallelMuon([{"params": group} for group in groups], lr=0.1)
    optimizer.attach(module)
    return optimizer


def _step(module: nn.Module, optimizer: ParallelMuon) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def _replace(module: nn.Sequential, what: str) -> None:
    if what == "layer":
        module[1] = nn.Linear(5, 4)
    elif what == "weight":
        module[1].weight = nn.Parameter(module[1].weight.detach() * 2)
    elif what == "to_empty":
        module.to("meta").to_empty(device="cpu")
    else:
        nn.utils.parametrizations.weight_norm(module[1])


@pytest.mark.parametrize("make", [_named, _in_groups])
@pytest.mark.parametrize("what", ["layer", "weight", "to_empty", "weight_norm"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_replaces_a_parameter_is_an_error(make: Any, what: str, is_trained: bool) -> None:
    module = _layers()
    optimizer = make(module)
    if is_trained:
        _step(module, optimizer)
    _replace(module, what)
    with pytest.raises(RuntimeError, match=r"[01]\.weight of the module is no longer the parameter"):
        _step(module, optimizer)


def test_an_optimizer_that_no_gradient_reaches_says_so() -> None:
    module = _layers()
    optimizer = ParallelMuon(module.parameters(), lr=0.1)
    for place in range(3):
        module[place] = nn.Linear(module[place].in_features, module[place].out_features)
    with pytest.warns(UserWarning, match="has a gradient in its first step"), pytest.warns(UserWarning, match="shape"):
        _step(module, optimizer)
