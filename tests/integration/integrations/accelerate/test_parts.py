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
        run_steps(accelerator, model, optimizer, steps=range(1))
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


def _saved_badly(directory: str) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Weights and one tensor of the optimizer's state when saved, and when loaded after a save that failed."""
    with accelerator_on_cpu() as accelerator:
        model: Any = network()
        model, optimizer = accelerator.prepare(model, adamw(model))
        run_steps(accelerator, model, optimizer, steps=range(1))
        accelerator.save_state(directory)
        seen = [_now(accelerator, model, optimizer)]
        run_steps(accelerator, model, optimizer, steps=range(1, 2))
        optimizer.param_groups[0]["hook"] = lambda: None  # Nothing that is saved; the weights are written before it.
        with pytest.raises(Exception, match="Unexpected value type"):
            accelerator.save_state(directory)
        seen.append(_now(accelerator, model, optimizer))
        del optimizer.param_groups[0]["hook"]
        accelerator.load_state(directory)
        seen.append(_now(accelerator, model, optimizer))
        return [weights for weights, _ in seen], [state for _, state in seen]


def _now(accelerator: Any, model: Any, optimizer: Any) -> tuple[dict[str, Tensor], Tensor]:
    state = optimizer.state[model.blocks[0].up.weight]["momentum_buffer"].full_tensor()
    return accelerator.get_state_dict(model), state.clone()


def test_a_save_that_fails_leaves_all_that_was_there(gloo: ProcessPool, tmp_path: Path) -> None:
    weights, states = gloo.run(_saved_badly, str(tmp_path), world_size=2)[0]
    assert max_difference(weights[1], weights[0]) > 1e-3 and not torch.equal(states[1], states[0])
    assert max_difference(weights[2], weights[0]) == 0.0 and torch.equal(states[2], states[0])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def _saved_twice(directory: str) -> None:
    for variables in ({}, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}):
        _ours(directory, variables, saves=True)


def test_the_other_format_goes_when_this_one_is_written(gloo: ProcessPool, tmp_path: Path) -> None:
    gloo.run(_saved_twice, str(tmp_path), world_size=2)
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("random_states")}
    assert names == {"pytorch_model_fsdp.bin", "optimizer.bin"}
