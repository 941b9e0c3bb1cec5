"""What ``make gpu`` steps: rank 0 of many in one process, two processes on one device, and a Llama as rank 0 of 8."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from benchmarks.gpu.loopback import loopback_world
from benchmarks.ranks import new_gradient_, sharded_muon
from lightning_muon import FlexDeMo, FlexDeMoConfig, ModeOptions, ParallelMuon, make_mode
from lightning_muon.config import Overlap
from lightning_muon.params.shapes import read_shapes
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.modes import Sharding

RANKS, SEQUENCES, LENGTH = 8, 4, 2048
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads")
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    "Muon": lambda model: ParallelMuon(model, lr=1e-4),
    "Muon, gradients not checked": lambda model: ParallelMuon(model, lr=1e-4, error_if_nonfinite=False),
}


@contextmanager
def one_rank_of(size: int, shapes: str, *, device: str, replicas: int = 1) -> Iterator[ParallelMuon]:
    """A ParallelMuon as rank 0 of ``size`` has it for a named model, on weights as ``fully_shard`` leaves them."""
    with loopback_world(size):
        yield sharded_muon(read_shapes(shapes).parameters, replicas, device)


def backward_on_stream(optimizer: ParallelMuon, device: str) -> None:
    """Gradients as FSDP2's backward leaves them: from the last to the first, on a stream of its own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stream = torch.cuda.Stream() if device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        for parameter in reversed(parameters):
            new_gradient_(parameter)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True, eq=False)
class OneRank:
    """A real model that one rank of many trains, with FSDP2, ZeRO-2 or DDP over a loopback."""

    mode: ShardingMode
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]  # Of a batch.

    def backward(self) -> None:
        self.mode.begin_forward()
        self.loss().backward()
        self.mode.finish_gradients()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_steps(self, number: int) -> None:
        for _ in range(number):
            self.backward()
            self.step()

    def steps_on_device(self, number: int) -> list[float]:
        """Milliseconds on a card from the end of each backward pass to the end of the step after it."""
        moments: list[torch.cuda.Event] = []
        for _ in range(number):
            for run in (self.backward, self.step):
                run()
                moments.append(torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(moments[::2], moments[1::2], strict=True)]


@contextmanager
def _trained(
    mode: ShardingMode, model: nn.Module, make: MakeOptimizer, loss: Callable[[], Tensor]
) -> Iterator[OneRank]:
    """A model in a mode, with the optimizer that ``make`` makes of it."""
    mode.prepare(model)
    optimizer = make(model)
    mode.attach(model, [optimizer])
    yield OneRank(mode, optimizer, loss)
    mode.finish_parameters()
    mode.close()


@contextmanager
def one_rank_of_mode(
    name: Sharding, *, device: str, mesh_shape: tuple[int, ...] = (8,), nodes: FlexDeMoConfig | None = None
) -> Iterator[OneRank]:
    """Rank 0 of a mesh that trains a small model; with ``nodes`` on FlexDeMo, else on ParallelMuon."""
    make: MakeOptimizer = OPTIMIZERS["Muon"] if nodes is None else partial(FlexDeMo.from_config, config=nodes)
    with loopback_world(math.prod(mesh_shape)):
        mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        model = nn.Sequential(*blocks).to(device)

        def loss() -> Tensor:
            return model(torch.randn(32, 64, device=device)).square().mean()

        mode = make_mode(name, mesh, ModeOptions(decoupled_nodes=nodes is not None))
        with _trained(mode, model, make, loss) as rank:
            yield rank


def train_two_ranks(sharding: Sharding, device: str) -> tuple[bool, float]:
    """Whether overlap keeps the bits of weights on two processes, and their largest difference to those of one process.

    Gloo carries CUDA tensors in collectives, so two ranks can share one card, which NCCL refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A forked process imports nothing; CUDA does not survive a fork.
        method = "spawn" if device == "cuda" else "fork"
        mp.start_processes(_train_rank, (folder, sharding, device), nprocs=2, join=True, start_method=method)
        weights = torch.load(Path(folder, "weights.pt"))
    with loopback_world(1):
        reference = _train("off", "none", device, ranks=(0, 1))
    off = weights["off"]
    pairs = zip(off, reference, strict=True)
    difference = torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=1e-6) for a, b in pairs]).max().item()
    return all(map(torch.equal, weights["step"], off)), difference


def _train_rank(rank: int, folder: str, sharding: Sharding, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    overlaps: tuple[Overlap, ...] = ("off", "step")
    weights = {overlap: _train(overlap, sharding, device, ranks=(rank,)) for overlap in overlaps}
    if rank == 0:
        torch.save(weights, Path(folder, "weights.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _train(overlap: Overlap, sharding: Sharding, device: str, *, ranks: Sequence[int]) -> list[Tensor]:
    """Weights after five steps on the batches of ``ranks``; odd shapes, and float32 throughout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(65, 130), nn.GELU(), nn.Linear(130, 65, bias=False)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(65, 1)).to(device)
    seeds = iter([10 * step + rank for rank in ranks] for step in range(5))

    def loss() -> Tensor:
        batches = [torch.randn(32, 65, generator=torch.Generator().manual_seed(seed)) for seed in next(seeds)]
        return torch.stack([model(batch.to(device)).square().mean() for batch in batches]).mean()

    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    make = partial(ParallelMuon, lr=1e-2, overlap=overlap, compute_dtype="float32", wire_dtype="float32")
    with _trained(make_mode(sharding, mesh, ModeOptions()), model, make, loss) as rank:
        rank.take_steps(5)
    return [_whole(parameter) for parameter in model.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    """All of a parameter, in the memory of the host: gloo ends a process in which torch gathers a DTensor of a card."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().cpu()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local, placements = parameter.detach().to_local().cpu(), parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride()).full_tensor()


@contextmanager
def training_with(optimizer: str, *, device: str, is_small: bool) -> Iterator[OneRank]:
    """Rank 0 of 8 that train a Llama of 1.2 billion weights with FSDP2, in bfloat16, after two steps."""
    from transformers import LlamaConfig, LlamaForCausalLM  # The other parts need not wait for it.

    torch.manual_seed(0)
    sizes = dict(zip(_SIZES, (256, 64, 128, 2, 4, 2) if is_small else (128256, 2048, 8192, 16, 32, 8), strict=True))
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False))
    tokens = torch.randint(sizes["vocab_size"], (1, 32) if is_small else (SEQUENCES, LENGTH), device=device)
    with loopback_world(RANKS):
        mesh = init_device_mesh(device, (RANKS,), mesh_dim_names=("shard",))
        mode = make_mode("fsdp", mesh, ModeOptions(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))

        def loss() -> Tensor:
            return model(input_ids=tokens, labels=tokens).loss

        with _trained(mode, model, OPTIMIZERS[optimizer], loss) as rank:
            rank.take_steps(2)
            yield rank
