"""Gathers that start during backward: the same weights bit for bit, whatever happens to the gradients afterwards."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.optim import gradients, step_plan
from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.params.layout import local_tensor
from lightning_muon.schedule.cost import CostModel
from tests.distributed.backward_passes import (
    BACKWARDS,
    Net,
    accumulated,
    branch_on_some_ranks,
    clipped,
    clipped_without_effect,
    make_optimizer,
    plain,
    reduced_again,
    sharded,
    tokens,
    without_sync,
)
from tests.support.processes import ProcessPool
from tests.support.recorded_ops import recorded_ops
from tests.support.tensors import are_equal, weights_of

NUM_STEPS = 4
EARLY = {"overlap": "backward"}
# With a host that sees no gradient before Newton-Schulz is under way, as on CUDA.
UNSEEN = EARLY | {"looks_at_once": False}


def _train(
    mesh_shape: tuple[int, ...], options: dict[str, Any], backward: Callable[[Net, ParallelMuon, int], None]
) -> dict[str, Tensor]:
    """The weights after some steps, each of which runs the program that was checked, op by op."""
    model = sharded(mesh_shape)
    optimizer = make_optimizer(model, **options)
    with recorded_ops() as recorded:
        for step in range(NUM_STEPS):
            backward(model, optimizer, step)
            optimizer.step()
            assert any(name.startswith("update") for name in recorded.check())
    return weights_of(model)


def _compare(
    mesh_shape: tuple[int, ...], variants: list[dict[str, Any]], backward: Callable[..., None], **common: Any
) -> list[str]:
    """Names of weights that differ from those of a step without any overlap; a variant may have ``looks_at_once``."""
    expected, different = _train(mesh_shape, {"overlap": "off", **common}, backward), list[str]()
    for options in variants:
        made = {key: value for key, value in options.items() if key != "looks_at_once"}
        with mock.patch.object(gradients, "_host_reads_at_once", return_value=options.get("looks_at_once", True)):
            weights = _train(mesh_shape, common | made, backward)
        different += [f"{options} {name}" for name in weights if not torch.equal(weights[name], expected[name])]
    return different


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda function: function.__name__.strip("_"))
def test_early_gathers_give_the_weights_of_a_serial_step(gloo: ProcessPool, backward: Callable[..., None]) -> None:
    # Where one rank differs, there are two others that do not.
    size = 3 if backward in (branch_on_some_ranks, reduced_again) else 2
    for differences in gloo.run(_compare, (size,), [EARLY, UNSEEN], backward, world_size=size):
        assert differences == []


VARIANTS = [
    {"overlap": overlap, "chunk_bytes": chunk_bytes, "look_ahead": look_ahead, "assignment": assignment}
    for overlap, look_ahead, assignment, chunk_bytes in (
        ("backward", 1, "round_robin", 700),
        ("backward", 2, "redundant", 1),
        ("step", 1, "lpt", 700),
        ("step", 3, "round_robin", 1),
        ("step", 2, "lpt", 10**6),
    )
]


# Every variant on three ranks, and what the size or replicas change; two ranks are those of the test above.
@pytest.mark.parametrize(
    ("mesh_shape", "variants", "backward"),
    [
        ((3,), VARIANTS, plain),
        ((4,), VARIANTS[1:2], plain),
        ((2, 2), [VARIANTS[3], {"dedupe": "always", "overlap": "step"}], plain),
        ((2, 2), [{"dedupe": "always", "overlap": "backward"}], clipped),
    ],
)
def test_every_schedule_gives_the_same_bits(
    gloo: ProcessPool, mesh_shape: tuple[int, ...], variants: list[dict[str, Any]], backward: Callable[..., None]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    for differences in gloo.run(_compare, mesh_shape, variants, backward, world_size=world_size):
        assert differences == []


def _count_early(backward: Callable[[Net, ParallelMuon, int], None], options: dict[str, Any]) -> list[tuple[int, int]]:
    """Buckets sent before the step begins, and those of them that counted, for each step."""
    model = sharded((dist.get_world_size(),))
    optimizer = make_optimizer(model, **options)
    counts: list[tuple[int, int]] = []
    with mock.patch.object(MatrixStep, "run", autospec=True, side_effect=MatrixStep.run) as run:
        for step in range(NUM_STEPS):
            backward(model, optimizer, step)
            early = optimizer._planned.early if optimizer._planned else None
            sent = sum(map(early.is_sent, early.keys(set(model.parameters())))) if early else 0
            optimizer.step()
            counts.append((sent, len(run.call_args.args[1].valid)))
    return counts


# Four matrices (first, second, branch, last) in buckets of two. The first step makes the plan; the second learns that
# the gradients of first and second come in two parts, because the forward pass uses them twice. FSDP2 of torch 2.11
# brings them in one.
LEARNT = [(0, 0), (2, 1 if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else 2), (2, 2), (2, 2)]
COUNTS: list[tuple[Callable[..., None], dict[str, Any], list[tuple[int, int]]]] = [
    (plain, EARLY, LEARNT),
    (plain, {"overlap": "step"}, [(0, 0)] * NUM_STEPS),
    # Several reductions are learnt; micro-batches without reduction send on the last one.
    (accumulated, EARLY, [(0, 0), (2, 0), (2, 2), (2, 2)]),
    (without_sync, EARLY, [(0, 0), (2, 1), (2, 2), (2, 2)]),
    # Gradients that always change are no longer sent early; clipping that changes nothing keeps the head start.
    (clipped, EARLY, [(0, 0), (2, 0), (2, 0), (0, 0)]),
    (clipped_without_effect, EARLY, LEARNT),
]


@pytest.mark.parametrize(("backward", "options", "expected"), COUNTS)
def test_buckets_are_sent_early_while_that_is_of_use(
    gloo: ProcessPool, backward: Callable[..., None], options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert gloo.run(_count_early, backward, options, world_size=2) == [expected] * 2


def _count_with_auto(bandwidth: float) -> tuple[list[tuple[int, int]], str]:
    machine = CostModel(flops_per_second=1e12, memory_bytes_per_second=1e12, bandwidth=(bandwidth,))
    with mock.patch.object(step_plan, "machine_of", return_value=machine):
        counts = _count_early(plain, {"overlap": "auto"})
        optimizer = make_optimizer(sharded((dist.get_world_size(),)), overlap="auto")
        optimizer.step()
    return counts, optimizer.summary().splitlines()[-1]


def test_auto_sends_early_over_slow_links_only_and_says_so(gloo: ProcessPool) -> None:
    head = "overlap='auto', 4 matrices on 2 ranks: gathers start"
    for counts, said in gloo.run(_count_with_auto, 1e3, world_size=2):
        assert counts == LEARNT
        assert said.startswith(f"{head} during backward; predicted: ")
    for counts, said in gloo.run(_count_with_auto, 1e12, world_size=2):
        assert counts == [(0, 0)] * NUM_STEPS
        assert said.startswith(f"{head} in the step; predicted: ")


def _step_over_nan(looks_at_once: bool) -> tuple[bool, bool]:
    """A NaN reaches the step when its bucket is on the way: is nothing changed, and does the next step work?"""
    model = sharded((dist.get_world_size(),))
    optimizer = make_optimizer(model, max_skipped_steps=0)
    plain(model, optimizer, 0)
    optimizer.step()

    def snapshot() -> list[Tensor]:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
        return [local_tensor(tensor.detach()).clone() for tensor in (*model.parameters(), *momenta)]

    before = snapshot()
    optimizer.zero_grad()
    loss = model(tokens(1)).square().mean()
    (loss * (float("nan") if dist.get_rank() == 0 else 1.0)).backward()
    with (
        mock.patch.object(gradients, "_host_reads_at_once", return_value=looks_at_once),
        pytest.raises(NonFiniteGradientError),
    ):
        optimizer.step()
    unchanged = are_equal(before, snapshot())
    plain(model, optimizer, 2)
    optimizer.step()
    return unchanged, all(tensor.isfinite().all() for tensor in snapshot())


@pytest.mark.parametrize("looks_at_once", [True, False], ids=["host", "device"])
def test_a_step_that_is_given_up_leaves_nothing_behind(gloo: ProcessPool, looks_at_once: bool) -> None:
    assert gloo.run(_step_over_nan, looks_at_once, world_size=2) == [(True, True)] * 2


def _two_optimizers() -> bool:
    """Two models on the same ranks, of which one skips a gradient on one rank."""
    results = []
    for overlap in ("off", "backward"):
        models = [sharded((dist.get_world_size(),)) for _ in range(2)]
        optimizers = [make_optimizer(model, overlap=overlap) for model in models]
        for step in range(NUM_STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                branch_on_some_ranks(model, optimizer, step)
            for optimizer in optimizers:
                optimizer.step()
        results.append([p.detach().to_local() for model in models for p in model.parameters()])  # type: ignore[attr-defined]
    return all(map(torch.equal, *results))


def test_two_optimizers_do_not_disturb_each_other(gloo: ProcessPool) -> None:
    assert all(gloo.run(_two_optimizers, world_size=3))


def _pool_bytes(optimizer: ParallelMuon) -> int:
    assert optimizer._planned is not None
    return sum(each.untyped_storage().nbytes() for each in optimizer._planned.matrix_step._pool._buffers.values())


def _buffer_bytes(overlap: str, clips: bool = False) -> tuple[int, int]:
    """Bytes of all buffers between backward and the step, and after it: 10 matrices of 16 x 16, two to a bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(10)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, overlap=overlap, muon_patterns=("*",), look_ahead=3)
    before = 0
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        before = _pool_bytes(optimizer) if optimizer._planned is not None else 0
        optimizer.step()
    return before, _pool_bytes(optimizer)


# On each of two ranks a bucket sends half of one matrix and receives half of another, there and back.
_BYTES_OF_A_BUCKET_ONE_WAY = 2 * 8 * 16 * 4


def _all_buffer_bytes() -> list[tuple[int, int]]:
    return [_buffer_bytes("step"), _buffer_bytes("backward"), _buffer_bytes("backward", clips=True)]


def test_early_gathers_have_buffers_until_the_step_is_over(gloo: ProcessPool) -> None:
    for in_step, early, in_vain in gloo.run(_all_buffer_bytes, world_size=2):
        assert in_step == ((3 + 3) * _BYTES_OF_A_BUCKET_ONE_WAY,) * 2, "those that it looks ahead"
        assert early == ((5 + 3) * _BYTES_OF_A_BUCKET_ONE_WAY, 3 * _BYTES_OF_A_BUCKET_ONE_WAY), "all of them"
        # Of no use: the step has gathered by itself.
        assert in_vain[1] == (3 + 3) * _BYTES_OF_A_BUCKET_ONE_WAY
