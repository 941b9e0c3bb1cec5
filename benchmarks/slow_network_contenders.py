"""The model, the data and the optimizers that ``slow_network.py`` compares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import lightning_muon

BASELINE = "HSDP + AdamW"
# With 4 layers 10.0 million parameters; no dropout, so that contenders differ in nothing but how they train.
MODEL = {"vocab_size": 10240, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "dropout_rate": 0.0}
NUM_WORDS = 512  # Of the vocabulary, those that occur.
REPETITION = 0.75


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one launch has to do; the same on all ranks.

    Attributes:
        contender: Name in :data:`CONTENDERS`.
        ranks_per_node: Of two nodes.
        rates: Bits per second; ``None``: no limit.
        lrs: Learning rates to try.
        loss_steps: Steps of each trial; with 0 the first learning rate is taken.
        steps: At most so many steps are measured at each rate,
        seconds: and about so long,
        warmup: after so many steps.
        batch: Samples per rank.
        num_layers: Of the encoder, and of the decoder.
        side_folder: Where ``detonation`` is installed; "" if it is not.
    """

    contender: str
    ranks_per_node: int
    rates: tuple[float | None, ...]
    lrs: tuple[float, ...]
    loss_steps: int
    steps: int
    seconds: float
    warmup: int
    batch: int
    num_layers: int
    side_folder: str


@dataclass(kw_only=True)
class Contender:
    """A model on its ranks, and its optimizer.

    Attributes:
        net: What is called.
        optimizer: Of all of its parameters.
        around_backward: A context for forward and backward.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, batch: dict[str, Tensor]) -> None:
        """One whole training step."""
        self.optimizer.zero_grad()
        with self.around_backward():
            self.net(**batch).loss.backward()
        self.optimizer.step()


def new_net(num_layers: int) -> nn.Module:
    """Equal on all ranks. The embedding of T5 is drawn ten times as large as the rest; short runs would not move it."""
    torch.manual_seed(0)
    net = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, num_layers=num_layers, **MODEL))
    with torch.no_grad():
        net.get_input_embeddings().weight.mul_(0.1)
    return net


def make_batch(generator: torch.Generator, samples: int, *, source: int = 16, target: int = 16) -> dict[str, Tensor]:
    """A walk over words, the target being how the source goes on.

    Words are drawn with probabilities 1 / rank; with probability :data:`REPETITION` a word is followed by its
    successor, which is fixed. What there is to learn: which words occur, how often, and what follows them.
    """
    frequencies = 1 / torch.arange(1, NUM_WORDS + 1)
    successors = torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(0))
    drawn = torch.multinomial(frequencies, samples * (source + target), True, generator=generator)
    walk = drawn.view(samples, -1)
    follows = torch.rand(walk.shape, generator=generator) < REPETITION
    for place in range(1, source + target):
        walk[:, place] = torch.where(follows[:, place], successors[walk[:, place - 1]], walk[:, place])
    words = walk + 2  # 0 is padding, 1 the end.
    return {"input_ids": words[:, :source].contiguous(), "labels": words[:, source:].contiguous()}


def sharded(mesh: DeviceMesh, job: Job, *, reduce_dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 for each block and for the rest; on a 2-D mesh that is HSDP, which averages gradients over the nodes."""
    net = new_net(job.num_layers)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in [module for module in net.modules() if isinstance(module, T5Block)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def alone(mesh: DeviceMesh, lr: float, job: Job) -> Contender:
    net = sharded(mesh["shard"], job)
    return Contender(net=net, optimizer=torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))


def adamw(mesh: DeviceMesh, lr: float, job: Job, *, reduce_dtype: torch.dtype | None = None) -> Contender:
    net = sharded(mesh, job, reduce_dtype=reduce_dtype)
    return Contender(net=net, optimizer=torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))


def parallel_muon(mesh: DeviceMesh, lr: float, job: Job) -> Contender:
    net = sharded(mesh, job)
    return Contender(net=net, optimizer=lightning_muon.ParallelMuon(net, lr, weight_decay=0.0))


def flexdemo(mesh: DeviceMesh, lr: float, job: Job, *, top_k: int, **options: Any) -> Contender:
    """Chunks of 64; ``top_k=0``: no replication."""
    replicator = lightning_muon.DCTTopK(chunk_size=64, top_k=top_k) if top_k else lightning_muon.NoReplication()
    net = sharded(mesh["shard"], job)
    return Contender(net=net, optimizer=lightning_muon.FlexDeMo(net, lr, mesh=mesh, replicator=replicator, **options))


def detonation(mesh: DeviceMesh, lr: float, job: Job, *, top_k: int) -> Contender:
    """As its README says under "Usage": FSDP1, gradients not synchronized in backward, the step does it."""
    # Last, so that it cannot hide anything else. It is no dependency of this package.
    sys.path.append(job.side_folder)
    from detonation import DeMoReplicator, DeToSGD

    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    net = FullyShardedDataParallel(
        new_net(job.num_layers),
        process_group=groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
    )
    optimizer = DeToSGD(
        net.parameters(),
        lr=lr,
        replicator=DeMoReplicator(compression_topk=top_k),
        sharding_parallel_group=groups[0],
        replication_parallel_group=groups[1],
    )
    return Contender(net=net, optimizer=optimizer, around_backward=net.no_sync)


CONTENDERS: dict[str, Callable[[DeviceMesh, float, Job], Contender]] = {
    "no exchange: FSDP2 + AdamW": alone,
    "no exchange: FlexDeMo sgd, NoReplication": partial(flexdemo, top_k=0),
    BASELINE: adamw,
    "HSDP + AdamW, gradients reduced in bf16": partial(adamw, reduce_dtype=torch.bfloat16),
    "HSDP + ParallelMuon": parallel_muon,
    "FlexDeMo sgd, k=32": partial(flexdemo, top_k=32),
    "FlexDeMo sgd, k=8": partial(flexdemo, top_k=8),
    "FlexDeMo adamw, k=32": partial(flexdemo, top_k=32, base="adamw"),
    "FlexDeMo muon, k=32": partial(flexdemo, top_k=32, base="muon"),
    "DeToNATION 0.5.2 sgd, k=4": partial(detonation, top_k=4),
    "DeToNATION 0.5.2 sgd, k=32": partial(detonation, top_k=32),
}
