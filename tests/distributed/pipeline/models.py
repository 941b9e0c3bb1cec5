"""Tiny models for pipelines, and what one process computes with them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon import Options
from lightning_muon.engine.model_setup import mixed_precision_policy
from lightning_muon.engine.training import TrainingEngine

VOCABULARY, WIDTH = 29, 16
# What makes the difference between kinds, at values that count: factors and bounds of logits, windows, experts.
_OF_KIND: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
    )
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8}
    | {"num_key_value_heads": 2, "first_k_dense_replace": 1},
    "gemma2": {"sliding_window": 3, "final_logit_softcapping": 0.5},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}


def causal_lm(
    kind: str, *, num_layers: int = 4, tied: bool = False, seed: int = 0, vocabulary: int = VOCABULARY
) -> Any:
    """A language model of transformers, without dropout; with windows of three tokens where it has windows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "gpt2": {"n_embd": WIDTH, "n_layer": num_layers, "n_head": 2, "n_positions": 16},
        "gpt_neox": {"hidden_size": WIDTH, "num_hidden_layers": num_layers, "num_attention_heads": 2},
    }
    grouped = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    chosen: dict[str, Any] = sizes.get(kind, {"hidden_size": WIDTH, "num_hidden_layers": num_layers, **grouped})
    if kind == "gpt2":
        chosen |= {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    else:
        chosen |= {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 16}
    chosen |= _OF_KIND.get(kind, {})
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, vocab_size=vocabulary, tie_word_embeddings=tied, **chosen)
    return AutoModelForCausalLM.from_config(config)


def load_example(name: str) -> Any:
    """A program of examples/, as a module."""
    path = Path(__file__).parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Where dataclasses look.
    spec.loader.exec_module(module)
    return module


class Chain(nn.Module):
    """Parts one after the other; the loss is a cross-entropy of each row."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def pipeline_parts(self) -> list[nn.Module]:
        return list(self.parts)

    def pipeline_step(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return batch["input_ids"], batch["labels"]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100)
        return total, (target != -100).sum()

    def forward(self, tokens: Tensor) -> Tensor:
        values: Any = tokens
        for part in self.parts:
            values = part(*values) if isinstance(values, tuple) else part(values)
        return values


class Layer(nn.Module):
    """A residual layer, with one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.unused = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(self.norm(hidden)))


class Start(nn.Module):
    """Hands on hidden states, a weight, a tensor for the last part, tokens (integers), a mask, and what nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embedding(tokens)
        return hidden, self.scale.exp(), hidden.mean(-1, keepdim=True), tokens, tokens > 3, hidden.mean(-1)


class Mesh(nn.Module):
    """Weights that are used late, twice, in a sum, frozen, not at all, or that the next part gets; hands on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.scale = (nn.Parameter(torch.randn(WIDTH) / 4) for _ in range(2))
        self.low, self.high = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.twice, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(3, 3)

    def forward(self, hidden: Tensor, scale: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        given, tokens, mask, _ = others
        hidden = hidden + torch.tanh(self.twice(hidden * scale)) * mask[..., None] + self.place
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)  # Runs once.
        hidden = hidden + torch.tanh(self.once(hidden) @ (self.low + self.high))
        hidden = hidden + torch.tanh(self.twice(self.frozen(hidden)))
        return hidden, self.scale.exp(), given, tokens, mask, hidden[..., 0]


class End(nn.Module):
    """Takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(WIDTH, VOCABULARY), nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, hidden: Tensor, scale: Tensor, *others: Tensor) -> Tensor:
        given, tokens, mask, _ = others
        return self.head(hidden * scale) * given + self.shift(tokens) + mask[..., None]


def chain(num_layers: int) -> Chain:
    """An embedding, layers, and a head."""
    torch.manual_seed(0)
    return Chain([nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(num_layers)), nn.Linear(WIDTH, VOCABULARY)])


def meshes(num_layers: int) -> Chain:
    """Parts whose weights get their gradients in all ways that there are."""
    torch.manual_seed(0)
    return Chain([Start(), *(Mesh() for _ in range(num_layers)), End()])


def batch_of(rows: int, length: int, *, seed: int, is_uneven: bool = True) -> dict[str, Tensor]:
    """Tokens and labels; if uneven, rows have from none to all of theirs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = tokens.clone()
    for row in range(rows if is_uneven else 0):
        labels[row, : row % (length + 1)] = -100
    return {"input_ids": tokens, "labels": labels}


@contextmanager
def started(
    net: nn.Module, make: Callable[[Any], torch.optim.Optimizer], *, precision: Any = "32-true", **chosen: Any
) -> Generator[tuple[Any, Any]]:
    """An engine over the stages of the net, two if nothing else is chosen, and its optimizer."""
    optimizer = make(net.parameters())
    options = Options(**({"pipeline_size": 2} | chosen))
    meshes = options.make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    policy = mixed_precision_policy(precision, net)
    modes = replace(options.mode_options, wait_for_parameters=True, mp_policy=policy)
    engine = TrainingEngine(net, options, meshes, mode_options=modes, info=lambda _: None, warn=lambda _: None)
    engine.shard(torch.device("cpu"))
    if precision == "bf16-mixed":
        assert engine.pipeline is not None
        engine.pipeline.context.forward_context = partial(torch.autocast, "cpu", torch.bfloat16)
    try:
        yield engine, engine.attach([optimizer], source="the test")[0]
    finally:
        engine.close()  # Its watchdog must not outlive the process groups.


def take_step(engine: Any, optimizer: Any, batch: dict[str, Tensor], *, max_norm: float | None = None) -> Tensor:
    """Train with the rows of this data rank; the loss. Gradients stay."""
    optimizer.zero_grad()
    rank, size = engine.meshes.data_rank, engine.meshes.num_data_ranks
    loss = engine.run_pipeline({key: value[rank::size].contiguous() for key, value in batch.items()})
    if max_norm is not None:
        engine.clip_by_norm(list(engine.module.parameters()), max_norm)
    engine.step(optimizer, lambda optimizer: optimizer.step())
    return loss
