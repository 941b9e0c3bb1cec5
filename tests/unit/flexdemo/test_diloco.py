"""DiLoCo and nodes by themselves in one process; several nodes are in tests/distributed/flexdemo."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, NoReplication

SHAPES = [(13, 7), (5,), ()]
LR = 0.05


def _optimizer(replicator: Any, **options: Any) -> tuple[FlexDeMo, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return FlexDeMo(parameters, lr=LR, replicator=replicator, **({"sign": False} | options)), parameters


def _set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def _train(optimizer: FlexDeMo, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        _set_gradients(parameters, step)
        optimizer.step()


def test_training_begins_with_weights_loaded_before_step_one() -> None:
    optimizer, parameters = _optimizer(DiLoCo(period=2, outer_lr=0.5, outer_momentum=0.0, nesterov=False))
    optimizer.state_dict()
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2.0)
    gradients: list[list[Tensor]] = []
    for step in range(2):
        _set_gradients(parameters, step)
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
    _set_gradients(parameters[1:], 0)
    optimizer.step()
    assert (parameters[0] == 2).all()
    parameters[0].requires_grad_(True)
    _set_gradients(parameters, 1)
    optimizer.step()
    assert parameters[0].grad is not None
    expected = 2 - 0.5 * LR * parameters[0].grad
    torch.testing.assert_close(parameters[0].detach(), expected, rtol=0, atol=1e-6)


def test_state_is_float32_but_for_the_anchor_which_is_weights() -> None:
    optimizer = FlexDeMo(nn.Linear(7, 13).bfloat16(), replicator=DiLoCo(period=2))
    for state in optimizer.state_dict()["state"].values():
        dtypes = {key: value.dtype for key, value in state.items()}
        of_weights = dict.fromkeys(("anchor", "node_weights"), torch.bfloat16)
        assert dtypes == of_weights | dict.fromkeys(("outer_momentum", "has_moved"), torch.float32)


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
