"""Fails when a private name of transformers moves."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_muon.compat.transformers import ShardedAtLoad, pretrained_parts


def test_only_loaded_weights_are_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1
    )
    kind = transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    fresh = kind.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    loaded = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert pretrained_parts(nn.ModuleList([fresh, nn.Linear(2, 2)])) == []
    assert pretrained_parts(nn.ModuleList([fresh, loaded])) == [loaded] == pretrained_parts(loaded)


def test_what_a_trainer_overrides_is_there() -> None:
    kind = pytest.importorskip("transformers").Trainer
    own = [name for name, value in vars(ShardedAtLoad).items() if re.match("_[^_]", name) and callable(value)]
    assert len(own) == 3 and all(callable(getattr(kind, name)) for name in own)
