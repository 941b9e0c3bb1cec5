"""Tiny models for pipelines, and what one process computes with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH = 29, 16


def causal_lm(kind: str, *, num_layers: int = 4, tied: bool = False, seed: int = 0) -> nn.Module:
    """A language model of transformers, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "gpt2": {"n_embd": WIDTH, "n_layer": num_layers, "n_head": 2, "n_positions": 16},
        "gpt_neox": {"hidden_size": WIDTH, "num_hidden_layers": num_layers, "num_attention_heads": 2},
    }
    grouped = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    chosen: dict[str, Any] = sizes.get(kind, {"hidden_size": WIDTH, "num_hidden_layers": num_layers, **grouped})
    chosen |= {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")} if kind == "gpt2" else {}
    chosen |= {} if kind == "gpt2" else {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 16}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, tie_word_embeddings=tied, **chosen)
    return AutoModelForCausalLM.from_config(config)
