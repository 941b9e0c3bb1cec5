"""Which parameters a Trainer of transformers decays."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from lightning_muon.hf import decayed_names

_LLAMA = LlamaConfig(
    vocab_size=11, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1, attention_bias=True
)
_T5 = T5Config(vocab_size=11, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2)


def test_names_that_decay_are_those_of_a_trainer(tmp_path: Path) -> None:
    for model in (LlamaForCausalLM(_LLAMA), T5ForConditionalGeneration(_T5)):
        run = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
        assert decayed_names(model) == set(run.get_decay_parameter_names(model))
    assert decayed_names(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))) == {"0.weight"}
