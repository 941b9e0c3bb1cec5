"""The same fine-tuning as a loop of Accelerate, which asks for AdamW and knows nothing of Muon.

    PYTHONPATH=. lightning-muon launch --config_file examples/accelerate.yaml \
        recipes/finetune/with_accelerate.py --model_name Qwen/Qwen3-0.6B --source rows.jsonl --lora_rank 16 --lr 2e-4

Without --lora_rank it trains all weights; a copy of the config file then says ``optimizer: keep`` in its last section.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from recipes.finetune.data import PromptData
from recipes.finetune.model import build_model, export, loss_sum, require_room
from recipes.t5_summarization.model import warmup_then_linear_decay


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", required=True, help="on the hub, or a folder")
    parser.add_argument("--source", required=True, help="a .jsonl file, or a data set on the hub")
    parser.add_argument("--validation_source", default="", help="the same; empty: a twentieth of the rows")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune/model"))
    parser.add_argument("--lora_rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="rows per process")
    parser.add_argument("--max_tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args(arguments)


@torch.no_grad()
def validate(accelerator: Accelerator, model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    """Mean loss over the tokens of all ranks. Collective."""
    model.eval()
    total = sum(torch.stack(loss_sum(model, batch)) for batch in loader)
    model.train()
    loss, num_tokens = accelerator.reduce(total).tolist()
    return loss / num_tokens


def main(arguments: list[str] | None = None) -> None:
    """Train, measure after each epoch, export."""
    args = parse(arguments)
    accelerator = Accelerator()
    set_seed(0)
    lora = {"r": args.lora_rank, "lora_alpha": 2 * args.lora_rank, "target_modules": "all-linear"}
    model = build_model(args.model_name, lora if args.lora_rank else None)
    data = PromptData(
        source=args.source,
        tokenizer=args.model_name,
        validation_source=args.validation_source,
        max_tokens=args.max_tokens,
        batch_size=args.batch_size,
    )
    with accelerator.main_process_first():  # The others find what it has downloaded.
        data.prepare_data()
    data.setup("fit")
    require_room(model, data.highest_token)
    training, validation = data.train_dataloader(), data.val_dataloader()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    num_steps = args.epochs * len(training)  # Accelerate steps a scheduler once for each process.
    factor = partial(warmup_then_linear_decay, warmup_steps=max(1, num_steps // 30), total_steps=num_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    for epoch in range(args.epochs):
        training.set_epoch(epoch)
        for batch in training:
            loss, num_tokens = loss_sum(model, batch)
            # Gradients are averaged over the processes; each token of all of them counts alike.
            mean_tokens = accelerator.reduce(num_tokens) / accelerator.num_processes
            accelerator.backward(loss / mean_tokens)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: validation loss {validate(accelerator, model, validation):.4f}")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        export(accelerator.unwrap_model(model), weights, data.tokenizer, args.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
