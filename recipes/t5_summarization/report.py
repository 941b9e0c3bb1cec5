"""What the demo prints: a callback that notes the numbers, and functions that turn them into text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_muon.params.routing import Route, route_module, routing_table
from recipes.t5_summarization.metrics import ROUGE_NAMES
from recipes.t5_summarization.model import Summary

_TEXT_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """Losses in nats per token, ROUGE as F-measure in [0, 1].

    Args:
        train_loss: Mean over the epoch, while the weights changed.
        val_loss: After the epoch.
        rouge: By name; empty if no summaries were generated.
    """

    train_loss: float
    val_loss: float
    rouge: dict[str, float] = field(default_factory=dict)


class History(Callback):
    """Notes the losses, the time and the routing of one fit.

    ``Trainer(num_sanity_val_steps=-1)`` makes Lightning validate the untrained model, which gives ``untrained_loss``.
    """

    def __init__(self) -> None:
        self.untrained_loss: float | None = None
        self.epochs: list[EpochResult] = []
        self.routing = ""
        self.seconds = 0.0
        self._start = 0.0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss of the untrained model, which Lightning is about to forget."""
        self.untrained_loss = _metrics(trainer).get("val_loss")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock; names and routes are read here because the strategy is torn down at the end."""
        self.routing = describe_routing(pl_module, trainer.optimizers)
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the metrics of the epoch; its validation has run by now."""
        metrics = _metrics(trainer)
        scores = {name: metrics[name] for name in ROUGE_NAMES if name in metrics}
        self.epochs.append(EpochResult(train_loss=metrics["train_loss"], val_loss=metrics["val_loss"], rouge=scores))
        self.seconds = time.monotonic() - self._start


def _metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def describe_routing(module: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """The table of what runs on Muon and what on AdamW, read off the optimizer if it is a ParallelMuon.

    Args:
        module: The model, sharded or not.
        optimizers: Of the trainer. Without a ParallelMuon among them the answer is a plain sentence.
    """
    for optimizer in optimizers:
        routes: list[Route] | None = getattr(optimizer, "routes", None)
        if routes is None:
            continue
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return routing_table(
            [
                (route, tuple(parameter.shape), not parameter.requires_grad)
                for route, parameter in zip(routes, parameters, strict=True)
            ]
        )
    used = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    num_matrices = sum(route.algorithm == "muon" for route in route_module(module).values())
    return f"{used} updates everything; strategy=parallel_muon would move {num_matrices} tensors to Muon."


def epoch_table(epochs: Sequence[EpochResult]) -> str:
    """One line per epoch."""
    lines = ["epoch  train loss  val loss  " + "  ".join(f"{_title(name):>7}" for name in ROUGE_NAMES)]
    for number, epoch in enumerate(epochs, start=1):
        scores = "  ".join(f"{epoch.rouge[name]:7.3f}" if name in epoch.rouge else "      -" for name in ROUGE_NAMES)
        lines.append(f"{number:5}  {epoch.train_loss:10.3f}  {epoch.val_loss:8.3f}  {scores}")
    return "\n".join(lines)


def _title(rouge_name: str) -> str:
    return rouge_name.replace("rouge", "ROUGE-")


def loss_summary(*, untrained: float | None, unigram: float, final: float) -> str:
    """The final validation loss beside what it has to beat."""
    lines = ["" if untrained is None else f"untrained model             {untrained:7.3f}"]
    lines += [f"unigram entropy of targets  {unigram:7.3f}", f"trained model               {final:7.3f}"]
    return "\n".join(line for line in lines if line)


def summary_examples(summaries: Sequence[Summary], count: int = 3) -> str:
    """The first generated summaries beside their targets."""
    return "\n\n".join(
        "\n".join(
            (
                f"source     {shorten(summary.source, _TEXT_WIDTH, placeholder=' ...')}",
                f"target     {summary.target}",
                f"generated  {summary.text}",
            )
        )
        for summary in summaries[:count]
    )


def section(title: str, text: str) -> str:
    """A titled block of the report."""
    return f"\n{title}\n{'=' * len(title)}\n{text}"


def full_report(history: History, *, unigram: float, summaries: Sequence[Summary], paths: dict[str, Path]) -> str:
    """Everything that the demo prints after training.

    Args:
        history: Of the fit.
        unigram: Entropy of the validation targets, nats per token.
        summaries: Of the last validation.
        paths: Title -> file.
    """
    final = history.epochs[-1]
    losses = loss_summary(untrained=history.untrained_loss, unigram=unigram, final=final.val_loss)
    scores = "   ".join(f"{_title(name)} {value:.3f}" for name, value in final.rouge.items())
    width = max(map(len, paths))
    return "\n".join(
        (
            section("What ran on which optimizer, and why", history.routing),
            section(f"Loss per epoch, nats per token ({history.seconds:.0f} s)", epoch_table(history.epochs)),
            section("Validation loss, nats per token", losses),
            section("ROUGE of generated summaries (F-measure)", scores or "none were generated"),
            section("Generated summaries of validation rows", summary_examples(summaries)),
            section("Files", "\n".join(f"{title:<{width}}  {path}" for title, path in paths.items())),
        )
    )
