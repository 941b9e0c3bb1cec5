"""New values reach all ranks, and whoever reads parameters waits for them."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.params.layout import OwnedBy
from lightning_muon.sharding.units import units_of
from lightning_muon.sharding.zero2 import ShardMap, Zero2Layout
from tests.distributed.sharding.reducer_setup import shard_map_of
from tests.support.processes import ProcessPool

# Every second matrix has an owner; the others are divided by rows, some of fewer rows than ranks.
SHAPES = [(13, 7), (2, 5), (), (5,), (4, 3, 2, 2), (0, 4), (40, 9), (1,)]


class Block(nn.Module):
    """Notes which buckets are on their way when its forward begins."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width + 3)
        self.second = nn.Linear(width + 3, width)
        self.layout: Zero2Layout | None = None
        self.seen: list[int] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.layout is not None:
            self.seen = list(self.layout.travelling)
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


Setup = tuple[list[nn.Parameter], ShardMap, Zero2Layout]


def _setup(
    model: nn.Module,
    units: Sequence[nn.Module] = (),
    mesh_shape: tuple[int, ...] | None = None,
    num_in_bucket: int = 3,
) -> Setup:
    """Parameters in backward order; every second matrix is owned whole."""
    parameters = list(model.parameters())[::-1]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1 and parameter.numel()]
    costs = {matrix: matrix.numel() for matrix in matrices[::2]}
    shard_map = shard_map_of(parameters, costs, mesh_shape or (dist.get_world_size(),))
    buckets = [parameters[start : start + num_in_bucket] for start in range(0, len(parameters), num_in_bucket)]
    return parameters, shard_map, Zero2Layout(shard_map, buckets, units_of(model, units))


def _step(setup: Setup, seed: int = 1, *, chosen: Sequence[Tensor] | None = None) -> dict[Tensor, Tensor]:
    """Update everything, and say so of the first half; return the values that all ranks shall have."""
    parameters, shard_map, layout = setup
    generator = torch.Generator().manual_seed(seed)
    layout.begin_step(set(parameters if chosen is None else chosen))
    expected: dict[Tensor, Tensor] = {parameter: parameter.detach().clone() for parameter in parameters}
    for parameter in parameters if chosen is None else chosen:
        expected[parameter] += torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        local = shard_map.local(parameter)
        if local.numel():  # An empty update would count as a write to the whole.
            local.copy_(shard_map.local(parameter, expected[parameter]))
    layout.updated(parameters[: len(parameters) // 2])
    layout.end_step()
    return expected


def _all_equal(expected: dict[Tensor, Tensor]) -> bool:
    return all(torch.equal(parameter, value) for parameter, value in expected.items())


def _steps(mesh_shape: tuple[int, ...], num_in_bucket: int, dtype: torch.dtype) -> None:
    """Values are those of one process, bit for bit; the parameters of a bucket vary."""
    generator = torch.Generator().manual_seed(7)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES)
    parameters, _, layout = setup = _setup(model, (), mesh_shape, num_in_bucket)
    for seed, skip in enumerate([None, 1, None, 4]):
        expected = _step(setup, seed, chosen=[p for index, p in enumerate(parameters) if index != skip])
        if seed != 1:  # The next begin waits too.
            layout.wait_all()
            assert _all_equal(expected)


@pytest.mark.parametrize(
    ("mesh_shape", "num_in_bucket"),
    [((1,), 3), ((2,), 1), ((3,), 3), ((4,), 1), ((2, 2), 100), ((2, 1), 3)],
    ids=str,
)
def test_new_values_arrive_on_all_ranks(gloo: ProcessPool, mesh_shape: tuple[int, ...], num_in_bucket: int) -> None:
    dtype = torch.bfloat16 if mesh_shape == (3,) else torch.float32
    gloo.run(_steps, mesh_shape, num_in_bucket, dtype, world_size=int(torch.tensor(mesh_shape).prod()))


def _inner_modules() -> None:
    """A module inside a unit waits for its own parameters only."""
    model = Model()
    _, _, layout = setup = _setup(model, list(model.blocks), num_in_bucket=1)
    expected = _step(setup)
    layer = model.blocks[1].first
    layer(torch.ones(5))  # type: ignore[operator]
    assert all(torch.equal(parameter, expected[parameter]) for parameter in layer.parameters())  # type: ignore[union-attr]
    assert len(layout.travelling) == 13
    model.head(torch.ones(5))
    assert torch.equal(model.embedding.weight, expected[model.embedding.weight])
    assert len(layout.travelling) == 12


def _subsets() -> None:
    """Only the buckets of participating parameters travel."""
    model = Model()
    parameters, _, layout = setup = _setup(model, list(model.blocks))
    for places in ([1, 4, 7], [], [len(parameters) - 1]):
        expected = _step(setup, chosen=[parameters[place] for place in places])
        assert set(layout.travelling) == {place // 3 for place in places}
        layout.wait_all()
        assert _all_equal(expected)


def _state_dicts() -> None:
    """A state dict has the new values, and loaded ones stay."""
    model = Model()
    _, _, layout = setup = _setup(model, list(model.blocks))
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {names[tensor]: value for tensor, value in _step(setup).items()}
    state = model.state_dict()
    assert not layout.travelling
    assert all(torch.equal(state[name], value) for name, value in expected.items())

    old = {name: value.clone() for name, value in state.items()}
    _step(setup, seed=2)
    model.load_state_dict(old)
    assert not layout.travelling
    assert all(torch.equal(parameter, old[name]) for name, parameter in model.named_parameters())

    expected = {names[tensor]: value for tensor, value in _step(setup, seed=3).items()}
    inner = model.blocks[2].first.state_dict()
    assert torch.equal(inner["weight"], expected["blocks.2.first.weight"])


def _copies() -> None:
    """Copies of the model, and hooks that were removed, wait for nothing."""
    model = Model()
    _, _, layout = setup = _setup(model, list(model.blocks))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = _step(setup)
    for other in copies:
        other(torch.arange(4))
        other.state_dict()
        assert len(layout.travelling) == 5
    layout.close()
    assert not layout.travelling, "what still arrives is taken"
    assert _all_equal(expected)
    _step(setup)
    model(torch.arange(4))
    model.state_dict()
    assert len(layout.travelling) == 5, "there are no hooks any more"
    layout.wait_all()


def _compiled() -> None:
    """A compiled model waits in every step."""
    model = Model()
    _, _, layout = setup = _setup(model, list(model.blocks), num_in_bucket=1)
    num_graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        num_graphs[-1] += 1
        return graph

    compiled = torch.compile(model, backend=backend)
    tokens = torch.arange(11)
    for seed in range(3):
        expected = _step(setup, seed)
        num_graphs.append(0)
        logits = compiled(tokens)
        assert not layout.travelling
        assert _all_equal(expected)
        num_graphs.append(0)
        assert torch.equal(logits, compiled(tokens))
        assert torch.equal(logits, model(tokens))
    assert num_graphs[0] > 0
    assert num_graphs[1:] == [0] * 5


def _old_backward() -> None:
    """A backward pass of a forward before the step is refused; values that arrive in place or through a buffer."""
    for num_in_bucket in (1, 2):
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
        _, shard_map, layout = setup = _setup(model, num_in_bucket=num_in_bucket)
        assert shard_map.placements(model[1].weight) == (OwnedBy(0),)
        old_loss = model(torch.ones(4)).sum()
        _step(setup)
        layout.wait_all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old_loss.backward()


def _broken_off() -> None:
    """A step that was broken off is an error."""
    model = Model()
    parameters, _, layout = _setup(model, list(model.blocks))
    layout.begin_step(parameters[:4])
    with pytest.raises(RuntimeError, match="while a step updates them"):
        model(torch.arange(3))
    with pytest.raises(RuntimeError, match="broken off"):
        layout.begin_step(parameters)


def _wait_alone() -> None:
    """Rank 0 reads all values while no other rank asks for any."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)
    _, _, layout = setup = _setup(model, num_in_bucket=2)
    expected = _step(setup)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        layout.wait_all()
        store.set("rank 0 has read", "")
    store.wait(["rank 0 has read"])
    layout.wait_all()
    assert _all_equal(expected)


@pytest.mark.parametrize(
    ("steps", "world_size"),
    [
        (_inner_modules, 2),
        (_subsets, 3),
        (_state_dicts, 3),
        (_copies, 2),
        (_compiled, 2),
        (_old_backward, 3),
        (_broken_off, 2),
        (_wait_alone, 2),
    ],
)
def test_whoever_reads_parameters_gets_new_values(
    gloo: ProcessPool, steps: Callable[[], None], world_size: int
) -> None:
    gloo.run(steps, world_size=world_size)
