"""New values reach all ranks, on one node and over several."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lightning_muon.comm.groups import make_hops
from lightning_muon.grad_sync.parameter_all_gather import ParameterAllGather, units_of
from lightning_muon.grad_sync.shard_map import ShardMap, place_shards
from lightning_muon.params.layout import OwnedBy
from tests.support.processes import ProcessPool

CASES = [((1,), 3), ((2,), 1), ((3,), 3), ((4,), 1), ((2, 2), 100), ((2, 1), 3)]
SHAPES: dict[str, tuple[int, ...]] = {"odd": (13, 7), "few_rows": (2, 5), "scalar": (), "bias": (5,)}
SHAPES |= {"convolution": (4, 3, 2, 2), "empty": (0, 4), "large": (40, 9), "one": (1,)}


class Block(nn.Module):
    """Two layers; notes which buckets are on their way when its forward begins."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width + 3)
        self.second = nn.Linear(width + 3, width)
        self.returns: ParameterAllGather | None = None
        self.seen: tuple[int, ...] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.returns is not None:
            self.seen = self.returns.travelling
        return inputs + self.second(torch.tanh(self.first(inputs)))


class Model(nn.Module):
    """An embedding tied to the head, three blocks and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def _returns(
    model: nn.Module, units: Sequence[nn.Module], mesh_shape: tuple[int, ...], num_in_bucket: int = 3
) -> tuple[list[nn.Parameter], ShardMap, ParameterAllGather]:
    """Parameters in backward order; every second matrix is owned whole, everything else is divided by rows."""
    parameters = list(model.parameters())[::-1]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1 and parameter.numel()]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    costs = {matrix: matrix.numel() for matrix in matrices[::2]}
    shard_map = ShardMap(mesh, place_shards(parameters, costs, mesh_shape[-1]))
    buckets = [parameters[start : start + num_in_bucket] for start in range(0, len(parameters), num_in_bucket)]
    hops = make_hops(shard_map.shard)
    return parameters, shard_map, ParameterAllGather(shard_map, buckets, hops, units_of(model, units))


def _update(shard_map: ShardMap, parameter: Tensor, delta: Tensor) -> None:
    local = shard_map.local(parameter)
    if local.numel():  # An empty update would count as a write to the whole.
        local.add_(shard_map.local(parameter, delta))


def _deltas(parameters: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator).to(parameter.dtype) for parameter in parameters]


def _shapes_model(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    return model


def _three_steps(mesh_shape: tuple[int, ...], num_in_bucket: int, dtype: torch.dtype) -> None:
    """Ranks update in orders of their own; values are those of one process, bit for bit."""
    model, expected = _shapes_model(dtype), _shapes_model(dtype)
    parameters, shard_map, returns = _returns(model, [], mesh_shape, num_in_bucket)
    for step in range(3):
        returns.begin(set(parameters))
        deltas = _deltas(parameters, 10 + step)
        order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(dist.get_rank() + 10 * step))
        for index in order.tolist():
            _update(shard_map, parameters[index], deltas[index])
            returns.updated([parameters[index]])
        returns.finish_updates()
        if step != 1:  # The next begin waits too.
            returns.wait_all()
        with torch.no_grad():
            for parameter, delta in zip(list(expected.parameters())[::-1], deltas, strict=True):
                parameter.add_(delta)
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize(("mesh_shape", "num_in_bucket"), CASES, ids=str)
def test_new_values_arrive_whatever_the_order_of_updates(
    gloo: ProcessPool, mesh_shape: tuple[int, ...], num_in_bucket: int
) -> None:
    world_size = int(torch.tensor(mesh_shape).prod())
    gloo.run(_three_steps, mesh_shape, num_in_bucket, torch.float32, world_size=world_size)


def test_bfloat16_travels_too(gloo: ProcessPool) -> None:
    gloo.run(_three_steps, (3,), 3, torch.bfloat16, world_size=3)


def _step(
    parameters: Sequence[nn.Parameter], shard_map: ShardMap, returns: ParameterAllGather, seed: int = 1
) -> dict[Tensor, Tensor]:
    """Update everything; return the values that all ranks shall have."""
    returns.begin(set(parameters))
    expected: dict[Tensor, Tensor] = {}
    for parameter, delta in zip(parameters, _deltas(parameters, seed), strict=True):
        expected[parameter] = parameter.detach() + delta
        _update(shard_map, parameter, delta)
        returns.updated([parameter])
    returns.finish_updates()
    return expected


def _all_equal(expected: dict[Tensor, Tensor]) -> bool:
    return all(torch.equal(parameter, value) for parameter, value in expected.items())


def _forward_after_a_step() -> dict[str, Any]:
    model, tokens = Model(), torch.arange(11)
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),), 4)
    for block in model.blocks:
        block.returns = returns  # type: ignore[assignment]
    expected = _step(parameters, shard_map, returns)
    left = returns.travelling
    logits = model(tokens)
    reference = Model()
    for parameter, other in zip(parameters, list(reference.parameters())[::-1], strict=True):
        other.data = expected[parameter]
    assert torch.equal(logits, reference(tokens))
    return {"left": left, "seen": [block.seen for block in model.blocks], "after": returns.travelling}


def test_a_forward_waits_only_for_the_buckets_of_its_own_unit(gloo: ProcessPool) -> None:
    # Bucket 0: norm and half of block 2; 1: the rest of it and half of block 1; 2: half of 1 and of 0; 3: the rest.
    for result in gloo.run(_forward_after_a_step, world_size=3):
        assert result["left"] == (0, 1, 2, 3)
        # The root uses norm and embedding: buckets 0 and 3. Block 0 is in 2 and 3.
        assert result["seen"] == [(1,), (), ()]
        assert result["after"] == ()


def _inner_modules() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),), 1)
    expected = _step(parameters, shard_map, returns)
    layer = model.blocks[1].first
    layer(torch.ones(5))  # type: ignore[operator]
    assert all(torch.equal(parameter, expected[parameter]) for parameter in layer.parameters())  # type: ignore[union-attr]
    assert len(returns.travelling) == 13
    model.head(torch.ones(5))
    assert torch.equal(model.embedding.weight, expected[model.embedding.weight])
    assert len(returns.travelling) == 12


def test_a_module_inside_a_unit_waits_for_its_parameters(gloo: ProcessPool) -> None:
    gloo.run(_inner_modules, world_size=2)


def _subsets() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),), 3)
    buckets = {parameter: index // 3 for index, parameter in enumerate(parameters)}
    for step, chosen in enumerate([parameters[:2], parameters[1:9:3], [], parameters[-1:], parameters]):
        before = {parameter: parameter.detach().clone() for parameter in parameters}
        expected = _step(chosen, shard_map, returns, seed=step)
        assert returns.travelling == tuple(sorted({buckets[parameter] for parameter in chosen}))
        returns.wait_all()
        assert _all_equal(before | expected)


def test_only_buckets_of_participating_parameters_travel(gloo: ProcessPool) -> None:
    gloo.run(_subsets, world_size=3)


def _bucket_order() -> None:
    model = Model()
    parameters, _, returns = _returns(model, list(model.blocks), (dist.get_world_size(),), 3)
    returns.begin(parameters[3:9])
    returns.updated(parameters[6:9])
    assert returns.travelling == ()
    returns.updated(parameters[3:5])
    assert returns.travelling == ()
    returns.updated(parameters[5:6])
    assert returns.travelling == (1, 2)
    returns.finish_updates()
    returns.wait(parameters[8:9])
    assert returns.travelling == (1,)
    returns.wait([nn.Parameter(torch.ones(2)), *parameters[3:4]])
    assert returns.travelling == ()


def test_buckets_leave_in_order_when_they_are_complete(gloo: ProcessPool) -> None:
    gloo.run(_bucket_order, world_size=2)


def _state_dicts() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),))
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {names[tensor]: value for tensor, value in _step(parameters, shard_map, returns).items()}
    state = model.state_dict()
    assert returns.travelling == ()
    assert all(torch.equal(state[name], value) for name, value in expected.items())

    old = {name: value.clone() for name, value in state.items()}
    _step(parameters, shard_map, returns, seed=2)
    model.load_state_dict(old)
    assert returns.travelling == ()
    returns.wait_all()
    assert all(torch.equal(parameter, old[name]) for name, parameter in model.named_parameters())

    expected = {names[tensor]: value for tensor, value in _step(parameters, shard_map, returns, seed=3).items()}
    inner = model.blocks[2].first.state_dict()
    assert torch.equal(inner["weight"], expected["blocks.2.first.weight"])


def test_state_dict_has_new_values_and_loaded_ones_stay(gloo: ProcessPool) -> None:
    gloo.run(_state_dicts, world_size=3)


def _copies() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = _step(parameters, shard_map, returns)
    for other in copies:
        other(torch.arange(4))
        other.state_dict()
        assert len(returns.travelling) == 5
    returns.close()
    assert not returns.travelling, "what still arrives is taken"
    assert _all_equal(expected)
    returns.begin(set(parameters))
    returns.updated(parameters)
    returns.finish_updates()
    model(torch.arange(4))
    model.state_dict()
    assert len(returns.travelling) == 5, "there are no hooks any more"
    returns.wait_all()


def test_copies_of_the_model_and_closed_hooks_wait_for_nothing(gloo: ProcessPool) -> None:
    gloo.run(_copies, world_size=2)


def _compiled() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),), 1)
    num_graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        num_graphs[-1] += 1
        return graph

    compiled = torch.compile(model, backend=backend)
    tokens = torch.arange(11)
    for seed in range(3):
        expected = _step(parameters, shard_map, returns, seed=seed)
        num_graphs.append(0)
        logits = compiled(tokens)
        assert returns.travelling == ()
        assert _all_equal(expected)
        num_graphs.append(0)
        assert torch.equal(logits, compiled(tokens))
        assert torch.equal(logits, model(tokens))
    assert num_graphs[0] > 0
    assert num_graphs[1:] == [0] * 5


def test_a_compiled_model_waits_in_every_step(gloo: ProcessPool) -> None:
    gloo.run(_compiled, world_size=2)


def _old_backward(num_in_bucket: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    parameters, shard_map, returns = _returns(model, [], (dist.get_world_size(),), num_in_bucket)
    assert shard_map.placements(model[1].weight) == (OwnedBy(0),)
    old_loss = model(torch.ones(4)).sum()
    _step(parameters, shard_map, returns)
    returns.wait_all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old_loss.backward()


@pytest.mark.parametrize("num_in_bucket", [1, 2])
def test_a_backward_of_before_the_step_is_refused(gloo: ProcessPool, num_in_bucket: int) -> None:
    gloo.run(_old_backward, num_in_bucket, world_size=3)


def _large() -> None:
    model = nn.Sequential(nn.Linear(1100, 1500), nn.Linear(1500, 700), nn.Linear(700, 1100))
    parameters, shard_map, returns = _returns(model, list(model), (dist.get_world_size(),), 2)
    for seed in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        _step(parameters, shard_map, returns, seed=seed)
        model(torch.ones(1100))
        for parameter, old, delta in zip(parameters, before, _deltas(parameters, seed), strict=True):
            assert torch.equal(parameter, old + delta)


def test_messages_of_megabytes_arrive_whole(gloo: ProcessPool) -> None:
    gloo.run(_large, world_size=4)


def _misuse() -> None:
    model = Model()
    parameters, shard_map, returns = _returns(model, list(model.blocks), (dist.get_world_size(),))
    with pytest.raises(ValueError, match=r"\(3, 2\).* in no bucket"):
        returns.begin([nn.Parameter(torch.ones(3, 2))])
    returns.begin(parameters)
    returns.begin(parameters[:4])  # Nothing was updated yet, so the step may be dropped.
    with pytest.raises(ValueError, match="not told of, or twice"):
        returns.updated(parameters[4:5])
    returns.updated(parameters[1:2])
    with pytest.raises(ValueError, match="not told of, or twice"):
        returns.updated(parameters[1:2])
    with pytest.raises(RuntimeError, match="finish_updates"):
        model(torch.arange(3))
    with pytest.raises(RuntimeError, match="broken off"):
        returns.begin(parameters)
    hops, units = make_hops(shard_map.shard), units_of(model, [])
    with pytest.raises(ValueError, match="several buckets"):
        ParameterAllGather(shard_map, [parameters, parameters[:1]], hops, units)
    mixed = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    with pytest.raises(ValueError, match="bucket 0 mixes"):
        ParameterAllGather(ShardMap(shard_map.mesh, dict.fromkeys(mixed, Shard(0))), [mixed], hops, units)


def test_misuse_is_an_error_before_anything_is_sent(gloo: ProcessPool) -> None:
    gloo.run(_misuse, world_size=2)


# The first two matrices have an owner; the others are divided by rows, some of fewer rows than ranks.
NODE_SHAPES = [(13, 7), (40, 9), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (1,)]
Setup = tuple[list[nn.Parameter], ShardMap, ParameterAllGather]


def _setup(num_in_bucket: int, grid: list[list[int]]) -> Setup:
    generator = torch.Generator().manual_seed(7)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in NODE_SHAPES]
    model = nn.ParameterList(parameters)
    shard_map = ShardMap(init_device_mesh("cpu", (4,)), place_shards(parameters, dict.fromkeys(parameters[:2], 10), 4))
    buckets = [parameters[start : start + num_in_bucket] for start in range(0, len(parameters), num_in_bucket)]
    hops = make_hops(shard_map.shard, grid)
    return parameters, shard_map, ParameterAllGather(shard_map, buckets, hops, units_of(model, []))


def _step_of_nodes(setup: Setup, seed: int, *, skip: int | None = None) -> list[Tensor]:
    """Each rank updates its parts in an order of its own; returns the values that all of them shall have."""
    parameters, shard_map, returns = setup
    generator = torch.Generator().manual_seed(seed)
    expected = [parameter.detach() + torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    if skip is not None:
        expected[skip] = parameters[skip].detach().clone()
    chosen = [index for index in range(len(parameters)) if index != skip]
    returns.begin({parameters[index] for index in chosen})
    for position in torch.randperm(len(chosen), generator=torch.Generator().manual_seed(dist.get_rank())).tolist():
        index = chosen[position]
        local = shard_map.local(parameters[index])
        if local.numel():  # An empty update would count as a write to the whole.
            local.copy_(shard_map.local(parameters[index], expected[index]))
        returns.updated([parameters[index]])
    returns.finish_updates()
    return expected


def _steps(num_in_bucket: int, grid: list[list[int]]) -> None:
    parameters, _, returns = setup = _setup(num_in_bucket, grid)
    for seed, skip in enumerate([None, 1, None, 4]):  # The parameters of a bucket vary.
        expected = _step_of_nodes(setup, seed, skip=skip)
        returns.wait_all()
        assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, expected, strict=True))


@pytest.mark.parametrize(("num_in_bucket", "grid"), [(1, [[0, 1], [2, 3]]), (3, [[0, 2], [1, 3]])], ids=str)
def test_all_ranks_hold_the_new_values(gloo: ProcessPool, num_in_bucket: int, grid: list[list[int]]) -> None:
    gloo.run(_steps, num_in_bucket, grid)


def _wait_alone() -> None:
    """Rank 0 reads all values while no other rank asks for any."""
    parameters, _, returns = setup = _setup(2, [[0, 1], [2, 3]])
    expected = _step_of_nodes(setup, 1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        returns.wait_all()
        store.set("rank 0 has read", "")
    store.wait(["rank 0 has read"])
    returns.wait_all()
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, expected, strict=True))


def test_a_rank_that_reads_values_alone_waits_for_nobody(gloo: ProcessPool) -> None:
    gloo.run(_wait_alone)
