"""Whole weights of sharded models, compared with the state dict of the plain ones: exactly, for nothing is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import lightning_muon
from lightning_muon.sharding.shard_model import shard_model
from lightning_muon.sharding.weights import full_state_dict
from tests.distributed.sharding.models import Net, make_mesh, tokens_of_all
from tests.support.processes import ProcessPool


class _Normed(Net):
    """Adds a batch norm that has seen a batch, and a buffer that state dicts leave out."""

    def __init__(self) -> None:
        super().__init__()
        # Without weights, because batch norm takes none in bfloat16 with statistics in float32.
        self.last = nn.BatchNorm1d(11, affine=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.last(torch.randn(6, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(super().forward(tokens).flatten(0, 1).float())


def _plain() -> _Normed:
    torch.manual_seed(0)
    return _Normed().eval()


def _gather(
    shape: tuple[int, int], *, evaluated: bool = False, compiled: bool = False, part: str = ""
) -> tuple[dict[str, Tensor], bool, bool]:
    """Weights, whether tied ones share memory, and whether the root was whole before."""
    model = _plain()
    if compiled:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    shard_model(model, make_mesh(shape), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if evaluated:
        with torch.no_grad():
            model(tokens_of_all(1)[0])
    was_whole = not isinstance(model.table.weight, DTensor)
    state = full_state_dict(model.get_submodule(part))
    assert isinstance(model.table.weight, DTensor) or part
    tied = "head.weight" in state and state["head.weight"].data_ptr() == state["table.weight"].data_ptr()
    return {name: tensor.clone() for name, tensor in state.items()}, tied, was_whole


def _assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(state[name]) is Tensor, name
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("shape", "options"), [((3, 1), {}), ((1, 2), {"evaluated": True}), ((1, 2), {"compiled": True})], ids=str
)
def test_rank_0_has_the_state_dict_of_the_plain_model(
    gloo: ProcessPool, shape: tuple[int, int], options: dict[str, bool]
) -> None:
    (state, tied, was_whole), *others = gloo.run(_gather, shape, world_size=shape[0] * shape[1], **options)
    _assert_equal(state, _plain().state_dict())
    assert tied
    assert was_whole == options.get("evaluated", False)
    assert all(other[0] == {} for other in others)
    with torch.no_grad():
        model = _Normed()
    model.load_state_dict(state, strict=True)
    assert model.head.weight is model.table.weight


@pytest.mark.parametrize(("part", "evaluated"), [("blocks", True), ("table", False)])
def test_a_part_of_the_model_will_do(gloo: ProcessPool, part: str, evaluated: bool) -> None:
    state = gloo.run(_gather, (1, 2), evaluated=evaluated, part=part, world_size=2)[0][0]
    _assert_equal(state, _plain().get_submodule(part).state_dict())


def test_a_plain_module_gives_its_state_dict() -> None:
    model = _plain()
    state = lightning_muon.full_state_dict(model)
    _assert_equal(state, model.state_dict())
    assert list(state) == list(model.state_dict())
    assert all(state[name].data_ptr() == tensor.data_ptr() for name, tensor in model.state_dict().items())
    assert full_state_dict(nn.ReLU()) == {}


def _plain_in_a_group() -> list[str]:
    return list(full_state_dict(nn.Linear(2, 1)))


def test_a_plain_module_of_several_ranks_gives_it_on_rank_0(gloo: ProcessPool) -> None:
    assert gloo.run(_plain_in_a_group, world_size=2) == [["weight", "bias"], []]
