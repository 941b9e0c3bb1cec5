"""The programs in examples/migration: how little changes, and that what it becomes trains as it should."""

import difflib
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_muon
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration.training import max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

ROOT = Path(__file__).parents[2] / "examples" / "migration"
PAIRS = sorted(path.parent / path.name.replace("before", "after") for path in ROOT.glob("*/before.*"))

# Float32 sums in another order, through Newton-Schulz.
TOLERANCE = 5e-5


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


def _language() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))


def _plain_loop(
    model: nn.Module,
    batches: Iterable[Tensor],
    optimizer: MuonAndAdamW,
    *,
    max_norm: float = float("inf"),
    warm: int = 0,
) -> dict[str, Tensor]:
    """One process with the batches of all ranks; ``warm`` steps of LinearLR."""
    for step, tokens in enumerate(batches):
        rate = 1e-2 * (1.0 if step >= warm else 1 / 3 + (1 - 1 / 3) * step / warm)
        optimizer.adamw.param_groups[0]["lr"] = optimizer.muon.lr = rate
        F.cross_entropy(model(tokens), (tokens + 1) % 50).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        model.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _batches_of_both_ranks() -> list[Tensor]:
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    return [torch.cat([torch.randint(50, (8,), generator=one) for one in generators]) for _ in range(10)]


def test_ddp_with_adamw_becomes_fsdp2_with_muon(gloo: ProcessPool) -> None:
    model = _language()
    optimizer = MuonAndAdamW(model, ["1.weight"], lr=1e-2, muon_lr_factor=3.0)
    expected = _plain_loop(model, _batches_of_both_ranks(), optimizer, max_norm=0.5, warm=5)
    assert max_difference(gloo.run(_train, "from_ddp_adamw.after", world_size=2)[0], expected) < TOLERANCE


def test_torchs_muon_becomes_the_same_in_one_optimizer(gloo: ProcessPool) -> None:
    before, after = (gloo.run(_train, f"from_torch_muon.{name}", world_size=2)[0] for name in ("before", "after"))
    model = _language()
    muon = MuonAndAdamW(model, ["1.weight"], lr=1e-2)
    muon.muon.adjust_lr_fn = "original"
    # AdamW divides by the root of squares, which makes much of the last digit of a gradient that is almost 0.
    assert _share(after, _plain_loop(model, _batches_of_both_ranks(), muon)) < 1e-3
    # torch.optim.Muon runs Newton-Schulz in bfloat16, which has 8 bits; the other adjust_lr_fn would make it 0.2.
    assert _share(after, before) < 0.1


def _share(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight as a whole, of the way that it went in the training."""
    start = _language().state_dict()
    return max(float((weights[name] - end).norm() / (end - start[name]).norm()) for name, end in expected.items())


def _blocks(name: str) -> dict[str, Tensor]:
    """What a Lightning program of two epochs should become; its data are shuffled as Lightning does."""
    from lightning import seed_everything
    from torch.utils.data import DistributedSampler

    seed_everything(0)
    model = importlib.import_module(f"examples.migration.{name}").Model()
    tokens, batches = torch.arange(48), []
    for epoch in range(2):
        sampler = DistributedSampler(tokens, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        batches += tokens[list(sampler)].split(8)
    matrices = [key for key, _ in model.layers.named_parameters() if key.endswith(("up.weight", "down.weight"))]
    optimizer = MuonAndAdamW(model.layers, matrices, lr=1e-2, muon_lr_factor=MEASURED_MUON_LR_FACTOR)
    weights = _plain_loop(model.layers, batches, optimizer)
    return {f"layers.{key}": value for key, value in weights.items()}


_QUIET = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}


@pytest.mark.parametrize("source", ["from_lightning_fsdp", "from_deepspeed"])
def test_a_lightning_program_becomes_one_with_our_strategy(gloo: ProcessPool, source: str) -> None:
    (weights, _) = gloo.run(_train, f"{source}.after", world_size=2, **_QUIET)
    assert max_difference(weights, _blocks(f"{source}.after")) < TOLERANCE
