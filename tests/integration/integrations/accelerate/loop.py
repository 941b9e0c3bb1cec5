"""A program of Accelerate inside of the workers of the gloo pool."""

import contextlib
import io
import runpy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate

import lightning_muon.accelerate
from tests.integration.integrations.fabric.loop import adamw, micro_batch, network, own_rows
from tests.integration.training import EXACT, loss_of
from tests.support.accelerate_cpu import ddp_on_cpu, fsdp2_on_cpu


@contextmanager
def accelerator_on_cpu(
    *,
    micro_batches: int = 2,
    replicate_size: int | None = None,
    shard_size: int | None = None,
    mixed_precision: str = "no",
    variables: dict[str, str] | None = None,
    is_fsdp: bool = True,
    **options: Any,
) -> Generator[Any]:
    """An Accelerator of ours over all ranks of the pool's call, as launched with FSDP2 or with several CPUs."""
    environment = {"mixed_precision": mixed_precision, **(variables or {})}
    if is_fsdp:
        context = fsdp2_on_cpu(replicate_size=replicate_size, shard_size=shard_size, **environment)
    else:
        context = ddp_on_cpu(**environment)
        sizes = {"replicate_size": replicate_size, "shard_size": shard_size}
        options |= {key: size for key, size in sizes.items() if size is not None}
    with context:
        accelerator = lightning_muon.accelerate.Accelerator(
            gradient_accumulation_steps=micro_batches, options={"optimizer": EXACT} | options
        )
        yield accelerator
        accelerator.free_memory()


@contextmanager
def training_on_cpu(**options: Any) -> Generator[tuple[Any, Any, Any]]:
    """An Accelerator, a model and its optimizer."""
    with accelerator_on_cpu(**options) as accelerator:
        module = network()
        yield accelerator, *accelerator.prepare(module, adamw(module))


def run_steps(accelerator: Any, model: Any, optimizer: Any, *, steps: range = range(4)) -> None:
    """The loop that the documentation of Accelerate shows."""
    for step in steps:
        for index in range(accelerator.gradient_accumulation_steps):
            tokens, targets = own_rows(micro_batch(step, index))
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens), targets))
                optimizer.step()
                optimizer.zero_grad()


def run_script(path: Path, arguments: list[str]) -> str:
    """What a script prints that ``lightning-muon launch`` starts on all ranks of the pool's call."""
    printed = io.StringIO()
    with (
        fsdp2_on_cpu(replicate_size=1, shard_size=2),
        mock.patch.object(accelerate, "Accelerator", lightning_muon.accelerate.Accelerator),
        mock.patch("sys.argv", [path.name, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
