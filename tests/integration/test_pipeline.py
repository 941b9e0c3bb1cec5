"""A Trainer with pipeline_size: the weights, metrics and predictions of one process, with Lightning's own samplers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integration import training
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

_ROWS = 16
# Sums of float32 in another order; Newton-Schulz makes more of it where a gradient has small singular values.
_TOLERANCE = 5e-6


def _sum_of_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def _two_groups(module: Any) -> Any:
    """One of them is that of the first stage alone; with a scheduler."""
    embedding = list(module.network.embedding.parameters())
    others = [parameter for name, parameter in module.network.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": embedding, "weight_decay": 0.0}, {"params": others}], lr=1e-2, weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _model(pl: Any) -> Any:
    model = training.language_model(pl, network=lambda: training.Network(num_blocks=4), configure=_two_groups)
    kind: Any = type(model)
    kind.pipeline_parts = lambda self: [self.network.embedding, *self.network.blocks, self.network.head]
    kind.pipeline_loss = staticmethod(_sum_of_losses)
    return model


def _fit(options: dict[str, Any], *, evaluates: bool) -> tuple[dict[str, Tensor], dict[str, float], list[Tensor]]:
    """Weights of this rank after two fits of two steps, metrics, and predictions."""
    pl = training.load()
    model = _model(pl)
    num_data_ranks = dist.get_world_size() // options.get("pipeline_size", 1)
    loader = DataLoader(training.dataset(), batch_size=_ROWS // num_data_ranks)
    metrics: dict[str, float] = {}
    for _ in range(2):
        strategy = training.strategy_class()(optimizer=training.EXACT, **options)
        fitter = training.trainer(pl, strategy=strategy, max_epochs=1, gradient_clip_val=0.3)
        fitter.fit(model, loader, loader if evaluates else None)
        metrics |= {key: float(value) for key, value in fitter.callback_metrics.items()}
    weights, predictions = weights_of(model), []
    if evaluates:
        (tested,) = fitter.test(model, loader, verbose=False)
        metrics |= {key: float(value) for key, value in tested.items()}
        predictions = fitter.predict(model, loader)
    return weights, metrics, predictions


@pytest.mark.parametrize(
    ("options", "evaluates"), [({"pipeline_schedule": "zb_v"}, True), ({"replicate_size": 2}, False)], ids=str
)
def test_weights_and_metrics_are_those_of_one_process(
    gloo: ProcessPool, options: dict[str, Any], evaluates: bool
) -> None:
    expected, metrics, predictions = gloo.run(_fit, {}, evaluates=evaluates, world_size=1)[0]
    num_ranks = 2 * options.get("replicate_size", 1)
    results = gloo.run(_fit, {"pipeline_size": 2, **options}, evaluates=evaluates, world_size=num_ranks)
    assert {name for weights, *_ in results for name in weights} == set(expected)
    assert metrics["grad_norm"] > 0.3, "before it is clipped"
    for weights, own, predicted in results:
        assert len(weights) < len(expected)
        assert all((value - expected[name]).abs().max() < _TOLERANCE for name, value in weights.items())
        # A factor of all gradients shows here only: a step of Muon has its own length.
        assert own["grad_norm"] == pytest.approx(metrics["grad_norm"], 1e-5)
        if evaluates:
            wanted = {"val": metrics["val"], "test": metrics["test"], "train_loss": metrics["loss"]}
            assert {key: own[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
            assert len(predicted) == 2 and all(map(torch.equal, predicted, predictions))
