"""A row of the matrix: what is trained, by which loop, on how many ranks; its model and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_muon import FlexDeMoConfig, MuonConfig
from tests.integration.integrations.transformers.runs import causal_lm
from tests.support.tensors import SHAPES

VOCABULARY, LENGTH, ROWS = 11, 6, 12  # ROWS: of a micro-batch, on all ranks together.
LR, WEIGHT_DECAY, BETAS = 1e-2, 0.1, (0.8, 0.9)
EPS = 1e-3  # Keeps AdamW from making whole steps of rounding errors.
EXACT = {"compute_dtype": "float32", "wire_dtype": "float32"}
Batch = dict[str, Tensor]
Found = tuple[dict[str, Tensor], list[float]]  # Weights at the end, and the loss of each step.


class LoRALinear(nn.Module):
    """The names and the start of PEFT, with DoRA's magnitudes."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.lora_magnitude_vector = nn.ParameterDict({"default": nn.Parameter(torch.rand(outputs) + 0.5)})
        self.lora_B["default"].weight.data.zero_()  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        changed = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return self.lora_magnitude_vector["default"] * changed


class Block(nn.Module):
    """A residual unit; its norm has fewer rows than four ranks would like."""

    def __init__(self, width: int, inner: int, *, bias: bool, has_lora: bool, adds: bool = True) -> None:
        super().__init__()
        self.adds = adds
        self.norm = nn.LayerNorm(width)
        self.up = LoRALinear(width, inner) if has_lora else nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        change = self.down(torch.tanh(self.up(self.norm(x))))
        return x + change if self.adds else change


class Tail(nn.Module):
    """Fused weights and the head, and what ``parts`` add: a convolution, experts, other orders, a scale, branches."""

    def __init__(self, width: int, parts: Sequence[str]) -> None:
        super().__init__()
        self.parts = parts
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=1) if "conv" in parts else None
        self.experts = nn.Parameter(torch.randn(3, 5, width) / 5) if "experts" in parts else None
        self.inputs_first = Conv1D(5, width) if "inputs first" in parts else None
        self.transposed = nn.ConvTranspose1d(width, width, 3, padding=1) if "transposed" in parts else None
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * ("branches" in parts)))
        self.frozen = nn.Linear(width, width).requires_grad_(False) if "frozen" in parts else None
        self.unused = nn.Linear(3, 5) if "unused" in parts else None
        self.scale = nn.Parameter(torch.tensor(0.7)) if "scale" in parts else None
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> Tensor:
        x = x + sum(torch.tanh(part) for part in self.qkv(x).chunk(3, -1))
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.transposed is not None:
            x = x + self.transposed(x.transpose(1, 2)).transpose(1, 2)
        if self.experts is not None:
            x = x + sum(F.linear(x, expert).tanh() @ expert for expert in self.experts)
        if self.inputs_first is not None:
            x = x + F.pad(self.inputs_first(x), (0, x.shape[-1] - 5))
        if branch is not None:
            x = x + torch.tanh(self.branches[int(branch.flatten()[0])](x))
        if self.frozen is not None:
            x = self.frozen(x)
        return self.head(x if self.scale is None else x * self.scale)


class Net(nn.Module):
    """Odd sizes, and what the row adds."""

    def __init__(self, width: int, inner: int, num_blocks: int, parts: Sequence[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.is_in_place = "in place" in parts
        kinds = {"bias": "no bias" not in parts, "has_lora": "lora" in parts, "adds": not self.is_in_place}
        self.blocks = nn.ModuleList(Block(width, inner, **kinds) for _ in range(num_blocks))
        self.tail = Tail(width, parts)
        if "tied" in parts:
            self.tail.head.weight = self.embedding.weight
        if "frozen block" in parts:
            self.blocks[0].requires_grad_(False)

    def forward(self, input_ids: Tensor, branch: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks[:-1] if skip is not None and bool(skip) else self.blocks:
            output = block(x)
            if self.is_in_place:  # A linear layer of 3-D input computes 2-D products, and returns a view.
                output += x
            x = output
        return self.tail(x, branch)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.tail]

    def pipeline_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch["input_ids"], batch["labels"]

    def pipeline_loss(self, output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return _cross_entropy(output, labels), (labels != -100).sum()


class Tensors(nn.Module):
    """Tensors whose gradients are drawn."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-100)


ODD = ("conv", "experts", "inputs first", "frozen", "unused", "scale", "tied")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training, which must end with the weights and have the losses of one process on the whole batches."""

    framework: str = "fabric"  # Whose loop it is; see frameworks.py.
    ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)  # Of the strategy or the Accelerator.
    optimizer: Mapping[str, Any] | str = field(default_factory=dict)  # Fields of a config, or "keep".
    program: str = "AdamW"  # What the program makes: of torch, or "ParallelMuon".
    model: str = "net"  # "net", "llama" or "tensors".
    width: int = 7
    inner: int = 13
    num_blocks: int = 2
    parts: Sequence[str] = ODD
    shapes: Sequence[str] = tuple(SHAPES)
    dtype: torch.dtype = torch.float32
    precision: str = "32-true"  # As Lightning calls it.
    compiles: str = ""  # "units" or "model".
    accumulate: int = 1
    max_norm: float | None = None
    max_value: float | None = None
    has_tokens: bool = False  # Losses are sums, divided by all tokens; ranks have other numbers of these.
    has_rates: bool = False  # A scheduler makes the learning rate smaller.
    # Tensors: rank (of FlexDeMo: node) -> names without a gradient there, from the second step on if it is negative.
    missing: Mapping[int, Sequence[str]] = field(default_factory=dict)
    is_disturbed: bool = False  # Tensors: a new plan, state that is loaded, and a step with a NaN leave no trace.
    steps: int = 3
    saved_at: int = 0  # The step after which it is saved; it goes on, and from there as...
    resumed: Mapping[str, Any] = field(default_factory=dict)  # ... this row with other fields.
    # Sums of float32 in another order; Newton-Schulz makes more of it where a gradient has small singular values.
    tolerance: float = 1e-6

    @property
    def when_resumed(self) -> Row:
        return replace(self, **self.resumed)

    @property
    def has_nodes(self) -> bool:
        """Whether nodes exchange components (FlexDeMo)."""
        return isinstance(self.optimizer, Mapping) and "replicator" in self.optimizer

    @property
    def has_mains(self) -> bool:
        """Whether 16-bit weights are roundings of what is updated."""
        return self.precision == "bf16-true" and self.options.get("sharding") == "zero2"

    @property
    def config(self) -> Any:
        if isinstance(self.optimizer, str):
            return self.optimizer
        return (FlexDeMoConfig if self.has_nodes else MuonConfig)(**(EXACT | dict(self.optimizer)))

    @property
    def num_data_ranks(self) -> int:
        """Ranks with batches of their own."""
        sizes = [self.options.get(f"{name}_size", 1) for name in ("context", "tensor", "pipeline")]
        return self.ranks // (sizes[0] * sizes[1] * sizes[2])

    @property
    def num_nodes(self) -> int:
        if not self.has_nodes:
            return 1
        # All ranks of the pool are on one machine.
        shards = self.options.get("shard_size", self.num_data_ranks)
        return self.options.get("replicate_size", self.num_data_ranks // shards)

    def make_model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        if self.model == "llama":
            return causal_lm(tied="tied" in self.parts).to(self.dtype)
        if self.model == "tensors":
            return Tensors({name: SHAPES[name] for name in self.shapes}).to(self.dtype)
        return Net(self.width, self.inner, self.num_blocks, self.parts).to(self.dtype)

    def decay_of(self, name: str) -> float:
        """The program leaves norms and biases out, but for those of FlexDeMo and of its own ParallelMuon."""
        is_left_out = self.program == "AdamW" and not self.has_nodes and ("norm" in name or name.endswith("bias"))
        return 0.0 if is_left_out else WEIGHT_DECAY

    def make_optimizer(self, model: nn.Module, named: Sequence[tuple[str, Tensor]] = ()) -> torch.optim.Optimizer:
        """That of the program."""
        named = named or list(model.named_parameters())
        if self.program == "SGD":
            return torch.optim.SGD([each for _, each in named], lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY)
        groups = [
            {"params": [each for name, each in named if self.decay_of(name) == decay], "weight_decay": decay}
            for decay in (WEIGHT_DECAY, 0.0)
        ]
        return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    def rate(self, step: int) -> float:
        """Factor of the learning rate: the usual linear schedule."""
        return 1 - step / self.steps if self.has_rates else 1.0

    def batch(self, step: int, index: int, rank: int | None = None) -> Batch:
        """The rows of a micro-batch, or those of a data rank, and which branch it takes."""
        generator = torch.Generator().manual_seed(1000 * step + index)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = (3 * tokens + 1) % VOCABULARY
        for row in range(ROWS if self.has_tokens else 0):
            labels[row, 1 + row % (LENGTH - 1) :] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if rank is not None:
            batch = {key: value[rank :: self.num_data_ranks] for key, value in batch.items()}
            if "branches" in self.parts:  # In the first step nobody takes the second one.
                batch["branch"] = torch.tensor((rank + step) % 2 if step else 0)
            if "skips" in self.parts:  # A unit that the last micro-batch leaves out.
                batch["skip"] = torch.tensor(index == self.accumulate - 1)
        return batch

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean over the rows of a batch, or with tokens the sum over them. Llama predicts the next label."""
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        output = model(**inputs)
        logits, labels = getattr(output, "logits", output), batch["labels"]
        if self.model == "llama":
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = _cross_entropy(logits, labels)
        return total if self.has_tokens else total / labels.numel()

    def num_tokens(self, batch: Batch) -> int:
        labels = batch["labels"][:, 1:] if self.model == "llama" else batch["labels"]
        return int((labels != -100).sum())

    def gradients(self, step: int, node: int) -> dict[str, Tensor]:
        """Those that are drawn for tensors; what is missing there is left out."""
        generator = torch.Generator().manual_seed(100 * (step + 1) + node)
        drawn = {name: torch.randn(SHAPES[name], generator=generator).to(self.dtype) for name in self.shapes}
        missing = self.missing.get(node, self.missing.get(-1, ()) if step else ())
        return {name: gradient for name, gradient in drawn.items() if name not in missing}
