"""Losses that are sums over tokens, in a loop of Accelerate."""

from torch import Tensor

from tests.integration.integrations.accelerate.loop import own_rows, training_on_cpu
from tests.integration.integrations.fabric.loop import micro_batch, reference
from tests.integration.training import loss_of, max_difference
from tests.support.processes import ProcessPool


def _train() -> dict[str, Tensor]:
    with training_on_cpu(loss_scaling="tokens") as (accelerator, model, optimizer):
        for step in range(4):
            for index in range(accelerator.gradient_accumulation_steps):
                tokens, targets = own_rows(accelerator, micro_batch(step, index))
                with accelerator.accumulate(model):
                    accelerator.report_tokens(targets.numel())
                    accelerator.backward(loss_of(model(tokens), targets) * targets.numel())
                    optimizer.step()
                    optimizer.zero_grad()
        return accelerator.get_state_dict(model)


def test_sums_that_are_accumulated_are_divided_by_all_tokens(gloo: ProcessPool) -> None:
    """As the mean, where each micro-batch has as many."""
    assert max_difference(gloo.run(_train, world_size=2)[0], reference()) <= 1e-6  # Sums in another order.
