"""The T5 of the demo (recipes/t5_summarization), trained with Accelerate.

Nothing in this script knows of Muon, and AdamW is all that it asks for. Started by

    PYTHONPATH=. lightning-muon launch --config_file examples/accelerate_t5.yaml examples/accelerate_t5.py

the same lines divide the model with FSDP2 and run its matrices on ParallelMuon. `from lightning_muon.accelerate import
Accelerator` in place of the import from accelerate does so under any other launcher. On CPUs, with four processes:

    PYTHONPATH=. lightning-muon launch --cpu --num_processes 4 examples/accelerate_t5.py
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from recipes.t5_summarization.data import IGNORED_LABEL, SummarizationData
from recipes.t5_summarization.model import build_t5, warmup_then_linear_decay


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", default="docstrings", help="docstrings, or a file with title, text and summary")
    parser.add_argument("--cache", type=Path, default=Path("outputs/cache"))
    parser.add_argument("--output", type=Path, default=Path("outputs/accelerate_t5"))
    parser.add_argument("--resume", action="store_true", help="go on from the last state in --output")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=24_000, help="to train on")
    parser.add_argument("--validation-rows", type=int, default=640)
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch of each process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=5e-3)
    return parser.parse_args(arguments)


def load_data(accelerator: Accelerator, args: argparse.Namespace) -> SummarizationData:
    data = SummarizationData(
        source=args.source,
        vocab_size=args.vocabulary,
        max_source_tokens=48,
        max_target_tokens=24,
        train_rows=args.rows,
        validation_rows=args.validation_rows,
        batch_size=args.batch,
        cache_dir=str(args.cache),
    )
    with accelerator.main_process_first():  # The others find what it has harvested.
        data.setup("fit")
    return data


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    architecture = {
        "vocab_size": args.vocabulary,
        "d_model": args.width,
        "d_kv": args.width // 4,
        "d_ff": 3 * args.width,
        "num_layers": args.layers,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    }
    return build_t5(architecture, pretrained=False)


@torch.no_grad()
def validate(accelerator: Accelerator, model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    """Mean loss over all tokens."""
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        num_tokens = (batch["labels"] != IGNORED_LABEL).sum()
        total += torch.stack([model(**batch).loss * num_tokens, num_tokens])
    model.train()
    loss, num_tokens = accelerator.reduce(total).tolist()
    return loss / num_tokens


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    data, model = load_data(accelerator, args), make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    training, validation = data.train_dataloader(), data.val_dataloader()
    # Accelerate steps a scheduler once for each process.
    num_steps = args.epochs * len(training) // args.accumulate
    factor = partial(warmup_then_linear_decay, warmup_steps=max(1, num_steps // 20), total_steps=num_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    state, first = args.output / "state", 0
    if args.resume:
        accelerator.load_state(state)
        first = int((state / "epoch").read_text())
    accelerator.print(f"untrained: validation loss {validate(accelerator, model, validation):.4f}")
    for epoch in range(first, args.epochs):
        training.set_epoch(epoch)
        for batch in training:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: validation loss {validate(accelerator, model, validation):.4f}")
        accelerator.save_state(state)
        if accelerator.is_main_process:
            (state / "epoch").write_text(str(epoch + 1))
        accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output / "model", state_dict=weights)
    accelerator.end_training()


if __name__ == "__main__":
    main()
