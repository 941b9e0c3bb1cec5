"""Fine-tuning with all weights and with LoRA on two ranks, against loops in one process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.causal_lm_trainer import train_tokenizer
from lightning_muon import MuonConfig, ParallelMuon
from recipes.finetune.data import PromptData, collate
from recipes.finetune.model import build_model, loss_sum
from tests.support.programs import ROOT, fit, program_environment
from tests.support.worker import free_port

RECIPE = ROOT / "recipes" / "finetune"
NUM_ROWS, NUM_STEPS, LR = 8, 3, 0.01
EXACT = {"compute_dtype": "float32", "wire_dtype": "float32"}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand parameters with random weights, its tokenizer, and completions of different lengths."""
    path = tmp_path_factory.mktemp("finetune")
    tokenizer = train_tokenizer((ROOT / "docs" / "index.md").read_text(), 300)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(path / "base")
    tokenizer.save_pretrained(path / "base")
    rows = [{"prompt": f"Count to {n}:", "completion": " and".join(f" {i}" for i in range(n))} for n in range(1, 9)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit_config(name: str, folder: Path) -> str:
    """Run a config on two CPU processes, each of which has half of all rows in each step."""
    options: dict[str, Any] = {
        "trainer.max_epochs": NUM_STEPS,
        "trainer.log_every_n_steps": 1,
        "trainer.logger.init_args.save_dir": folder,
        "model.init_args.model_name": folder / "base",
        "model.init_args.dtype": "float32",
        "model.init_args.lr": LR,
        "model.init_args.output": folder / name,
        "data.init_args.source": folder / "rows.jsonl",
        "data.init_args.validation_source": folder / "rows.jsonl",
        "data.init_args.tokenizer": folder / "base",
        "data.init_args.batch_size": NUM_ROWS // 2,
    }
    if name == "lora":
        options["model.init_args.lora"] = json.dumps(LORA)
        options |= {f"trainer.strategy.init_args.optimizer.{key}": value for key, value in EXACT.items()}
    return fit(RECIPE / f"{name}.yaml", options)


def launch(folder: Path) -> str:
    """Run the loop of Accelerate on two CPU processes."""
    config = yaml.safe_load((ROOT / "examples" / "accelerate.yaml").read_text())
    del config["fsdp_config"], config["parallelism_config"]  # There are none on CPUs; ours shards over all processes.
    config |= {"distributed_type": "MULTI_CPU", "use_cpu": True, "mixed_precision": "no", "num_processes": 2}
    config["lightning_muon"] = {"optimizer": EXACT}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    words = {"model_name": folder / "base", "source": folder / "rows.jsonl", "validation_source": folder / "rows.jsonl"}
    words |= {"output": folder / "launched", "batch_size": NUM_ROWS // 2, "epochs": NUM_STEPS, "lr": LR, "lora_rank": 4}
    command: list[Any] = [sys.executable, "-m", "lightning_muon", "launch", "--config_file", folder / "accelerate.yaml"]
    command += [RECIPE / "with_accelerate.py", *(f"--{name}={value}" for name, value in words.items())]
    how: Any = {"cwd": ROOT, "env": program_environment() | {"MASTER_PORT": str(free_port())}, "text": True}
    ended = subprocess.run(list(map(str, command)), capture_output=True, check=False, **how)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def factors_of(adapters: Path) -> nn.Module:
    return PeftModel.from_pretrained(build_model(str(adapters.parent / "base"), None), adapters, is_trainable=True)


def require_factors_of_one_process(adapters: Path, rates: Sequence[float]) -> None:
    """The same steps, with all rows in each, at these parts of the learning rate."""
    rows, base = str(adapters.parent / "rows.jsonl"), str(adapters.parent / "base")
    data = PromptData(source=rows, validation_source=rows, tokenizer=base)
    data.setup("fit")
    batch = collate(data.train, pad_id=data.tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = build_model(base, LORA)
    config = MuonConfig(compute_dtype="float32", muon_lr_factor=3.0, weight_decay=0.0)
    optimizer = ParallelMuon.from_config(model, config, lr=LR)
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        loss, num_tokens = loss_sum(model, batch)
        (loss / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    found = {name: each.detach() for name, each in factors_of(adapters).named_parameters() if each.requires_grad}
    assert found.keys() == expected.keys() and any("lora_B" in name for name in found)
    for name, factor in found.items():
        # float32 sums in another order.
        torch.testing.assert_close(factor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_lora_on_muon_is_that_of_one_process_and_merges(folder: Path) -> None:
    fit_config("lora", folder)
    require_factors_of_one_process(folder / "lora", [1.0, 1.0, 0.5])
    trained = factors_of(folder / "lora").eval()
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "lora" / "merged")
    tokens = torch.arange(40).view(2, 20)
    torch.testing.assert_close(merged(tokens).logits, trained(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_loop_of_accelerate_is_that_of_one_process(folder: Path) -> None:
    assert launch(folder).count("validation loss") == NUM_STEPS
    # Accelerate moves a scheduler on once for each process: steps 0, 2 and 4 of 6, of which the first is warm-up.
    require_factors_of_one_process(folder / "launched", [1.0, 0.8, 0.4])


@pytest.mark.long
def test_all_weights_on_adamw_become_a_folder_for_transformers(folder: Path) -> None:
    assert "AdamW, kept: optimizer='keep'" in fit_config("full", folder)
    trained, base = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("full", "base"))
    assert json.loads((folder / "full" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not any(map(torch.equal, trained.parameters(), base.parameters()))
    places = folder / "full", *folder.glob("*/version_*/tokenizer")
    assert {AutoTokenizer.from_pretrained(place).eos_token for place in places} == {"<|endoftext|>"}
    assert places[-1].name == "tokenizer"
