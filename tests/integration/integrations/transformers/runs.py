"""A small Llama, its data, and Trainers inside the workers of the gloo pool."""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
import transformers
import yaml
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer

import lightning_muon.hf
from lightning_muon.cli.launch import replace_accelerator
from tests.support.accelerate_cpu import ddp_on_cpu, fresh_accelerate, fsdp2_on_cpu
from tests.support.tensors import weights_of
from tests.support.worker import free_port

Samples = list[dict[str, Tensor]]
VOCABULARY, LENGTH, GLOBAL_BATCH = 37, 9, 8
NUM_STEPS = 4
LR, WEIGHT_DECAY = 4e-3, 0.1
# In bfloat16 the order of sums shows in the third digit. Small matrices would not be shared among replicas.
EXACT_MUON = lightning_muon.hf.optimizer(
    lr=LR, weight_decay=WEIGHT_DECAY, compute_dtype="float32", wire_dtype="float32", dedupe="always"
)


def causal_lm(*, tied: bool = False, seed: int = 0, kv_heads: int = 1) -> LlamaForCausalLM:
    """Odd shapes; repeated layers are FSDP2 units."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=19,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def samples(num_samples: int = 64) -> Samples:
    """Sequences of which only a part is to be predicted, each another one."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(num_samples):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = ((3 * tokens + 1) % VOCABULARY).masked_fill(torch.arange(LENGTH) > 2 + index % 7, -100)
        found.append({"input_ids": tokens, "labels": labels})
    return found


def accelerator_of(parallel: str, **variables: str) -> AbstractContextManager[None]:
    """Makes Accelerators of this kind: ``"none"``, ``"ddp"``, ``"fsdp"`` or ``"hsdp"`` (two replicas)."""
    if parallel == "none":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return fresh_accelerate({})
    if parallel == "ddp":
        return ddp_on_cpu()
    size = int(os.environ["WORLD_SIZE"])
    replicas = {"replicate_size": 2, "shard_size": size // 2} if parallel == "hsdp" else {}
    # Each layer is a unit, as with TrainingArguments(fsdp=True).
    return fsdp2_on_cpu(**replicas, **({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"} | variables))


@contextmanager
def launched(directory: str, options: dict[str, Any]) -> Generator[None]:
    """As in a script that ``lightning-muon launch`` starts with these options."""
    path = Path(directory, f"options{dist.get_rank()}-{free_port()}.yaml")
    path.write_text(yaml.safe_dump(options))
    with ExitStack() as stack:
        for module in (accelerate, accelerate.accelerator, transformers.trainer):
            stack.enter_context(mock.patch.object(module, "Accelerator", module.Accelerator))
        stack.enter_context(mock.patch.object(transformers.Trainer, "save_model", transformers.Trainer.save_model))
        stack.enter_context(mock.patch.dict(os.environ, {"LIGHTNING_MUON_CONFIG": str(path)}))
        replace_accelerator()
        yield


def trainer(
    directory: str,
    model: nn.Module,
    *,
    optimizer_cls_and_kwargs: Any = EXACT_MUON,
    accumulate: int = 1,
    ranks_per_sample: int = 1,
    global_batch: int = GLOBAL_BATCH,
    data: Samples | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """A quiet Trainer that takes the samples in their order, as many in a step at every number of ranks."""
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    share = global_batch * ranks_per_sample // accumulate // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        directory,
        use_cpu=True,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=share,
        gradient_accumulation_steps=accumulate,
        **(quiet | {"max_grad_norm": 0.0, "max_steps": NUM_STEPS} | options),
    )
    return kind(
        model,
        arguments,
        train_dataset=data or samples(),
        eval_dataset=samples(16),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )


def train_sharded(
    directory: str,
    sizes: dict[str, Any],
    resume: str = "",
    *,
    fsdp: str = "false",
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Tensor]:
    """Weights after four steps of a model that ``from_pretrained`` has sharded; saved after two, or begun there.

    Without sizes it is trained in one process.
    """
    # What tensor parallelism needs of Accelerate there is on CUDA alone.
    with accelerator_of("fsdp" if sizes else "none", ACCELERATE_USE_FSDP=fsdp):
        config = transformers.DistributedConfig(**sizes) if sizes else None
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
        prepare(model)
        # An evaluation leaves the root of FSDP2 whole, before it is saved.
        options = {} if resume else {"eval_strategy": "steps", "eval_steps": 2}
        options |= {"max_grad_norm": 0.3, "save_strategy": "steps", "save_steps": 2}
        run = trainer(
            f"{directory}/{'out' if sizes else 'alone'}",
            model,
            kind=lightning_muon.hf.Trainer,
            ranks_per_sample=sizes.get("tp_size", 1),
            **options,
        )
        run.train(resume_from_checkpoint=resume or None)
        for name, each in run.model.named_parameters():
            if ".experts." in name and sizes:  # As lightning-muon plan counts them, with any ep_size.
                assert each.to_local().numel() * sizes["fsdp_size"] == each.numel()
        return weights_of(run.model)
