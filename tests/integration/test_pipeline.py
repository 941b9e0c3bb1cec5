"""A Trainer with pipeline_size: the weights, metrics and predictions of one process, with Lightning's own samplers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integration import training
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import ROOT, run_program
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


def _model(pl: Any, configure: Any = training.adamw) -> Any:
    model = training.language_model(pl, network=lambda: training.Network(num_blocks=4), configure=configure)
    kind: Any = type(model)
    del kind.on_train_batch_end
    kind.pipeline_parts = lambda self: [self.network.embedding, *self.network.blocks, self.network.head]
    kind.pipeline_loss = staticmethod(_sum_of_losses)
    return model


def _fit(options: dict[str, Any], *, evaluates: bool) -> tuple[dict[str, Tensor], dict[str, float], list[Tensor]]:
    """Weights of this rank after two fits of two steps, metrics, and predictions."""
    pl = training.load()
    model = _model(pl, _two_groups)
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
    for weights, own, predicted in results:
        assert len(weights) < len(expected)
        assert all((value - expected[name]).abs().max() < _TOLERANCE for name, value in weights.items())
        # A factor of all gradients shows here only: a step of Muon has its own length.
        assert own["grad_norm"] == pytest.approx(metrics["grad_norm"], 1e-5)
        if evaluates:
            wanted = {"val": metrics["val"], "test": metrics["test"], "train_loss": metrics["loss"]}
            assert {key: own[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
            assert len(predicted) == 2 and all(map(torch.equal, predicted, predictions))


def _other_batch_of_one_rank() -> None:
    pl = training.load()
    batches = [(tokens[dist.get_rank() % 2 :: 2], targets[dist.get_rank() % 2 :: 2]) for tokens, targets in
               DataLoader(training.dataset(), batch_size=_ROWS)]  # fmt: skip
    if dist.get_rank() == 3:
        batches[1] = (batches[1][0][:-1], batches[1][1][:-1])
    strategy = training.strategy_class()(pipeline_size=2, shard_size=2)
    fitter = training.trainer(pl, strategy=strategy, use_distributed_sampler=False)
    fitter.fit(_model(pl), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def test_other_batches_of_one_pipeline_end_all_of_them() -> None:
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(_other_batch_of_one_rank)
    assert all("have different batches" in raised.value.failures[rank].message for rank in (1, 3))
    assert raised.value.exit_codes == {0: 1, 2: 1}  # Those of the other pipeline.
    for rank in (0, 2):
        assert re.search(rf"rank {rank} ends: rank [13] has failed: .* different batches", str(raised.value))


@pytest.mark.long
def test_the_examples_run(tmp_path: Path) -> None:
    def run(name: str, *words: str, num_ranks: int = 2) -> str:
        return run_program(ROOT / "examples" / f"{name}.py", *words, directory=tmp_path, num_ranks=num_ranks)

    trained = run("pipeline_gpt", "--steps", "2", "--shard-size", "1", "--schedule", "zb_h1")
    assert "validation loss" in trained
    assert "loss " in run("pipeline_t5", "--steps", "2")
    loop = run("pipeline_loop", "--steps", "2")
    assert "step 2: loss" in loop and "The statement " in loop
    assert "\ndual_pipe_v            2    26.80" in run("schedules", num_ranks=1)
