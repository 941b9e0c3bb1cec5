"""States that are saved and loaded: the same training goes on, also on other ranks."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps, training_on_cpu
from tests.integration.integrations.fabric.loop import adamw, network
from tests.integration.training import full_weights, max_difference
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool
from tests.support.tensors import whole as gathered


def _save_twice(directory: str, *, whole: bool) -> None:
    with training_on_cpu(async_save=True, save_distributed_checkpoint=not whole) as (accelerator, *_):
        first, second = (Path(directory, number, "optimizer.bin" if whole else "optimizer_0") for number in "12")
        accelerator.save_state(f"{directory}/1")
        accelerator.save_state(f"{directory}/2")
        assert first.exists(), "the second save waits for the first"
        accelerator.end_training()
        assert second.exists(), "the end of training waits"
        accelerator.save_state(f"{directory}/1")


@pytest.mark.parametrize("whole", [False, True])
def test_an_asynchronous_save_takes_no_place_of_another(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    match = r"has pytorch_model_fsdp(_0|\.bin), optimizer(_0|\.bin) already"
    options: dict[str, Any] = {"exception": FileExistsError, "world_size": 2}
    gloo.expect_error_on_all_ranks(_save_twice, str(tmp_path), whole=whole, match=match, **options)


class _FailsOnOneRank:
    """What a program registers."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        _fail_on_one_rank()


def _fail_on_one_rank(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise KeyError("own mistake")


def _fails(directory: str, what: str) -> None:
    with training_on_cpu(is_fsdp=False, sharding="ddp") as (accelerator, _, _):
        if what == "save hook":
            accelerator.register_save_state_pre_hook(_fail_on_one_rank)
        if what == "custom":
            accelerator.register_for_checkpointing(_FailsOnOneRank())
        if what not in ("missing", "empty"):
            accelerator.save_state(directory)
        accelerator.load_state(f"{directory}/missing" if what == "missing" else directory)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("missing", "there is no directory"),
        ("empty", "has none of"),
        ("custom", "own mistake"),
        ("save hook", "own mistake"),
    ],
)
def test_all_ranks_fail_together(gloo: ProcessPool, tmp_path: Path, what: str, match: str) -> None:
    with pytest.raises(Exception, match=match) as failed:
        gloo.run(_fails, str(tmp_path), what, world_size=2)
    assert len(failed.value.failures) == 2


def _train_or_load(
    kind: str, directory: str, variables: dict[str, str], *, saves: bool
) -> tuple[dict[str, Tensor], Any]:
    """Weights, and one first moment, or momentum; ``"own"`` is ParallelMuon in an Accelerator that knows none."""
    with ExitStack() as stack:
        if kind in ("stock", "own"):
            stack.enter_context(fsdp2_on_cpu(**variables))
            accelerator: Any = Accelerator(gradient_accumulation_steps=2)
        else:
            choice = {"optimizer": "keep"} if kind == "kept" else {}
            accelerator = stack.enter_context(accelerator_on_cpu(variables=variables, **choice))
        model: Any = network(tied=True)
        model, optimizer = accelerator.prepare(model, ParallelMuon(model) if kind == "own" else adamw(model))
        if saves:
            run_steps(accelerator, model, optimizer, steps=range(1))
            accelerator.save_state(directory)
        else:
            accelerator.load_state(directory)
        model = accelerator.unwrap_model(model)
        assert optimizer.state.keys() == set(model.parameters()), "none of the parameters before they were sharded"
        state = optimizer.state[model.blocks[0].up.weight]
        return full_weights(model), gathered(state.get("exp_avg", state.get("momentum_buffer")))


@pytest.mark.parametrize("variables", [{}, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}])
@pytest.mark.parametrize(
    ("writer", "reader"), [("kept", "stock"), ("stock", "kept"), ("stock", "muon"), ("own", "own")]
)
def test_accelerate_and_we_read_what_the_other_wrote(
    gloo: ProcessPool, tmp_path: Path, writer: str, reader: str, variables: dict[str, str]
) -> None:
    written = gloo.run(_train_or_load, writer, str(tmp_path), variables, saves=True, world_size=2)[0]
    read = gloo.run(_train_or_load, reader, str(tmp_path), variables, saves=False, world_size=2)[0]
    assert max_difference(written[0], network(tied=True).state_dict()) > 1e-3
    assert max_difference(read[0], written[0]) == 0.0
    assert torch.equal(read[1], written[1])
