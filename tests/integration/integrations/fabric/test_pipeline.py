"""A causal language model in the stages of a pipeline of Fabric; tests/matrix has the loops that train one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import full_state_dict
from tests.distributed.pipeline.models import batch_of, causal_lm
from tests.integration.integrations.fabric import loop
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool


def _answers(**options: Any) -> tuple[dict[str, Tensor], float, Tensor, Tensor]:
    """Whole weights, the loss and the logits of a call, and what is generated."""
    fabric = loop.launch(**options)
    net = causal_lm("llama", tied=True)
    model, _ = fabric.setup(net, loop.adamw(net))
    model.mark_forward_method("generate")
    batch = batch_of(32, 5, seed=3, is_uneven=False)
    model.eval()
    with torch.no_grad():
        called = model(**batch)
        texts = model.generate(batch["input_ids"][:2], max_new_tokens=3, do_sample=False)
    weights = full_state_dict(model)
    part = full_state_dict(net.base_model)
    assert part.keys() == {name.partition(".")[2] for name in weights if name.startswith(net.base_model_prefix)}
    if "pipeline_size" in options:
        with pytest.raises(ValueError, match="save_pretrained would write the part of the weights that this rank has"):
            net.save_pretrained("never")
        for incomplete in (model, net.base_model):
            with pytest.raises(ValueError, match=r"state_dict would lack .* call lightning_muon\.full_state_dict"):
                incomplete.state_dict()
    weights = {name: value.detach().clone() for name, value in weights.items()}
    fabric.strategy.teardown()
    return weights, called.loss.item(), called.logits, texts


@pytest.mark.parametrize("options", [{}, {"sharding": "none", "pipeline_schedule": "zb_v"}])
def test_a_pipeline_answers_as_one_process(gloo: ProcessPool, options: dict[str, Any]) -> None:
    expected, loss, logits, texts = gloo.run(_answers, world_size=1)[0]
    results = gloo.run(_answers, pipeline_size=2, world_size=2, **options)
    assert max_difference(results[0][0], expected) == 0.0 and not results[1][0]
    for _, own, called, generated in results:
        assert own == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(called, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(generated, texts)
