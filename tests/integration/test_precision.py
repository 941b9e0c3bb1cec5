"""Precisions: the supported ones compute in what they say, the others are refused by every way to ask for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def _regression_targets() -> list[float]:
    pl = training.load()
    seen: list[float] = []

    class Targets(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[1][0].item())
            return nn.functional.mse_loss(self.last(self.layer(batch[0])), batch[1])

    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.full((4, 1), 1000.125))
    training.trainer(pl, precision="bf16-mixed", max_steps=1).fit(
        Targets(), torch.utils.data.DataLoader(data, batch_size=2)
    )
    return seen


def test_mixed_precision_does_not_round_the_batch(gloo: ProcessPool) -> None:
    assert gloo.run(_regression_targets, world_size=2)[0] == [1000.125]


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.first, self.norm, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embedding(tokens).transpose(1, 2)))
        return self.head(x.transpose(1, 2))


def _batch_norm() -> Tensor:
    pl = training.load()
    model = training.language_model(pl, network=_Convolutions)
    training.trainer(pl, precision="bf16-mixed").fit(model, training.loader(), training.loader())
    return model.network.norm.running_mean


def test_batch_norms_keep_float32_and_end_as_on_rank_0(gloo: ProcessPool) -> None:
    first, second = gloo.run(_batch_norm, world_size=2)
    assert first.dtype == torch.float32 and torch.equal(first, second) and first.abs().max() > 0
