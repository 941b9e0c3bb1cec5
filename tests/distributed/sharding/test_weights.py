"""Weights of all ranks: equal at the start, or an error on all of them; whole on demand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon.checkpoint.saving import full_state_dict
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.training import mesh_of, model
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, whole


def _plain() -> nn.Module:
    """The odd model, with buffers: those of a batch norm that has seen a batch, and one that state dicts leave out."""
    net = model()
    # Without weights, because batch norm takes none in bfloat16 with statistics in float32.
    net.tail.last = nn.BatchNorm1d(11, affine=False)
    net.tail.last(torch.arange(66.0).view(6, 11).square())
    net.register_buffer("scratch", torch.zeros(3), persistent=False)
    return net.eval()


def _gather(shape: tuple[int, int], *, evaluated: bool, part: str) -> dict[str, Tensor]:
    net: Any = _plain()
    shard_model(net, mesh_of(shape), ModeOptions(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    if evaluated:
        with torch.no_grad():
            net(torch.arange(11)[None])
    assert isinstance(net.embedding.weight, DTensor) != evaluated  # The root stays whole after a forward.
    state = full_state_dict(net.get_submodule(part))
    assert isinstance(net.embedding.weight, DTensor) or part
    assert list(full_state_dict(nn.Linear(2, 1))) == ([] if dist.get_rank() else ["weight", "bias"]), "a plain module"
    if state and not part:
        assert state["tail.head.weight"].data_ptr() == state["embedding.weight"].data_ptr(), "tied"
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("shape", "evaluated", "part"), [((3, 1), False, ""), ((1, 2), True, ""), ((1, 2), False, "blocks")]
)
def test_rank_0_has_the_state_dict_of_the_plain_model(
    gloo: ProcessPool, shape: tuple[int, int], evaluated: bool, part: str
) -> None:
    state, *others = gloo.run(_gather, shape, world_size=shape[0] * shape[1], evaluated=evaluated, part=part)
    expected = _plain().get_submodule(part).state_dict()
    torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)  # Of dtypes, too.
    assert all(type(each) is Tensor for each in state.values())
    assert all(other == {} for other in others)


def _initial(kind: str) -> tuple[dict[str, Any], Tensor]:
    """Strided weights, and buffers of any dtype; with "fsdp" replicas of what the user has sharded."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5), nn.Linear(5, 3))
    net[1].running_mean.normal_()
    net.register_buffer("phase", torch.rand(3).to(torch.complex64))
    net.register_buffer("mask", torch.rand(5) > 0.5)
    if kind == "fsdp":
        fully_shard(net[2], mesh=mesh_of((2, 2)))
        shard_model(net, mesh_of((2, 2)), ModeOptions())
    else:
        mesh = mesh_of((dist.get_world_size(),))
        if kind == "shards":
            fully_shard(net[1], mesh=mesh)
        elif kind == "meta":
            net[0].to("meta")
        elif kind == "different":
            net[0] = nn.Conv2d(3, 5 + rank // 2, 3)
        make_mode("ddp", mesh, ModeOptions()).prepare(net)
        assert all(parameter.is_contiguous() for parameter in net.parameters())
    return {name: whole(tensor) for name, tensor in net.state_dict().items()}, local_tensor(net[2].weight).clone()


def test_weights_and_buffers_of_any_kind_become_equal(gloo: ProcessPool) -> None:
    (first, shard), (_, other_shard), *replicas = gloo.run(_initial, "fsdp")
    assert torch.equal(shard, replicas[0][1]) and torch.equal(other_shard, replicas[1][1])
    assert not torch.equal(shard[: other_shard.shape[0]], other_shard)
    assert all(are_equal(state.values(), first.values()) for state, _ in replicas)


def test_weights_and_buffers_are_those_of_the_first_rank(gloo: ProcessPool) -> None:
    (first, _), *others = gloo.run(_initial, "ddp", world_size=3)
    torch.manual_seed(0)
    assert torch.equal(first["0.weight"], nn.Conv2d(3, 5, 3).weight)
    assert all(are_equal(state.values(), first.values()) for state, _ in others)


def _initial_beside_tensor_parallel() -> list[Tensor]:
    """This rank's part of each weight, of which the ranks have begun with their own."""
    meshes = MeshSizes(shard_size=1, replicate_size=2, tensor_size=2).make("cpu", num_nodes=1, num_processes=4)
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(7, 14), nn.Linear(14, 7))
    parallelize_module(net, meshes.tensor, {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
    make_mode("fsdp", meshes.data, ModeOptions()).prepare(net)
    return [local_tensor(each.detach()).clone() for each in net.parameters()]


def test_weights_of_tensor_parallelism_become_equal_on_data_ranks(gloo: ProcessPool) -> None:
    first, second, *others = gloo.run(_initial_beside_tensor_parallel, world_size=4)
    assert are_equal(others[0], first) and are_equal(others[1], second) and not torch.equal(first[0], second[0])


def _shard_different(what: str) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    policies: dict[str, Any] = {
        "units": lambda name, _: name == str(1 + rank % 2),
        "class": ["Linear" if rank == 0 else "Missing"],
        "policy": lambda *_: {}["missing"] if rank == 1 else False,
    }
    try:
        shard_model(model, mesh_of((1, 3)), ModeOptions(wrap_policy=policies[what]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _different_beside_tensor_parallel(num_outputs: tuple[int, ...]) -> None:
    meshes = MeshSizes(shard_size=2, tensor_size=2).make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    model = nn.Sequential(nn.Linear(7, 14), nn.Linear(14, 7), nn.Linear(7, num_outputs[dist.get_rank()]))
    parallelize_module(model, meshes.tensor, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard_model(model, meshes.data, ModeOptions())


_BESIDE = r"Sequential differs between ranks: .*'2.weight' \([56], 7\) float32.*\([56], 7\)"


@pytest.mark.parametrize(
    ("program", "argument", "world_size", "exception", "match"),
    [
        (_initial, "shards", 2, ValueError, r"1\.weight \(5,\) is a DTensor already.* an earlier fit has"),
        (_initial, "meta", 2, ValueError, r"0\.weight \(5, 3, 3, 3\) is on the meta device"),
        (_initial, "different", 3, RuntimeError, "the model Sequential differs .*, rank 2 has"),
        (_shard_different, "units", 3, RuntimeError, "Sequential differs between ranks: .*FSDP2 unit"),
        (_shard_different, "class", 3, RuntimeError, "no module is a Missing"),
        (_shard_different, "policy", 3, RuntimeError, "KeyError"),
        (_different_beside_tensor_parallel, (5, 6, 5, 5), 4, RuntimeError, _BESIDE),
        # All data ranks of one tensor rank agree with each other, but not with the other tensor rank.
        (_different_beside_tensor_parallel, (5, 6, 5, 6), 4, RuntimeError, _BESIDE),
    ],
)
def test_what_differs_or_cannot_be_divided_is_an_error_everywhere(
    gloo: ProcessPool, program: Any, argument: Any, world_size: int, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(program, argument, world_size=world_size, exception=exception, match=match)
