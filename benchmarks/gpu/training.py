"""Whole training steps of a Llama of 1.2 billion weights as rank 0 of 8 runs them: Muon beside AdamW."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.loopback import loopback_world
from benchmarks.gpu.steps import OneRank
from lightning_muon import ModeOptions, ParallelMuon, make_mode

RANKS, SEQUENCES, LENGTH = 8, 4, 2048
_SIZES = {
    False: {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    True: {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}
_HEADS = {False: (32, 8), True: (4, 2)}

OptimizerOf = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerOf] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    "Muon": lambda model: ParallelMuon(model, lr=1e-4),
}


@contextmanager
def training_with(optimizer: str, *, device: str, is_small: bool) -> Iterator[OneRank]:
    """One rank of a training over a loopback, in bfloat16, with FSDP2, after two steps."""
    torch.manual_seed(0)
    heads, kv_heads = _HEADS[is_small]
    sizes: dict[str, Any] = _SIZES[is_small] | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, (1, 32) if is_small else (SEQUENCES, LENGTH), device=device)
    with loopback_world(RANKS):
        mesh = init_device_mesh(device, (RANKS,), mesh_dim_names=("shard",))
        mode = make_mode("fsdp", mesh, ModeOptions(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
        mode.prepare(model)
        rank = OneRank(mode, OPTIMIZERS[optimizer](model), lambda: model(input_ids=tokens, labels=tokens).loss)
        mode.attach(model, [rank.optimizer])
        for _ in range(2):
            rank.backward()
            rank.step()
        yield rank
        mode.finish_parameters()
        mode.close()


def seconds_of_steps(training: OneRank, synchronize: Callable[[], None], *, rounds: int = 4) -> float:
    """Seconds of one step of the training, the median of ``rounds`` times three steps that no host waits between."""
    times: list[float] = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(3):
            training.backward()
            training.step()
        synchronize()
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times)


def idle_of_step(training: OneRank) -> tuple[float, float]:
    """Milliseconds in which the device runs nothing, from a profile: the longest gap, and all.

    From the time at which the host begins the step, while the device still runs the backward pass, to the last kernel.
    """
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
        training.backward()
        with torch.profiler.record_function("whole step"):
            training.optimizer.step()
        torch.cuda.synchronize()
    training.mode.end_step()
    training.optimizer.zero_grad()
    events: list[Any] = list(profiler.events() or ())
    begins = min(event.time_range.start for event in events if event.name == "whole step" and _is_on_host(event))
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if not _is_on_host(event) and not event.is_user_annotation and event.time_range.end > begins
    )
    gaps: list[float] = []
    ended = kernels[0][0]
    for start, end in kernels:
        gaps.append(max(0.0, start - ended))
        ended = max(ended, end)
    return max(gaps) / 1e3, sum(gaps) / 1e3


def _is_on_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU
