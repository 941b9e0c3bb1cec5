"""The loop of a program of Accelerate or Fabric that nobody has changed, over the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.distributed.pipeline.models import batch_of, causal_lm, encoder_decoder
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu
from tests.integration.training import adamw
from tests.support.processes import ProcessPool

Samples = list[dict[str, Tensor]]
_NUM_ROWS, _ROWS, _SCALE = 32, 8, 0.5


def _samples() -> Samples:
    # As many labels in each row: a mean over the ranks is then that over all labels.
    batch = batch_of(_NUM_ROWS, 5, seed=3, is_uneven=False)
    return [{key: value[row] for key, value in batch.items()} for row in range(_NUM_ROWS)]


def _net(kind: str) -> nn.Module:
    return encoder_decoder(2) if kind == "t5" else causal_lm(kind, tied=True)


def _train(kind: str, *, accumulate: int = 1, num_data_ranks: int = 1, **options: Any) -> tuple[Any, ...]:
    """Weights, losses, rates and a gathered evaluation of the loop in the documentation of Accelerate."""
    with accelerator_on_cpu(accumulate=accumulate, is_fsdp=False, **options) as accelerator:
        net, losses, rates = _net(kind), list[float](), list[float]()
        optimizer = adamw(net)
        # It steps once for each data rank.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step // num_data_ranks))
        loader = DataLoader(_samples(), batch_size=_ROWS // accumulate // num_data_ranks)  # type: ignore[arg-type]
        loader, model, optimizer, scheduler = accelerator.prepare(loader, net, optimizer, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(_SCALE * loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        model.eval()
        rows = list[Tensor]()
        with torch.no_grad():
            rows = [accelerator.gather_for_metrics(batch["input_ids"].sum(-1)) for batch in loader]
            names = accelerator.gather_for_metrics([f"data rank {dist.get_rank() % num_data_ranks}"])
        weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in net.named_parameters()}
        whole = accelerator.get_state_dict(model)
        return {n: p.detach().clone() for n, p in weights.items()}, losses, rates, torch.cat(rows), names, whole


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("llama", 2, {"accumulate": 2}),
        ("llama", 2, {"sharding": "none", "pipeline_schedule": "zb_v"}),
        ("gpt2", 4, {"accumulate": 2, "replicate_size": 2}),
        ("t5", 2, {"pipeline_schedule": "1f1b"}),
    ],
)
def test_an_unchanged_loop_trains_as_one_process(
    gloo: ProcessPool, kind: str, world_size: int, options: dict[str, Any]
) -> None:
    accumulate = options.get("accumulate", 1)
    expected, losses, rates, rows, _, _ = gloo.run(_train, kind, accumulate=accumulate, world_size=1)[0]
    results = gloo.run(_train, kind, pipeline_size=2, num_data_ranks=world_size // 2, world_size=world_size, **options)
    for weights, own, rates_of_rank, gathered, names, _ in results:
        for name, value in weights.items():
            wanted = expected.get(name, next(iter(expected.values())))
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=5e-6)
        assert torch.equal(gathered, rows)
        assert names == [f"data rank {rank}" for rank in range(world_size // 2)]
        assert rates_of_rank == rates
        assert world_size > 2 or own == pytest.approx(losses, rel=1e-5)
    whole = results[0][-1]
    assert all(torch.allclose(whole[name], value, rtol=1e-5, atol=5e-6) for name, value in expected.items())
    assert not any(result[-1] for result in results[1:])


def _misuse(what: str) -> None:
    with accelerator_on_cpu(accumulate=1, is_fsdp=False, pipeline_size=2, sharding="none") as accelerator:
        is_chain = what == "no language model"
        net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if is_chain else _net("llama")
        if is_chain:
            net.pipeline_loss = lambda output, target: (output.sum(), 1)
        model, optimizer = accelerator.prepare(net, adamw(net))
        batch = batch_of(8, 5, seed=0)
        if is_chain:
            model(torch.ones(2, 2))
        elif what == "no labels":
            model(batch["input_ids"])
        loss = model(**batch).loss
        factor = 1.0 + dist.get_rank() if what == "other factors" else 1.0
        accelerator.backward(loss * factor)
        if what == "twice":
            accelerator.backward(loss)
        optimizer.step()
        if what == "other factors":  # No rank waits for the others before the step.
            model(**batch)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("no language model", r"lightning_muon.forward_backward\(model, batch\)"),
        ("no labels", "in training call it with labels"),
        ("other factors", "derivatives of the loss from 1 to 2 on the ranks"),
        ("twice", "second time"),
    ],
)
def test_what_a_call_cannot_mean_is_an_error_on_all_ranks(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_misuse, what, match=match, exception=RuntimeError, world_size=2)
