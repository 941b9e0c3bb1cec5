"""Every rank gets the mean of all ranks' gradients, whatever the ranks compute, and most of it leaves early."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.sharding.reducer_setup import (
    ALL_REDUCE,
    HOLDERS,
    SAME,
    USES,
    Setup,
    SparseAndHalf,
    odd_loss,
)
from tests.support.processes import ProcessPool

BOTH = pytest.mark.parametrize("kind", [ALL_REDUCE, HOLDERS])


def _train(kind: str, mesh_shape: tuple[int, ...]) -> list[set[str]]:
    setup = Setup(kind, mesh_shape)
    return [setup.step(odd_loss(step, uses)) for step, uses in enumerate(USES)]


@pytest.mark.parametrize(
    ("kind", "mesh_shape"),
    [*((kind, (size,)) for kind in (ALL_REDUCE, HOLDERS) for size in (1, 3, 4)), (HOLDERS, (2, 2)), (HOLDERS, (2, 1))],
)
def test_the_mean_is_exact_whatever_parameters_ranks_use(
    gloo: ProcessPool, kind: str, mesh_shape: tuple[int, ...]
) -> None:
    world_size = int(torch.tensor(mesh_shape).prod())
    for present in gloo.run(_train, kind, mesh_shape, world_size=world_size):
        for uses, names in zip(USES, present, strict=True):
            used = {index for own in uses[:world_size] for index in own}
            assert {name for name in names if name.startswith("branches")} == {
                f"branches.{index}.{kind}" for index in used for kind in ("weight", "bias")
            }
            assert not any(name.startswith(("unused", "frozen")) for name in names)
            assert {"embedding.weight", "scale", "empty", "hidden.bias"} <= names


def _passes(kind: str) -> None:
    """Gradients add up over steps without ``zero_grad``, and over two passes before one sum."""
    setup = Setup(kind, (dist.get_world_size(),))
    for step in range(3):
        setup.backward(odd_loss(step, USES[step]))
        setup.finish()
        setup.check()
    setup.zero_grad()
    assert setup.check() == set()
    setup.backward(odd_loss(0, USES[0]))
    assert setup.step(odd_loss(1, USES[1]))


def _thaw(kind: str) -> None:
    setup = Setup(kind, (dist.get_world_size(),))
    present: list[set[str]] = []
    for step, (name, is_trainable) in enumerate([("frozen", True), ("hidden", False), ("hidden", True)]):
        for each in (setup.model, setup.reference):
            each.get_submodule(name).requires_grad_(is_trainable)
        present.append({name.split(".")[0] for name in setup.step(odd_loss(step, SAME))} & {"frozen", "hidden"})
    assert present == [{"frozen", "hidden"}, {"frozen"}, {"frozen", "hidden"}]


def _idle(kind: str) -> None:
    """Rank 1 has no backward pass in the first two steps, nobody in the third."""
    setup = Setup(kind, (dist.get_world_size(),))
    loss = odd_loss(0, SAME)
    for step in range(4):
        if step < 2:
            setup.refer(lambda model, rank: torch.zeros(()) if rank == 1 else loss(model, rank))
            if dist.get_rank() != 1:
                loss(setup.model, dist.get_rank()).backward()
        elif step == 3:
            setup.backward(loss)
        setup.finish()
        assert bool(setup.check()) == (step != 2)
        setup.zero_grad()


def _come_into_use(kind: str) -> None:
    """One bucket: rank 0 has launched it without the branch that nobody has used before; rank 1 follows."""
    setup = Setup(kind, (dist.get_world_size(),), bucket_bytes=10**6)
    setup.step(odd_loss(0, [[0]] * 4))
    loss = odd_loss(1, SAME)
    setup.refer(lambda model, rank: torch.zeros(()) if rank == 1 else loss(model, rank))
    if dist.get_rank() != 1:
        loss(setup.model, dist.get_rank()).backward()
    setup.finish()
    assert "branches.1.weight" in setup.check()


def _divide_by(kind: str, divisor: float) -> None:
    setup = Setup(kind, (dist.get_world_size(),))
    for step in range(2):
        setup.backward(odd_loss(step, SAME))
        if step == 0:
            setup.reducer.set_divisor(divisor)
        setup.finish()
        setup.check(divisor)


def _divide_steps() -> None:
    """Only ``zero_grad`` between the steps, as an optimizer that knows no reducer does it."""
    setup = Setup(ALL_REDUCE, (dist.get_world_size(),))
    for step in range(3):
        with setup.reducer.no_sync():
            setup.backward(odd_loss(2 * step, USES[step]))
        gc.collect()
        setup.backward(odd_loss(2 * step + 1, USES[step]))
        setup.reducer.set_divisor(7.5 + step)
        setup.finish()
        setup.check(7.5 + step)
        setup.model.zero_grad()
        setup.reference.zero_grad()


def test_every_step_may_have_a_divisor_known_after_backward(gloo: ProcessPool) -> None:
    gloo.run(_divide_by, HOLDERS, 7.5, world_size=2)
    gloo.run(_divide_by, ALL_REDUCE, 2, world_size=2)
    gloo.run(_divide_steps, world_size=3)


@pytest.mark.parametrize(
    ("kind", "divisor", "match"),
    [(ALL_REDUCE, 7.5, "2 ranks.*7.5"), (HOLDERS, 0.0, "positive"), (HOLDERS, float("nan"), "positive")],
    ids=["would apply twice", "zero", "nan"],
)
def test_a_wrong_divisor_is_refused(gloo: ProcessPool, kind: str, divisor: float, match: str) -> None:
    gloo.expect_error_on_all_ranks(_divide_by, kind, divisor, match=match, world_size=2)


def _sparse_and_half(kind: str) -> None:
    torch.manual_seed(0)
    setup = Setup(kind, (dist.get_world_size(),), SparseAndHalf())
    for _ in range(2):
        setup.backward(lambda model, rank: model(torch.arange(rank, rank + 5)).square().mean())
        setup.finish()
        embedding = setup.reference.get_parameter("embedding.weight")
        assert embedding.grad is not None
        embedding.grad = embedding.grad.to_dense()
        # The reference adds up in bfloat16, whose last of 8 bits is 2**-8 of the value.
        assert len(setup.check(rtol=2**-6, atol=1e-4)) == 3
        setup.zero_grad()


def _refused(kind: str) -> None:
    width = 6 if kind == "different" and dist.get_rank() == 1 else 5
    model = nn.Linear(3, width, dtype=torch.complex64 if kind == "complex" else torch.float32)
    Setup(ALL_REDUCE, (2,), model)


@pytest.mark.parametrize(
    ("kind", "exception", "match"),
    [
        ("different", RuntimeError, "weight.*differs|differs.*weight"),
        ("complex", TypeError, r"weight \(5, 3\).*complex64"),
    ],
)
def test_what_cannot_be_reduced_is_refused_on_all_ranks(
    gloo: ProcessPool, kind: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_refused, kind, match=match, exception=exception, world_size=2)


def _communicate_in_hooks(kind: str) -> None:
    """Rank 0 is in a collective of the user's before any bucket is launched, rank 1 joins it after most have been."""
    model, total = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))), torch.tensor(1.0)
    setup = Setup(kind, (dist.get_world_size(),), model, bucket_bytes=1)

    def add(gradient: Tensor) -> None:
        dist.all_reduce(total)

    model[3 if dist.get_rank() == 0 else 0].weight.register_hook(add)
    setup.backward(lambda model, rank: model(torch.full((2, 5), rank + 1.0)).square().sum())
    setup.finish()
    # Gradients of up to 10.
    setup.check(rtol=1e-5, atol=1e-5)
    assert float(total) == 2.0


@BOTH
@pytest.mark.parametrize(
    ("steps", "world_size"),
    [
        (_passes, 3),
        (_thaw, 2),
        (_idle, 3),
        (_come_into_use, 2),
        (_sparse_and_half, 3),
        (_communicate_in_hooks, 2),
    ],
)
def test_sums_are_exact_in_unusual_steps(
    gloo: ProcessPool, kind: str, steps: Callable[[str], None], world_size: int
) -> None:
    gloo.run(steps, kind, world_size=world_size)
