"""What is written is what Accelerate itself reads, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps
from tests.integration.integrations.fabric.loop import adamw, network
from tests.integration.training import full_weights, max_difference
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool


def _ours(directory: str, variables: dict[str, str], *, saves: bool) -> tuple[dict[str, Tensor], Any]:
    with accelerator_on_cpu(optimizer="keep", variables=variables) as accelerator:
        return _train_or_load(accelerator, directory, saves=saves)


def _stock(directory: str, variables: dict[str, str], *, saves: bool) -> tuple[dict[str, Tensor], Any]:
    with fsdp2_on_cpu(**variables):
        return _train_or_load(Accelerator(gradient_accumulation_steps=2), directory, saves=saves)


def _train_or_load(accelerator: Any, directory: str, *, saves: bool) -> tuple[dict[str, Tensor], Any]:
    """Weights, and one tensor of the state of the optimizer."""
    model: Any = network()
    model, optimizer = accelerator.prepare(model, adamw(model))
    if saves:
        run_steps(accelerator, model, optimizer, steps=range(2))
        accelerator.save_state(directory)
    else:
        accelerator.load_state(directory)
    state = optimizer.state[model.blocks[0].up.weight]["exp_avg"].full_tensor()
    return full_weights(model), state


@pytest.mark.parametrize("variables", [{}, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}])
@pytest.mark.parametrize(("writer", "reader"), [(_ours, _stock), (_stock, _ours)])
def test_accelerate_and_we_read_what_the_other_wrote(
    gloo: ProcessPool, tmp_path: Path, writer: Any, reader: Any, variables: dict[str, str]
) -> None:
    written = gloo.run(writer, str(tmp_path), variables, saves=True, world_size=2)[0]
    read = gloo.run(reader, str(tmp_path), variables, saves=False, world_size=2)[0]
    assert max_difference(written[0], network().state_dict()) > 1e-3
    assert max_difference(read[0], written[0]) == 0.0
    assert torch.equal(read[1], written[1])
