import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.optim.state import convert_
from lightning_muon.params.layout import TensorLayout


def test_only_what_is_laid_out_like_its_parameter_is_converted() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2), "note": "text"}
    seen: list[Tensor] = []

    def double(states: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        seen.extend(tensor for tensor, _ in states)
        return [2 * value for _, value in states]

    convert_([(parameter, state)], double)  # type: ignore[arg-type]
    assert seen == [parameter]
    assert state["step"] == 3 and state["note"] == "text" and (state["exp_avg"] == 2).all()  # type: ignore[attr-defined]


def test_state_that_was_used_is_not_divided_anew() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = ParallelMuon(net)
    optimizer.state_dict()
    layout = TensorLayout()
    optimizer.attach(net, layout)  # Zeros are as good as other zeros.
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.attach(net, layout)
    with pytest.raises(RuntimeError, match="has state already"):
        optimizer.attach(net, TensorLayout())
