"""The programs in examples/migration: how little changes, and that what it becomes trains as it should."""

import difflib
import importlib
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning import seed_everything
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import lightning_muon
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

ROOT = Path(__file__).parents[2] / "examples" / "migration"
PAIRS = sorted(path.parent / path.name.replace("before", "after") for path in ROOT.glob("*/before.*"))


@pytest.mark.parametrize("after", PAIRS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_migration_changes_at_most_six_lines(after: Path) -> None:
    before = after.with_stem("before").read_text().splitlines()
    changes = [line for line in difflib.ndiff(before, after.read_text().splitlines()) if line[:1] in "+-"]
    assert 0 < len(changes) <= 6, "\n".join(changes)


def _train(name: str, **options: Any) -> dict[str, Tensor]:
    """Weights on rank 0 after ``main`` of a program, with Newton-Schulz in float32, which agrees to the 6th digit."""
    program = importlib.import_module(f"examples.migration.{name}")
    with mock.patch("lightning_muon.optim.planned_optimizer.cpu_multiplies_bfloat16_fast", return_value=False):
        model = program.main(**options)
    weights = lightning_muon.full_state_dict(getattr(model, "module", model))
    return {key: value.clone() for key, value in weights.items()}


def _loop_of_torch(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Its model, and the batches of both ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    return model, [torch.cat([torch.randint(50, (8,), generator=one) for one in generators]) for _ in range(10)]


def _of_lightning(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Data are shuffled as Lightning does."""
    seed_everything(0)
    model, tokens, batches = importlib.import_module(f"examples.migration.{name}").Model(), torch.arange(48), []
    for epoch in range(2):
        sampler = DistributedSampler(tokens, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        batches += tokens[list(sampler)].split(8)
    return model, batches


_QUIET = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}
_FACTOR = MEASURED_MUON_LR_FACTOR


@pytest.mark.parametrize(
    ("source", "make", "options", "factor", "max_norm", "warm"),
    [
        ("from_ddp_adamw", _loop_of_torch, {}, _FACTOR, 0.5, 5),
        ("from_torch_muon", _loop_of_torch, {}, 1.0, math.inf, 0),
        ("from_lightning_fsdp", _of_lightning, _QUIET, _FACTOR, math.inf, 0),
        ("from_deepspeed", _of_lightning, _QUIET, _FACTOR, math.inf, 0),
    ],
)
def test_what_it_becomes_trains_as_one_process(
    gloo: ProcessPool, source: str, make: Any, options: dict[str, Any], factor: float, max_norm: float, warm: int
) -> None:
    """``warm`` steps of LinearLR."""
    model, batches = make(f"{source}.after")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [name for name in start if name.endswith(("up.weight", "down.weight")) or name == "1.weight"]
    optimizer = MuonAndAdamW(model, matrices, lr=1e-2, muon_lr_factor=factor)
    optimizer.muon.adjust_lr_fn = "original" if source == "from_torch_muon" else optimizer.muon.adjust_lr_fn
    for step, tokens in enumerate(batches):
        rate = 1e-2 * (1.0 if step >= warm else 1 / 3 + (1 - 1 / 3) * step / warm)
        optimizer.set_rate(rate)
        F.cross_entropy(getattr(model, "layers", model)(tokens), (tokens + 1) % 50).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        model.zero_grad()
    found = gloo.run(_train, f"{source}.after", world_size=2, **options)[0]
    # Of the way of a weight in the training: AdamW makes much of the last digit of a gradient that is almost 0.
    for name, end in model.state_dict().items():
        assert (found[name] - end).norm() < 1e-3 * (end - start[name]).norm(), name
