"""A Fabric program inside of the workers of the gloo pool, and the same training in one process with whole matrices."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor

from tests.integration.training import (
    EXACT,
    HYPER,
    LENGTH,
    VOCABULARY,
    Network,
    adamw,
    full_weights,
    loss_of,
    strategy_class,
)
from tests.reference.muon_and_adamw import muon_and_adamw

MATRICES = tuple(f"blocks.{block}.{layer}.weight" for block in range(2) for layer in ("up", "down"))
ROWS = 12  # Of a micro-batch, on all ranks together.


def launch(**options: Any) -> Any:
    """A Fabric over all ranks of the pool's call."""
    os.environ["TORCHELASTIC_RUN_ID"] = "pool"
    strategy = strategy_class("lightning.fabric")(**({"optimizer": EXACT} | options))
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def network(seed: int = 0, **options: Any) -> Network:
    torch.manual_seed(seed)
    return Network(**options)


def set_up(seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    """A Fabric, a model and its optimizer."""
    fabric = launch(**options)
    module = network(seed)
    return fabric, *fabric.setup(module, adamw(module))


def end(fabric: Any, model: Any) -> dict[str, Tensor]:
    """Tear down, and return :func:`weights`."""
    result = weights(model)
    fabric.strategy.teardown()
    return result


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """For ``loss_scaling="tokens"``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def own_rows(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    return batch[0][rows], batch[1][rows]


def backward(
    fabric: Any, model: Any, step: int, loss: Callable[..., Tensor] | None = None, *, accumulate: int = 2
) -> Tensor:
    """The micro-batches of a step; the last loss."""
    found = torch.zeros(())
    for index in range(accumulate):
        tokens, targets = own_rows(micro_batch(step, index))
        with fabric.no_backward_sync(model, enabled=index < accumulate - 1):
            found = (loss(tokens, targets) if loss else loss_of(model(tokens), targets)) / accumulate
            fabric.backward(found)
    return found


def run_steps(
    fabric: Any,
    model: Any,
    optimizer: Any,
    *,
    steps: range = range(4),
    accumulate: int = 2,
    clip: Callable[[], Any] | None = None,
    scheduler: Any = None,
) -> None:
    """The loop that the documentation of Fabric shows."""
    for step in steps:
        optimizer.zero_grad()
        backward(fabric, model, step, accumulate=accumulate)
        if clip is not None:
            clip()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model: Any) -> dict[str, Tensor]:
    """Whole weights of what ``fabric.setup`` has returned, on rank 0. Collective."""
    return full_weights(model.module)


def reference(*, steps: int = 4, accumulate: int = 2, max_norm: float | None = None) -> dict[str, Tensor]:
    """What :func:`run_steps` does, in one process."""
    module = network()
    optimizer = muon_and_adamw(module, MATRICES, **HYPER)
    for step in range(steps):
        module.zero_grad()
        for index in range(accumulate):
            tokens, targets = micro_batch(step, index)
            (loss_of(module(tokens), targets) / accumulate).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
