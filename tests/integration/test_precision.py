"""Precisions: the supported ones compute in what they say, the others are refused by every way to ask for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integration import training
from tests.support.processes import ProcessPool


def _dtypes(precision: str) -> dict[str, Any]:
    pl, seen = training.load(), dict[str, Any]()
    model = training.language_model(pl)
    block = model.network.blocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.update(weight=block.up.weight.dtype, input=args[0].dtype))
    kind = type(model)
    kind.on_before_backward = lambda self, loss: seen.update(loss=loss.dtype)
    kind.on_after_backward = lambda self: seen.update(gradient={p.grad.dtype for p in self.parameters()})
    training.trainer(pl, precision=precision, max_epochs=1).fit(model, training.loader())
    return seen | {"parameter": next(model.parameters()).dtype}


_FLOAT, _BFLOAT = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", dict.fromkeys(("weight", "input", "loss", "parameter"), _FLOAT) | {"gradient": {_FLOAT}}),
        ("bf16-mixed", {"weight": _BFLOAT, "input": _BFLOAT, "loss": _FLOAT, "parameter": _FLOAT,
                        "gradient": {_FLOAT}}),
        ("bf16-true", dict.fromkeys(("weight", "input", "loss", "parameter"), _BFLOAT) | {"gradient": {_BFLOAT}}),
    ],
)  # fmt: skip
def test_a_precision_computes_in_what_it_says(gloo: ProcessPool, precision: str, expected: Any) -> None:
    for seen in gloo.run(_dtypes, precision, world_size=2):
        assert seen == expected


def _regression() -> tuple[float, Tensor]:
    """A target as training_step gets it, and the running mean that is left."""
    pl, seen = training.load(), list[float]()

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[1][0].item())
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.full((4, 1), 1000.125))
    model, loader = Regression(), DataLoader(data, batch_size=2)
    training.trainer(pl, precision="bf16-mixed").fit(model, loader, loader)
    return seen[0], model.net[1].running_mean


def test_mixed_precision_rounds_no_batch_and_no_statistics(gloo: ProcessPool) -> None:
    """Batch norms end as on rank 0."""
    (target, first), (_, second) = gloo.run(_regression, world_size=2)
    assert target == 1000.125
    assert first.dtype == torch.float32 and torch.equal(first, second) and first.abs().max() > 0
