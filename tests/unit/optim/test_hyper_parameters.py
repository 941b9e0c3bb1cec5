"""Hyper-parameters that change after construction: checked before anything changes, and heeded by the next step."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import ParallelMuon
from tests.support.tensors import are_equal
from tests.unit.optim.test_planned_optimizer import _make, _model, _train


def tripled(matrices: Tensor, *, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """An ``orthogonalize``."""
    return 3 * newton_schulz(matrices)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", torch.tensor(float("inf"))),
        ("lr", torch.ones(2)),
        ("weight_decay", None),
        ("betas", (0.9,)),
        ("adjust_lr_fn", "other"),
        ("eps", KeyError),
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_bad_value_is_refused_before_anything_changes(key: str, value: Any, when: str) -> None:
    models = [_model() for _ in range(2)]
    optimizer, other = (_make(ParallelMuon, model) for model in models)
    if when == "later":
        _train(models[0], optimizer, range(1))
        _train(models[1], other, range(1))
    group = optimizer.param_groups[0]
    was = group.pop(key)
    if value is not KeyError:
        group[key] = value
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=key if key != "lr" else "lr|one element|scalar"):
            _train(models[0], optimizer, range(1, 2))
    group[key] = was
    assert are_equal(_train(models[0], optimizer, range(1, 3)), _train(models[1], other, range(1, 3)))


def test_another_algorithm_takes_over_from_the_next_step_on() -> None:
    """From AdamW to Muon and back; each begins with zeros."""
    models = [_model() for _ in range(2)]
    optimizer = _make(ParallelMuon, models[0].parameters(), algorithm="adamw")
    for number, algorithm in enumerate(("adamw", "auto", "adamw")):
        reference = _make(ParallelMuon, models[1].parameters(), algorithm=algorithm)
        optimizer.param_groups[0]["algorithm"] = algorithm
        for parameter in models[0].parameters():
            if parameter.ndim == 1 and number:
                optimizer.state.pop(parameter)  # AdamW goes on with these.
        steps = range(2 * number, 2 * number + 2)
        assert are_equal(_train(models[0], optimizer, steps), _train(models[1], reference, steps))
        states = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(optimizer.state[mine].keys() == reference.state[theirs].keys() for mine, theirs in states)


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


def test_a_wrong_function_is_refused_before_a_step() -> None:
    model = _model()
    optimizer = _make(ParallelMuon, model)
    before = _train(model, optimizer, range(1))
    wrong: list[tuple[Any, str]] = [
        (lambda matrices: matrices, "newton_schulz"),
        (lambda matrices, *, newton_schulz: matrices.mT, r"<lambda> returned \(1, 3, 2\) torch.float32 for"),
        (lambda matrices, *, newton_schulz: None, r"returned NoneType for matrices \(1, 2, 3\) torch.float32; return"),
    ]
    for function, message in wrong:
        optimizer.param_groups[0]["orthogonalize"] = function
        with pytest.raises(TypeError, match=message):
            _train(model, optimizer, range(1, 2))
        assert are_equal(before, model.parameters())


def test_a_rate_that_becomes_nan_in_place_is_refused() -> None:
    model = _model()
    optimizer = ParallelMuon(model, lr=torch.tensor(0.1))
    _train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"].fill_(float("nan"))
    with pytest.raises(ValueError, match="lr must be finite"):
        _train(model, optimizer, range(1, 2))
