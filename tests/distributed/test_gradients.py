"""Missing, frozen, unused, tied and broken gradients, with FSDP2 and with plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_muon import NonFiniteGradientError, ParallelMuon
from tests.reference.muon import ReferenceMuon
from tests.support.processes import ProcessPool

SHAPES = {"first": (13, 7), "second": (7, 13), "bias": (5,), "third": (6, 6)}


def _mesh(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _place(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(0)])


def _make(mesh: DeviceMesh) -> tuple[dict[str, nn.Parameter], ParallelMuon]:
    parameters = {name: nn.Parameter(_place(tensor, mesh)) for name, tensor in _tensors(0).items()}
    options = {"lr": 0.02, "compute_dtype": "float32", "chunk_bytes": 400}
    return parameters, ParallelMuon(parameters.items(), **options)  # type: ignore[arg-type]


def _full(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}  # type: ignore[attr-defined]


def _step_with_missing(missing: dict[int, list[str]]) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """One step; ``missing`` says which gradients a rank does not have. Returns weights and what was left untouched."""
    mesh = _mesh()
    parameters, optimizer = _make(mesh)
    grads = {name: _place(grad, mesh) for name, grad in _tensors(1).items()}
    for name, parameter in parameters.items():
        parameter.grad = None if name in missing.get(dist.get_rank(), []) else grads[name]
    before = {name: parameter.detach().to_local().clone() for name, parameter in parameters.items()}  # type: ignore[attr-defined]
    optimizer.step()
    untouched = {
        name: torch.equal(before[name], parameter.to_local()) and _is_zero(optimizer.state[parameter])  # type: ignore[attr-defined]
        for name, parameter in parameters.items()
    }
    return _full(parameters), untouched


def _is_zero(state: dict[str, Tensor]) -> bool:
    return all(not (value.to_local() if isinstance(value, DTensor) else value).any() for value in state.values())


def _grads_with_zero_rows(name: str, rank: int, world_size: int) -> dict[str, Tensor]:
    """The gradient that the group means when one rank has none for its rows."""
    grads = _tensors(1)
    rows = grads[name].chunk(world_size)[rank].shape[0]
    start = sum(part.shape[0] for part in grads[name].chunk(world_size)[:rank])
    grads[name][start : start + rows] = 0
    return grads


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_one_rank_lacks_counts_as_zero_there(gloo: ProcessPool, world_size: int) -> None:
    results = gloo.run(_step_with_missing, {1: ["first"]}, world_size=world_size)
    reference = ReferenceMuon({name: t for name, t in _tensors(0).items() if name != "bias"}, lr=0.02)
    grads = _grads_with_zero_rows("first", 1, world_size)
    reference.step({name: grad for name, grad in grads.items() if name != "bias"})
    for weights, _ in results:
        for name, expected in reference.matrices.items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)


def test_a_gradient_that_no_rank_has_leaves_parameter_and_state_untouched(gloo: ProcessPool) -> None:
    nobody = {rank: ["second", "bias"] for rank in range(3)}
    for _, untouched in gloo.run(_step_with_missing, nobody, world_size=3):
        assert untouched == {"first": False, "second": True, "bias": True, "third": False}


def _step_with_frozen_then_thawed() -> list[bool]:
    mesh = _mesh()
    parameters, optimizer = _make(mesh)
    parameters["second"].requires_grad_(False)
    moved: list[bool] = []
    for step in range(2):
        before = _full(parameters)["second"]
        for name, grad in _tensors(1 + step).items():
            parameters[name].grad = _place(grad, mesh) if parameters[name].requires_grad else None
        optimizer.step()
        moved.append(not torch.equal(before, _full(parameters)["second"]))
        parameters["second"].requires_grad_(True)
    return moved


def test_a_frozen_matrix_rests_and_a_thawed_one_moves(gloo: ProcessPool) -> None:
    assert gloo.run(_step_with_frozen_then_thawed, world_size=3) == [[False, True]] * 3


class Tied(nn.Module):
    """Embedding tied to the output layer, one hidden layer, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 5)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def _train_tied(mesh_shape: tuple[int, ...] | None) -> dict[str, Tensor]:
    """Ten steps on the same global batch; ``None`` trains in one process without FSDP."""
    torch.manual_seed(0)
    model = Tied()
    if mesh_shape is not None:
        fully_shard(model, mesh=_mesh(mesh_shape))
    optimizer = ParallelMuon(model, lr=0.02, compute_dtype="float32")
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        tokens = torch.randint(11, (12, 5), generator=generator)
        mine = tokens if mesh_shape is None else tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (4, 1)], ids=str)
def test_fsdp2_trains_a_tied_model_like_one_process(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    world_size = int(torch.tensor(mesh_shape).prod())
    expected = _train_tied(None)
    for result in gloo.run(_train_tied, mesh_shape, world_size=world_size):
        for name in expected:
            # The mean of per-rank means adds in another order; Newton-Schulz amplifies the last bit of the gradient.
            torch.testing.assert_close(result[name], expected[name], rtol=0, atol=2e-5)


def _nan_on_one_rank() -> None:
    mesh = _mesh()
    parameters, optimizer = _make(mesh)
    optimizer._finite_check.max_skipped_steps = 0
    for step in range(2):
        for name, grad in _tensors(1 + step).items():
            parameters[name].grad = _place(grad, mesh)
        if step:
            before = _full(parameters)
            if dist.get_rank() == 1:
                parameters["second"].grad.to_local()[0, 0] = torch.nan  # type: ignore[union-attr]
        else:
            optimizer.step()
    momentum = optimizer.state[parameters["second"]]["momentum_buffer"].full_tensor()
    try:
        optimizer.step()
    finally:
        after = _full(parameters)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert torch.equal(momentum, optimizer.state[parameters["second"]]["momentum_buffer"].full_tensor())


def test_a_nan_on_one_rank_stops_all_ranks_and_changes_nothing(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(
        _nan_on_one_rank, match="gradient of second", exception=NonFiniteGradientError, world_size=3
    )


def _different_models() -> None:
    mesh = _mesh()
    size = 8 if dist.get_rank() == 0 else 9
    parameter = nn.Parameter(_place(torch.ones(8, 4), mesh))
    other = nn.Parameter(distribute_tensor(torch.ones(size, 4), mesh, [Shard(0)], src_data_rank=None))
    optimizer = ParallelMuon([("same.weight", parameter), ("other.weight", other)])
    parameter.grad, other.grad = torch.ones_like(parameter), torch.ones_like(other)
    optimizer.step()


def test_different_parameters_on_two_ranks_are_refused_on_all(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_different_models, match="other.weight", exception=RuntimeError, world_size=3)


def _nothing_for_muon() -> None:
    parameter = nn.Parameter(_place(torch.ones(8), _mesh()))
    optimizer = ParallelMuon([("norm.weight", parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_nothing_for_muon_is_an_error_that_lists_the_parameters(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_nothing_for_muon, match="norm.weight", exception=ValueError, world_size=2)


def _partial_sum(lacking_rank: int | None) -> bool:
    """A replicated weight whose gradient is still a sum over the ranks."""
    mesh = _mesh()
    weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Replicate()]))
    optimizer = ParallelMuon([weight], lr=0.02, compute_dtype="float32", wire_dtype="float32")
    torch.manual_seed(0)
    full = torch.randn(6, 6)
    if dist.get_rank() != lacking_rank:
        share = full / dist.get_world_size()
        weight.grad = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    optimizer.step()
    reference = ReferenceMuon({"weight": torch.ones(6, 6)}, lr=0.02)
    reference.step({"weight": full})
    torch.testing.assert_close(weight.detach().full_tensor(), reference.matrices["weight"], rtol=0, atol=1e-6)  # type: ignore[attr-defined]
    return True


def test_a_partial_sum_is_reduced_before_it_is_used(gloo: ProcessPool) -> None:
    assert all(gloo.run(_partial_sum, None, world_size=2))


def test_a_partial_sum_that_a_rank_lacks_stops_all_ranks(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_partial_sum, 1, match="partial sum", exception=TypeError, world_size=2)
