"""Hyper-parameters that change after construction: checked before anything changes, and heeded by the next step."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from tests.support.tensors import are_equal, set_gradients
from tests.unit.optim.test_planned_optimizer import _make, _model, _train


def tripled(matrices: Tensor, *, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """An ``orthogonalize``."""
    return 3 * newton_schulz(matrices)


BAD_VALUES: list[tuple[str, Any]] = [
    ("lr", "fast"),
    ("lr", torch.tensor(float("inf"))),
    ("lr", torch.ones(2)),
    ("weight_decay", None),
    ("betas", (0.9,)),
    ("adjust_lr_fn", "other"),
    ("eps", KeyError),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_bad_value_is_refused_before_anything_changes(key: str, value: Any, when: str) -> None:
    model = _model()
    groups = [{"params": [p for p in model.parameters() if p.ndim == ndim]} for ndim in (2, 1)]
    optimizer = _make(ParallelMuon, groups)
    if when == "later":
        _train(model, optimizer, range(1))
    group = optimizer.param_groups[1]
    before, was = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"])), group[key]
    set_gradients(model.parameters(), 1)
    group.pop(key)
    if value is not KeyError:
        group[key] = value
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=key if key != "lr" else ""):
            optimizer.step()
    assert are_equal(before[0], list(model.parameters()))
    group[key] = was
    _assert_same_state(optimizer.state_dict()["state"], before[1])
    optimizer.step()
    assert not are_equal(before[0], list(model.parameters()))


def _assert_same_state(found: dict[int, Any], expected: dict[int, Any]) -> None:
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(found[number][key], value) for key, value in state.items())


def test_a_state_of_torch_muon_goes_on_with_its_rule() -> None:
    torch.manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(shape)) for shape in ((13, 7), (7, 13))] for _ in range(2))
    reference = torch.optim.Muon(theirs, lr=0.02)
    optimizer = ParallelMuon(
        [{"params": mine[:1], "betas": (0.5, 0.6)}, {"params": mine[1:]}],
        compute_dtype="bfloat16",
        adjust_lr_fn=None,
        muon_lr_factor=2.0,
    )
    for step in range(4):
        if step == 1:
            saved = copy.deepcopy(reference.state_dict())
            saved["param_groups"] = [saved["param_groups"][0] | {"params": [number]} for number in (0, 1)]
            assert saved["param_groups"][0]["adjust_lr_fn"] is None
            optimizer.load_state_dict(saved)
            assert optimizer.param_groups[0]["betas"] == (0.5, 0.6), "what the state lacks stays"
            assert optimizer.param_groups[0]["muon_lr_factor"] == 1.0, "its rate was chosen for Muon"
            for one, other in zip(mine, theirs, strict=True):
                one.data.copy_(other)
        for parameters in (mine, theirs):
            set_gradients(parameters, step)
        optimizer.param_groups[step % 2]["adjust_lr_fn"] = None
        optimizer.step()
        reference.step()
    assert are_equal(mine, theirs)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_another_algorithm_takes_over_from_the_next_step_on(is_loaded: bool) -> None:
    """From AdamW to Muon and back; each begins with zeros, unless its state is loaded."""
    models = [_model() for _ in range(2)]
    optimizer = _make(ParallelMuon, models[0].parameters(), algorithm="adamw")
    for number, algorithm in enumerate(("adamw", "auto", "adamw")):
        reference = _make(ParallelMuon, models[1].parameters(), algorithm=algorithm)
        if is_loaded:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*have trained with AdamW")  # The group that is loaded decides.
                optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        else:
            optimizer.param_groups[0]["algorithm"] = algorithm
            for parameter in models[0].parameters():
                if parameter.ndim == 1 and number:
                    optimizer.state.pop(parameter)  # AdamW goes on with these.
        steps = range(2 * number, 2 * number + 2)
        assert are_equal(_train(models[0], optimizer, steps), _train(models[1], reference, steps))
        assert {p: set(s) for p, s in optimizer.state.items()} == {
            mine: set(reference.state[theirs])
            for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True)
        }


def test_a_resume_says_which_loaded_options_count() -> None:
    saved = ParallelMuon(_model(), adjust_lr_fn="original").state_dict()
    optimizer = ParallelMuon(_model(), adjust_lr_fn="original", nesterov=False, ns_quality="fast", lr=0.5)
    message = r"outweighs the program: nesterov=True \(not False\), ns_quality='reference' \(not 'fast'\); set others"
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(saved)
    of_program = ParallelMuon(_model(), adjust_lr_fn=None, normuon=True, orthogonalize=tripled)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*outweighs")
        of_program.load_state_dict(saved)
    assert of_program.param_groups[0]["normuon"] and of_program.param_groups[0]["orthogonalize"] is tripled


def test_a_function_is_saved_by_its_name_and_copied() -> None:
    models = [_model() for _ in range(2)]
    optimizer = _make(ParallelMuon, models[0], orthogonalize=tripled)
    _train(models[0], optimizer, range(1))
    copied, pickled = copy.deepcopy((models[0], optimizer)), pickle.loads(pickle.dumps((models[0], optimizer)))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert saved["param_groups"][0]["orthogonalize"] == f"{__name__}.tripled"
    resumed = _make(ParallelMuon, models[1], orthogonalize=tripled)
    models[1].load_state_dict(models[0].state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(saved)
    ran = [_train(model, each, range(1, 3)) for model, each in ((models[0], optimizer), copied, pickled)]
    assert all(are_equal(each, _train(models[1], resumed, range(1, 3))) for each in ran[:1])
    assert are_equal(ran[0], ran[1]) and are_equal(ran[0], ran[2])


WRONG: list[tuple[Any, str]] = [
    (lambda matrices: matrices, "newton_schulz"),
    (lambda matrices, *, newton_schulz: matrices.mT, r"<lambda> returned \(1, 3, 2\) torch.float32 for"),
    (lambda matrices, *, newton_schulz: None, r"returned NoneType for matrices \(1, 2, 3\) torch.float32; return"),
]


@pytest.mark.parametrize(("function", "message"), WRONG)
def test_a_wrong_function_is_refused_before_a_step(function: Any, message: str) -> None:
    model = _model()
    optimizer = _make(ParallelMuon, model)
    _train(model, optimizer, range(1))
    before = copy.deepcopy(list(model.parameters()))
    optimizer.param_groups[0]["orthogonalize"] = function
    with pytest.raises(TypeError, match=message):
        _train(model, optimizer, range(1, 2))
    assert are_equal(before, list(model.parameters()))


def test_a_weight_that_has_changed_its_algorithm_is_loaded() -> None:
    """AdamW's first moment is the momentum from then on; on the way back AdamW begins with zeros and keeps nothing."""
    weight, other = (nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    named = [("matrix", weight), ("other", other)]
    adamw = ParallelMuon(named, adamw_patterns=("matrix",))
    muon = ParallelMuon(named, normuon=True)
    set_gradients([weight, other], 0)
    adamw.step()
    first = adamw.state[weight]["exp_avg"].clone()
    with pytest.warns(UserWarning, match="their first moments go on as momenta"):
        muon.load_state_dict(adamw.state_dict())
    saved = muon.state_dict()
    assert saved["state"][0].keys() == {"momentum_buffer", "second_momentum_buffer"}
    assert torch.equal(saved["state"][0]["momentum_buffer"], first)
    adamw.load_state_dict(saved)
    assert adamw.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_rate_that_becomes_nan_in_place_is_refused() -> None:
    model = _model()
    optimizer = ParallelMuon(model, lr=torch.tensor(0.1))
    _train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"].fill_(float("nan"))
    with pytest.raises(ValueError, match="lr must be finite"):
        _train(model, optimizer, range(1, 2))


def test_the_state_of_torchs_adamw_brings_its_eps() -> None:
    shapes = [(5, 3), (3,), (), (0, 4)]
    weights, copies = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    theirs = torch.optim.AdamW(weights, lr=0.01, eps=1e-2, fused=True)
    ours = ParallelMuon(copies, algorithm="adamw")
    for step in range(4):
        for parameters in (weights, copies):
            set_gradients(parameters, step)
        if step == 1:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for weight, other in zip(weights, copies, strict=True):
                other.data.copy_(weight)
        theirs.step()
        ours.step()
    assert are_equal(weights, copies)
    assert ours.param_groups[0]["eps"] == 1e-7


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("param_groups", "ns_steps", 0, "ns_steps"),
        ("state", "momentum_buffer", torch.zeros(2), r"its saved momentum_buffer \(2,\)"),
        ("state", "exp_avg", torch.zeros(2), r"its saved exp_avg \(2,\)"),
    ],
)
def test_a_wrong_state_is_not_loaded(place: str, key: str, value: Any, message: str) -> None:
    model = _model()
    optimizer = _make(ParallelMuon, model)
    _train(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["state"][0]["step"] += 5
    entries = saved["param_groups"] if place == "param_groups" else saved["state"].values()
    next(each for each in entries if place == "param_groups" or key in each)[key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    _assert_same_state(optimizer.state_dict()["state"], before["state"])
    assert optimizer.param_groups[0]["ns_steps"] == 5
