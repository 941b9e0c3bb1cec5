"""The GPT of gpt.yaml, trained with Accelerate.

Nothing in this script knows of Muon, and AdamW is all that it asks for. Started by

    PYTHONPATH=. lightning-muon launch --config_file examples/accelerate.yaml recipes/gpt/accelerate_gpt.py

the same lines divide the model with FSDP2 and run its matrices on ParallelMuon; with ``accelerate launch`` they train
with AdamW. On CPUs, with two processes:

    PYTHONPATH=. lightning-muon launch --cpu --num_processes 2 recipes/gpt/accelerate_gpt.py
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from recipes.gpt.data import TextData
from recipes.gpt.model import build, make_optimizer


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text-files", nargs="+", default=[], help="patterns; default: Python's standard library")
    parser.add_argument("--dataset-name", default="", help="of datasets.load_dataset")
    parser.add_argument("--cache", type=Path, default=Path("outputs/cache"))
    parser.add_argument("--output", type=Path, default=Path("outputs/accelerate_gpt"))
    parser.add_argument("--resume", action="store_true", help="go on from the last state in --output")
    parser.add_argument("--architecture", choices=["gpt2", "llama"], default="llama")
    sizes = {"vocab-size": 2048, "context-size": 128, "width": 128, "layers": 4, "heads": 4, "batch-size": 8}
    steps = {"steps": 400, "validate-every": 50, "validation-batches": 16}
    for name, value in (sizes | steps).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def load_data(accelerator: Accelerator, args: argparse.Namespace) -> TextData:
    """Tokenized on the first process of each machine, while the others wait.

    They wait as long as the process group's timeout allows; tokenize a text that takes longer with one process.
    """
    names = ("text_files", "dataset_name", "vocab_size", "context_size", "batch_size")
    data = TextData(**{name: getattr(args, name) for name in names}, cache_dir=str(args.cache))
    if accelerator.is_local_main_process:
        data.prepare_data()
    accelerator.wait_for_everyone()
    data.setup("fit")
    return data


@torch.no_grad()
def validate(
    accelerator: Accelerator, model: torch.nn.Module, loader: torch.utils.data.DataLoader, count: int
) -> float:
    """Mean over the tokens of the first batches of all ranks."""
    model.eval()
    losses = [model(**batch).loss for batch in islice(loader, count)]
    model.train()
    return float(accelerator.reduce(torch.stack(losses).mean(), reduction="mean"))


def main() -> None:
    """Train, validate, save; at the end as a folder for ``from_pretrained``."""
    args = parse()
    accelerator = Accelerator()
    set_seed(0)
    data = load_data(accelerator, args)
    sizes = {name: getattr(args, name) for name in ("vocab_size", "context_size", "width", "layers", "heads")}
    model = build(args.architecture, **sizes)
    # Accelerate steps a scheduler once for each process.
    num_steps = args.steps * accelerator.num_processes
    optimizer, scheduler = make_optimizer(model, lr=args.lr, weight_decay=0.1, warmup_share=0.05, num_steps=num_steps)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, data.train_dataloader(), data.val_dataloader(), scheduler
    )
    state, step = args.output / "state", 0
    if args.resume:
        accelerator.load_state(state)
        step = int((state / "step").read_text())
    while step < args.steps:
        epoch, done = divmod(step, len(training))
        training.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(training, done):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % args.validate_every == 0 or step == args.steps:
                loss = validate(accelerator, model, validation, args.validation_batches)
                accelerator.print(f"step {step}: validation loss {loss:.4f}")
                accelerator.save_state(state)
                if accelerator.is_main_process:
                    (state / "step").write_text(str(step))
            if step == args.steps:
                break
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output / "model", state_dict=weights)
        data.tokenizer.save_pretrained(args.output / "model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
