"""Which numbers a Trainer gets, and Accelerators that cannot work with it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lightning_muon.hf
from lightning_muon import MuonConfig
from tests.support.accelerate_cpu import fresh_accelerate, fsdp2_on_cpu
from tests.support.processes import ProcessPool

_SET = {"learning_rate": 2e-4, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}


@pytest.fixture
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=11, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1,
        attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("given", "options", "expected", "warned"),
    [
        ((), {}, (5e-5, 0.0, (0.9, 0.999), 1e-8), None),
        ((), _SET, (2e-4, 0.3, (0.8, 0.9), 1e-6), None),
        ((MuonConfig(lr=3e-3, weight_decay=0.2),), {}, (3e-3, 0.2, (0.9, 0.999), 1e-8), None),
        ((MuonConfig(lr=3e-3, weight_decay=0.3),), _SET, (3e-3, 0.3, (0.8, 0.9), 1e-6), r"0\.0002: .*given lr=0\.003$"),
        ((), {"optim": "adafactor"}, (5e-5, 0.0, (0.9, 0.999), 1e-8), "optim='adafactor': the optimizer is that of hf"),
    ],
)
def test_numbers_of_the_arguments_count_where_none_are_given(
    model: LlamaForCausalLM, tmp_path: Path, given: tuple[Any], options: Any, expected: Any, warned: str | None
) -> None:
    with fresh_accelerate({"ACCELERATE_USE_CPU": "true"}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = TrainingArguments(str(tmp_path), report_to="none", **options)
        run = Trainer(model, arguments, optimizer_cls_and_kwargs=lightning_muon.hf.optimizer(*given))
        group = run.create_optimizer().param_groups[0]
    assert tuple(group[key] for key in ("lr", "weight_decay", "betas", "adamw_eps")) == expected
    texts = [str(each.message) for each in caught if "TrainingArguments have values" in str(each.message)]
    assert len(texts) == (warned is not None) and all(re.search(warned or "", text) for text in texts), texts


def _make_under_fsdp1() -> None:
    with fsdp2_on_cpu(FSDP_VERSION="1"):
        Accelerator()
        factory, arguments = lightning_muon.hf.optimizer()
        factory()(torch.nn.Linear(3, 4), **arguments)


def test_what_cannot_be_right_is_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_make_under_fsdp1, match="FSDP1 flattens parameters.*fsdp_version: 2", world_size=2)
