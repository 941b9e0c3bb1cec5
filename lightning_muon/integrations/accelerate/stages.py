"""What a pipeline changes in Accelerate: samples that its ranks have in common, files of stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher

from lightning_muon.comm.agreement import gather, on_first_rank
from lightning_muon.integrations.accelerate.checkpoints import read_states, write_states


def draw_alike(loader: Any) -> None:
    """Let all ranks draw the samples of a data loader in one order, of which the ranks of a pipeline take the same.

    Accelerate sees to that where several ranks have samples of their own. Collective over all ranks; every rank must
    call it.

    Raises:
        ValueError: If the loader divides what the first rank has read among all ranks.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise ValueError(
            "dispatch_batches gives each rank rows of its own, and the ranks of a pipeline need the same; set "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )
    batches = loader.batch_sampler
    sampler: Any = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    if not hasattr(sampler, "generator"):
        return
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))
    state, seed = gather((sampler.generator.get_state(), getattr(sampler, "initial_seed", None)), None)[0]
    sampler.generator.set_state(state)
    if seed is not None:  # Of Accelerate's SeedableRandomSampler.
        sampler.initial_seed = seed


TRAINER_FUNCTIONS = ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer")


def for_stages(stock: Callable[..., Any]) -> Callable[..., Any]:
    """One of :data:`TRAINER_FUNCTIONS` of Accelerate, which saves and loads the stages of a pipeline as we do.

    A Trainer of transformers calls it on all ranks: with plugin, accelerator, model or optimizer, ..., directory.
    """

    @wraps(stock)
    def function(plugin: Any, accelerator: Any, *arguments: Any, **kwargs: Any) -> Any:
        engine = getattr(accelerator, "_engine", None)
        if engine is None or engine.pipeline is None:
            return stock(plugin, accelerator, *arguments, **kwargs)
        directory, of_model = Path(arguments[-1]), stock.__name__.endswith("model")
        chosen = {"with_model": of_model, "with_optimizers": not of_model}
        if stock.__name__.startswith("load"):
            return read_states(engine, directory, **chosen)
        on_first_rank(lambda: directory.mkdir(parents=True, exist_ok=True))
        return write_states(engine, directory, whole=False, **chosen)

    return function
