"""ParallelMuon in one process: arguments, groups, routes, memory, and the bits of torch.optim.Muon."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.profiler import ProfilerActivity, profile

from lightning_muon import ParallelMuon
from lightning_muon.math.newton_schulz import NewtonSchulz, NewtonSchulzGraphs
from tests.support.tensors import are_equal, set_gradients, train

SHAPES = [(13, 7), (64, 64), (3, 200), (1, 9), (200, 3)]


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_one_rank_has_the_bits_of_torch_optim_muon(dtype: torch.dtype, nesterov: bool, adjust_lr_fn: Any) -> None:
    if dtype is torch.bfloat16 and not nesterov:
        pytest.skip("torch.optim.Muon then normalizes its momentum buffer in place: bfloat16() is no copy")
    mine, theirs = [[nn.Parameter(p.detach().to(dtype)) for p in _parameters()] for _ in range(2)]
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours = ParallelMuon(mine, algorithm="muon", compute_dtype="bfloat16", bucket_bytes=1000, **options)
    reference = torch.optim.Muon(theirs, **options)
    train(ours, range(10))
    train(reference, range(10))
    assert are_equal(mine, theirs)


def test_groups_keep_their_own_hyper_parameters_and_algorithm() -> None:
    mine = _parameters()
    optimizer = ParallelMuon(
        [
            {"params": mine[:2], "lr": torch.tensor(0.25), "muon_lr_factor": 0.5, "momentum": 0.5},
            {"params": mine[2:4], "algorithm": "adamw", "betas": (0.8, 0.95), "adamw_eps": 1e-6, "weight_decay": 0.0},
            {"params": mine[4:]},
        ],
        muon_lr_factor=4.0,
        compute_dtype="bfloat16",
    )
    theirs = _parameters()
    reference = [
        torch.optim.Muon(theirs[:2], lr=0.125, momentum=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[2:4], betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0, fused=True),
        torch.optim.Muon(theirs[4:], lr=0.004, adjust_lr_fn="match_rms_adamw"),
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, *reference)]
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        for each in (optimizer, *reference, *schedulers):
            each.step()
    assert are_equal(mine, theirs)
    assert [set(optimizer.state[p]) for p in mine] == [
        *[{"momentum_buffer"}] * 2, *[{"step", "exp_avg", "exp_avg_sq"}] * 2, {"momentum_buffer"},
    ]  # fmt: skip


def test_a_step_needs_memory_for_a_few_buckets_only() -> None:
    # 32 matrices of 64 KiB in buckets of 64 KiB: a step may hold a few of them, not a copy of all.
    parameters = [nn.Parameter(torch.zeros(128, 128)) for _ in range(32)]
    optimizer = ParallelMuon(parameters, compute_dtype="float32", bucket_bytes=2**16)
    for parameter in parameters:
        parameter.grad = torch.randn(128, 128)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        optimizer.step()
    level, peak = 0, 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert 2**16 <= peak <= 10 * 2**16


def test_the_group_decides_then_the_module_then_the_shape() -> None:
    model, extra = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)), nn.Parameter(torch.ones(3, 2))
    table, hidden = model[0].weight, model[1].weight
    optimizer = ParallelMuon([table, extra])
    assert [route.algorithm for route in optimizer.routes] == ["muon", "muon"]
    optimizer.attach(model)
    assert [route.algorithm for route in optimizer.routes] == ["adamw", "muon"]
    assert optimizer.routes[1].name == "parameter 1", "it is not in the module"
    groups = [{"params": [table], "algorithm": "muon"}, {"params": [hidden], "algorithm": "adamw"}]
    forced = ParallelMuon(groups)
    forced.attach(model)
    assert [route.algorithm for route in forced.routes] == ["muon", "adamw"]
    assert forced.routes[0].reason == "embedding, algorithm='muon'"


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        flat = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            ParallelMuon(flat)
    finally:
        dist.destroy_process_group()


def test_weight_decay_is_not_rounded_to_bfloat16() -> None:
    # 1 - 0.02 * 0.1 is 0.998; as a bfloat16 it would be 0.9961, and the decay twice as strong.
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = ParallelMuon([weight], lr=0.02, weight_decay=0.1, normuon=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight == torch.tensor(256.0 * 0.998).bfloat16()).all()


def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    cuda = {name: mock.MagicMock() for name in ("CUDAGraph", "device", "stream", "current_stream", "Stream")}
    refused = mock.MagicMock(side_effect=RuntimeError("operation not permitted"))
    way, graphs = NewtonSchulz(((3.4445, -4.7750, 2.0315),), torch.float32), []
    with mock.patch.multiple(torch.cuda, graph=refused, graph_pool_handle=mock.MagicMock(), **cuda):
        recorded = NewtonSchulzGraphs(torch.float32, torch.device("cpu"))
        graphs += [recorded.take((1, 8, 4), way, eps=1e-7) for _ in range(2)]
    assert graphs == [None, None]
    assert refused.call_count == 1
    assert "kernel by kernel" in caplog.text
    assert "not permitted" in caplog.text
