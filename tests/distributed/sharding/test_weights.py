"""Weights of all ranks: equal at the start, whole on demand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_muon.checkpoint.saving import full_state_dict
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.models import Net, full, make_mesh, tokens_of_all
from tests.distributed.sharding.training import mesh_of
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


def _gather(shape: tuple[int, int], *, evaluated: bool, compiled: bool, part: str) -> tuple[dict[str, Tensor], bool]:
    model = _plain()
    if compiled:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    shard_model(model, make_mesh(shape), ModeOptions(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    if evaluated:
        with torch.no_grad():
            model(tokens_of_all(1)[0])
    assert isinstance(model.table.weight, DTensor) != evaluated  # The root stays whole after a forward.
    state = full_state_dict(model.get_submodule(part))
    assert isinstance(model.table.weight, DTensor) or part
    assert list(full_state_dict(nn.Linear(2, 1))) == ([] if dist.get_rank() else ["weight", "bias"]), "a plain module"
    tied = "head.weight" in state and state["head.weight"].data_ptr() == state["table.weight"].data_ptr()
    return {name: tensor.clone() for name, tensor in state.items()}, tied


def _assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert type(state[name]) is Tensor, name
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("shape", "evaluated", "compiled", "part"),
    [
        ((3, 1), False, False, ""),
        ((1, 2), True, False, ""),
        ((1, 2), False, True, ""),
        ((1, 2), True, False, "blocks"),
        ((1, 2), False, False, "table"),
    ],
)
def test_rank_0_has_the_state_dict_of_the_plain_model(
    gloo: ProcessPool, shape: tuple[int, int], evaluated: bool, compiled: bool, part: str
) -> None:
    options = {"evaluated": evaluated, "compiled": compiled, "part": part}
    (state, tied), *others = gloo.run(_gather, shape, world_size=shape[0] * shape[1], **options)
    _assert_equal(state, _plain().get_submodule(part).state_dict())
    assert tied == (part == "")
    assert all(other == {} for other, _ in others)


def _initial() -> tuple[dict[str, Any], Tensor]:
    """Strided weights, and buffers of any dtype; replicas of what the user has sharded."""
    mesh = make_mesh((2, 2))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5), nn.Linear(5, 3))
    model.register_buffer("phase", torch.rand(3).to(torch.complex64))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    fully_shard(model[2], mesh=mesh)
    shard_model(model, mesh, ModeOptions())
    return {name: full(tensor) for name, tensor in model.state_dict().items()}, model[2].weight.to_local().clone()


def test_weights_and_buffers_of_any_kind_become_equal(gloo: ProcessPool) -> None:
    (first, shard), (_, other_shard), *replicas = gloo.run(_initial)
    assert torch.equal(shard, replicas[0][1]) and torch.equal(other_shard, replicas[1][1])
    assert not torch.equal(shard[: other_shard.shape[0]], other_shard)
    for state, _ in replicas:
        assert all(torch.equal(first[name], state[name]) for name in first)


def _replicated(kind: str) -> dict[str, Tensor]:
    rank, mesh = dist.get_rank(), mesh_of((dist.get_world_size(),))
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(3))
    net[1].running_mean.normal_()
    if kind == "shards":
        fully_shard(net[1], mesh=mesh)
    elif kind == "meta":
        net[0].to("meta")
    elif kind == "different":
        net[0] = nn.Conv2d(2, 3 + rank, 2)
    make_mode("ddp", mesh, ModeOptions()).prepare(net)
    assert all(parameter.is_contiguous() for parameter in net.parameters())
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_weights_and_buffers_are_those_of_the_first_rank(gloo: ProcessPool) -> None:
    first, *others = gloo.run(_replicated, "plain", world_size=3)
    torch.manual_seed(0)
    assert torch.equal(first["0.weight"], nn.Conv2d(2, 3, 2).weight)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize(
    ("kind", "exception", "match"),
    [
        ("shards", ValueError, r"1\.weight \(3,\) is a DTensor already.* an earlier fit has"),
        ("meta", ValueError, r"0\.weight \(3, 2, 2, 2\) is on the meta device"),
        ("different", RuntimeError, "the model Sequential differs"),
    ],
)
def test_what_cannot_be_replicated_is_an_error_everywhere(
    gloo: ProcessPool, kind: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_replicated, kind, world_size=2, exception=exception, match=match)
