"""Momenta in 8 bits and in host memory, in one process: bytes, values, states that are saved and loaded."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.optim.momentum import StoredMomentum
from tests.reference.muon import in_8_bits
from tests.support.momenta_on_host import momenta_on_host
from tests.support.tensors import are_equal, set_gradients

FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32", "lr": 0.05}
KEPT: list[dict[str, Any]] = [
    {"momentum_dtype": "int8"},
    {"offload": "momentum"},
    {"momentum_dtype": "int8", "offload": "momentum"},
]


def _net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 13), nn.Linear(13, 2 * 8), nn.Conv2d(4, 6, 3), nn.Linear(5000, 3), nn.Linear(3, 9)
    ).to(dtype)


def _train(net: nn.Module, optimizer: ParallelMuon, steps: range) -> list[Tensor]:
    for step in steps:
        set_gradients(net.parameters(), step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _stored(optimizer: ParallelMuon) -> list[StoredMomentum]:
    found = (state.get("momentum_buffer") for state in optimizer.state.values())
    return [each for each in found if isinstance(each, StoredMomentum)]


def _memory(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_8_bits_take_a_quarter_of_the_memory() -> None:
    net = _net()
    optimizer = ParallelMuon(net, momentum_dtype="int8")
    tensors = [tensor for stored in _stored(optimizer) for tensor in stored.tensors()]
    matrices = [net[index].weight for index in (1, 2, 3)]  # The first and last layer are on AdamW.
    num_elements = sum(matrix.numel() for matrix in matrices)
    # One maximum for each of 16 rows, 6 filters, and 3 rows of 5000 elements in 3 blocks.
    assert _memory(tensors) == num_elements + 4 * (16 + 6 + 3 * 3)
    as_usual = [state["momentum_buffer"] for state in ParallelMuon(_net()).state.values() if "momentum_buffer" in state]
    assert _memory(as_usual) == 4 * num_elements
    moments = optimizer.state[net[0].weight]
    assert all(moments[key].dtype == torch.float32 for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bits_keep_a_float32_average(dtype: torch.dtype) -> None:
    net = _net(dtype)
    optimizer = ParallelMuon(net, momentum_dtype="int8", **FLOAT32)
    matrix = optimizer.param_groups[0]["params"][5]
    assert matrix is net[3].weight
    expected = torch.zeros(matrix.shape)
    for step in range(4):
        _train(net, optimizer, range(step, step + 1))
        expected = in_8_bits(expected.lerp(matrix.grad.float(), 1 - 0.95))
        saved = optimizer.state_dict()["state"][5]
        assert saved["momentum_buffer"].dtype == torch.float32
        assert torch.equal(saved["momentum_buffer"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", KEPT)
def test_a_saved_state_goes_on_with_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    with momenta_on_host():
        net = _net(dtype)
        optimizer = ParallelMuon(net, **FLOAT32, **options)
        _train(net, optimizer, range(3))
        state, other_net = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net)
        other = ParallelMuon(other_net, **FLOAT32, **options)
        other.load_state_dict(state)
        assert are_equal(_train(other_net, other, range(3, 6)), _train(net, optimizer, range(3, 6)))


@pytest.mark.parametrize(("before", "after"), [({}, KEPT[0]), (KEPT[0], {}), (KEPT[0], KEPT[2]), (KEPT[1], KEPT[0])])
def test_states_go_from_one_way_of_keeping_to_another(before: dict[str, Any], after: dict[str, Any]) -> None:
    with momenta_on_host():
        net = _net()
        optimizer = ParallelMuon(net, **FLOAT32, **before)
        _train(net, optimizer, range(3))
        other = ParallelMuon(net, **FLOAT32, **after)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        states = [each.state_dict()["state"] for each in (optimizer, other)]
    has_new_codes = "int8" in after.values() and "int8" not in before.values()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        for key, value in state.items():
            found = states[1][number][key]
            if has_new_codes and key == "momentum_buffer":
                value = in_8_bits(value.flatten(1)).view(value.shape)
            assert torch.equal(found, value)


def test_what_turns_out_to_be_another_matrix_is_cut_anew() -> None:
    net = nn.ModuleDict({"convolution": nn.Conv1d(4, 6, 3, bias=False), "other": nn.Linear(4, 4, bias=False)})
    convolution: Any = net["convolution"].weight
    optimizer = ParallelMuon(net.parameters(), momentum_dtype="int8", algorithm="muon", **FLOAT32)
    assert len(optimizer.state[convolution]["momentum_buffer"].boxes) == 6, "its shape is that of a stack"
    _train(net, optimizer, range(1))
    before = optimizer.state[convolution]["momentum_buffer"].on_host()
    optimizer.attach(net)
    _train(net, optimizer, range(1, 2))
    assert len(optimizer.state[convolution]["momentum_buffer"].boxes) == 1
    found = optimizer.state[convolution]["momentum_buffer"].on_host()
    # Rounded twice: as a matrix when it was cut anew, and in the step.
    average = in_8_bits(before.flatten(1)).lerp(convolution.grad.flatten(1), 1 - 0.95)
    assert torch.equal(found.flatten(1), in_8_bits(average))


def test_a_momentum_of_another_shape_is_refused() -> None:
    optimizer = ParallelMuon(_net(), momentum_dtype="int8")
    with pytest.raises(ValueError, match=r"of the shape \(2, 2\) was loaded where .* has \(16, 13\)"):
        _stored(optimizer)[0].fill(torch.zeros(2, 2))


def test_on_a_cpu_offloading_changes_nothing() -> None:
    nets = [_net(), _net()]
    with_option, without = (ParallelMuon(net, **FLOAT32, **more) for net, more in zip(nets, (KEPT[1], {}), strict=True))
    assert are_equal(_train(nets[0], with_option, range(2)), _train(nets[1], without, range(2)))
    assert not _stored(with_option)
