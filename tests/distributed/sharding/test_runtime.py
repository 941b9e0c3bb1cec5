"""Switches of a sharded model on several processes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.fsdp import shard_model
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.runtime import free_unsharded, initialize_roots, let_gathers_start, set_gradient_sync
from tests.distributed.sharding.models import (
    Net,
    assert_close,
    gradients_of,
    make_mesh,
    reference_gradients,
    tokens_of_all,
)
from tests.support.processes import ProcessPool, RanksFailedError


def _micro_batches(shape: tuple[int, int]) -> list[dict[str, Tensor | None]]:
    mesh = make_mesh(shape)
    torch.manual_seed(0)
    model = Net()
    shard_model(model, mesh, forward_methods=("training_step",))
    tokens = tokens_of_all(dist.get_world_size())[dist.get_rank()]
    agreement = GradientAgreement(model, mesh)
    results = []
    for _ in range(2):
        model.zero_grad()
        for last in (False, False, True):
            set_gradient_sync(model, last)
            model.training_step(tokens).backward()
            if not last:
                assert all(p.grad is None for p in model.parameters() if isinstance(p, DTensor))
        agreement.finish()
        results.append(gradients_of(model))
    return results


def test_micro_batches_without_reduction_add_up(gloo: ProcessPool) -> None:
    expected = reference_gradients(4, repeats=3)
    for results in gloo.run(_micro_batches, (2, 2), world_size=4):
        for gradients in results:
            assert_close(gradients, expected)


def _evaluate_then_call_the_inside() -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    shard_model(model, make_mesh((1, 2)), forward_methods=("training_step", "generate"))
    initialize_roots(model)
    initialize_roots(model)
    tokens = tokens_of_all(2)[0]
    # A block is called before the root has run.
    model.blocks[0](torch.ones(2, 7)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(tokens)
        model.generate(tokens)
    whole = [not isinstance(model.table.weight, DTensor)]
    free_unsharded(model)
    whole.append(not isinstance(model.table.weight, DTensor))
    model.training_step(tokens).backward()
    return whole


def test_whole_weights_are_freed_after_evaluation_and_blocks_may_run_before_the_root(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_then_call_the_inside, world_size=2) == [[True, False]] * 2


def _without_lazy_init() -> None:
    model = Net()
    shard_model(model, make_mesh((1, 2)))
    model.blocks[0](torch.ones(2, 7))
    model(tokens_of_all(2)[0])


def test_a_block_that_runs_before_an_uninitialized_root_breaks_it(gloo: ProcessPool) -> None:
    """The reason for ``initialize_roots``; when this fails, torch no longer needs it."""
    with pytest.raises(RanksFailedError, match="has already been lazily initialized"):
        gloo.run(_without_lazy_init, world_size=2)


def _thaw() -> list[bool]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    shard_model(model, make_mesh((1, 2)), mp_policy=policy)
    initialize_roots(model)
    results = []
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        gradient = model[0][0].weight.grad
        results.append(gradient is not None and gradient.dtype == torch.float32 and bool(gradient.full_tensor().any()))
        model[0].requires_grad_(True)
    return results


def test_a_frozen_unit_can_be_thawed_under_mixed_precision(gloo: ProcessPool) -> None:
    assert gloo.run(_thaw, world_size=2) == [[False, True]] * 2


def _told_events() -> list[tuple[bool, str]]:
    model = Net()
    shard_model(model, make_mesh((1, 2)))
    stream = mock.Mock(record_event=lambda: "event")
    told: list[tuple[bool, str]] = []
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(
            FSDPModule, "set_post_optim_event", lambda module, event: told.append((module is model, event))
        ),
    ):
        let_gathers_start(model)
    return told


def test_the_root_is_told_what_its_all_gathers_wait_for(gloo: ProcessPool) -> None:
    assert gloo.run(_told_events, world_size=2) == [[(True, "event")]] * 2
