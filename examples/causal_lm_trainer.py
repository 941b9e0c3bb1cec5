"""Causal language modelling with the Trainer of transformers and ParallelMuon, after run_clm.py of transformers.

On one device, then on eight GPUs (FSDP2, hybrid), then another model on another text:

    python examples/causal_lm_trainer.py --output_dir out --max_steps 100
    accelerate launch --config_file examples/causal_lm_fsdp.yaml examples/causal_lm_trainer.py --output_dir out
    python examples/causal_lm_trainer.py --output_dir out --model_name Qwen/Qwen3-0.6B --text_file book.txt

Without a name the model is a small Llama with a tokenizer trained on the text, and the text is what the Python library
says about itself, so that nothing is downloaded.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import lightning_muon.hf

END = "<|endoftext|>"


@dataclass
class ScriptArguments:
    """What run_clm.py calls model and data arguments, and the learning rate of ParallelMuon."""

    model_name: str = field(default="", metadata={"help": "a model on the hub, or a folder; empty: a small Llama"})
    from_scratch: bool = field(default=False, metadata={"help": "take its config and tokenizer, not its weights"})
    text_file: str = field(default="", metadata={"help": "empty: the documentation strings of the Python library"})
    block_size: int = field(default=128, metadata={"help": "tokens in a sequence"})
    vocab_size: int = field(default=2000, metadata={"help": "of the small Llama"})
    hidden_size: int = field(default=256, metadata={"help": "of the small Llama; a multiple of 64"})
    num_layers: int = field(default=4, metadata={"help": "of the small Llama"})
    muon_lr: float = field(default=2e-3, metadata={"help": "learning rate of ParallelMuon, and of AdamW inside of it"})
    muon_weight_decay: float = field(default=0.1)


def library_text() -> str:
    """The documentation strings of the modules of the Python library that are written in Python."""
    folder = str(Path(inspect.__file__).parent)
    names = sorted(module.name for module in pkgutil.iter_modules([folder]) if not module.name.startswith("_"))
    sources = [Path(folder, f"{name}.py") for name in names]
    texts = [source.read_text(encoding="utf-8", errors="ignore") for source in sources if source.is_file()]
    return END.join(part for text in texts for part in text.split('"""')[1::2])


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.replace(END, "\n").split("\n"), trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def model_and_tokenizer(options: ScriptArguments, text: str) -> tuple[Any, Any]:
    """From the hub or a folder, or small and new."""
    if options.model_name:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name)
        if not options.from_scratch:
            return AutoModelForCausalLM.from_pretrained(options.model_name), tokenizer
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model_name)), tokenizer
    tokenizer = train_tokenizer(text, options.vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // 64,
        max_position_embeddings=options.block_size,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def grouped(text: str, tokenizer: Any, block_size: int) -> list[dict[str, list[int]]]:
    """All tokens of the text in blocks of one size; the rest at the end is left out."""
    tokens = [token for part in text.split(END) for token in (*tokenizer(part)["input_ids"], tokenizer.eos_token_id)]
    starts = range(0, len(tokens) - block_size + 1, block_size)
    blocks = [tokens[start : start + block_size] for start in starts]
    return [{"input_ids": block, "labels": block} for block in blocks]


def main(words: Sequence[str]) -> dict[str, float]:
    """Train, save, and return the metrics of the evaluation."""
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))  # type: ignore[arg-type]
    options, arguments = parser.parse_args_into_dataclasses(list(words))
    set_seed(arguments.seed)
    text = Path(options.text_file).read_text(encoding="utf-8") if options.text_file else library_text()
    model, tokenizer = model_and_tokenizer(options, text)
    blocks = grouped(text, tokenizer, options.block_size)
    num_held_out = max(1, len(blocks) // 20)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=blocks[num_held_out:],
        eval_dataset=blocks[:num_held_out],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        optimizer_cls_and_kwargs=lightning_muon.hf.optimizer(
            lr=options.muon_lr, weight_decay=options.muon_weight_decay
        ),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:
        # A model that save_pretrained would write, whatever the checkpoints of the training are.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
