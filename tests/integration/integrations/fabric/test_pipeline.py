"""A loop of Fabric that calls ``forward_backward``: the weights, losses and answers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_muon import forward_backward, full_state_dict
from tests.distributed.pipeline.models import batch_of, causal_lm
from tests.integration.integrations.fabric import loop
from tests.support.processes import ProcessPool

_NUM_ROWS, _ROWS = 32, 8


def _train(kind: str, **options: Any) -> tuple[dict[str, Tensor], list[float], Tensor, Tensor]:
    """Whole weights, losses of this data rank, the logits of a call, and what is generated."""
    fabric = loop.launch(**options)
    net = causal_lm(kind, tied=True)
    model, optimizer = fabric.setup(net, loop.adamw(net))
    model.mark_forward_method("generate")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    # As many labels in each row: a mean over the ranks is then that over all labels.
    batch = batch_of(_NUM_ROWS, 5, seed=3, is_uneven=False)
    samples: Any = [{key: value[row] for key, value in batch.items()} for row in range(_NUM_ROWS)]
    num_data_ranks = dist.get_world_size() // options.get("pipeline_size", 1)
    loader = fabric.setup_dataloaders(DataLoader(samples, batch_size=_ROWS // num_data_ranks))
    losses: list[float] = []
    for each in loader:
        if "pipeline_size" in options:
            loss = forward_backward(model, each)
        else:
            loss = model(**each).loss
            fabric.backward(loss)
        losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        called = model(**batch)
        texts = model.generate(batch["input_ids"][:2], max_new_tokens=3, do_sample=False)
    losses.append(called.loss.item())
    weights = full_state_dict(model)
    part = full_state_dict(net.base_model)
    assert part.keys() == {name.partition(".")[2] for name in weights if name.startswith(net.base_model_prefix)}
    if "pipeline_size" in options:
        with pytest.raises(ValueError, match="save_pretrained would write the part of the weights that this rank has"):
            net.save_pretrained("never")
        for incomplete in (model, net.base_model):
            with pytest.raises(ValueError, match=r"state_dict would lack .* call lightning_muon\.full_state_dict"):
                incomplete.state_dict()
    result = {name: value.detach().clone() for name, value in weights.items()}, losses, called.logits, texts
    fabric.strategy.teardown()
    return result


@pytest.mark.parametrize("options", [{}, {"sharding": "none", "pipeline_schedule": "zb_v"}])
def test_a_loop_trains_as_one_process(gloo: ProcessPool, options: dict[str, Any]) -> None:
    expected, losses, logits, texts = gloo.run(_train, "llama", world_size=1)[0]
    results = gloo.run(_train, "llama", pipeline_size=2, world_size=2, **options)
    assert [bool(weights) for weights, *_ in results] == [True, False]
    assert results[0][0].keys() == expected.keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=5e-6)
    for _, own, called, generated in results:
        torch.testing.assert_close(called, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(generated, texts)
        assert own[-1] == pytest.approx(losses[-1], rel=1e-5)
    means = torch.tensor([own for _, own, *_ in results]).mean(0)
    assert means.tolist() == pytest.approx(losses, rel=1e-5)
