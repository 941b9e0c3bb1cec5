"""What becomes of the optimizers that ``prepare`` is given, and of states that are saved and loaded."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps, training_on_cpu
from tests.integration.integrations.fabric.loop import MATRICES, adamw, micro_batch, network, own_rows
from tests.integration.training import EXACT, HYPER, full_weights, loss_of, max_difference
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


def _saved_or_loaded(directory: str, *, saves: bool) -> tuple[int, bool]:
    """The micro-batches so far, and whether the next one syncs, where a state is saved behind one of two."""
    with training_on_cpu() as (accelerator, model, _):
        if saves:
            with accelerator.accumulate(model):
                accelerator.save_state(directory)
        else:
            accelerator.load_state(directory)
        found = accelerator.step
        with accelerator.accumulate(model):
            return found, accelerator.sync_gradients


def test_further_ranks_go_on_at_the_same_micro_batch(gloo: ProcessPool, tmp_path: Path) -> None:
    for saves, ranks in ((True, 2), (False, 3)):
        found = gloo.run(_saved_or_loaded, str(tmp_path), saves=saves, world_size=ranks)
        assert found == [(1, True)] * ranks


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


def _kinds(choice: str) -> list[str]:
    """What becomes of two optimizers, given in any order, of a model with a weight in 16 bits."""
    with accelerator_on_cpu(mixed_precision="bf16", optimizer=EXACT if choice == "auto" else choice) as accelerator:
        model: Any = network()
        model.head.weight.data = model.head.weight.data.bfloat16()
        parts = [[p for name, p in model.named_parameters() if (name in MATRICES) == is_muon] for is_muon in (1, 0)]
        other, model, muon = accelerator.prepare(torch.optim.SGD(parts[1], lr=0.1), model, torch.optim.AdamW(parts[0]))
        assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in model.parameters())
        return [type(muon.optimizer).__name__, type(other.optimizer).__name__]


@pytest.mark.parametrize(("choice", "kind"), [("auto", "ParallelMuon"), ("keep", "AdamW")])
def test_each_optimizer_is_adopted_or_kept(gloo: ProcessPool, choice: str, kind: str) -> None:
    assert gloo.run(_kinds, choice, world_size=2) == [[kind, "SGD"]] * 2


def _skipped(choice: str, *, sharding: str) -> tuple[list[bool], list[float]]:
    """Whether each step was skipped, and the rate after each."""
    options = {} if choice == "auto" else {"optimizer": choice}
    with accelerator_on_cpu(micro_batches=1, is_fsdp=sharding == "fsdp", sharding=sharding, **options) as accelerator:
        model: Any = network()
        optimizer: Any = adamw(model)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        told: list[bool] = []
        rates: list[float] = []
        for step in range(3):
            tokens, targets = own_rows(micro_batch(step, 0))
            is_bad = step == 1 and accelerator.process_index == 1
            accelerator.backward(loss_of(model(tokens), targets) * (float("nan") if is_bad else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            told += [accelerator.optimizer_step_was_skipped]
            rates += [optimizer.param_groups[0]["lr"] / HYPER["lr"]]
        return told, rates


@pytest.mark.parametrize(("choice", "sharding"), [("keep", "fsdp"), ("auto", "ddp")])
def test_a_skipped_step_is_told_and_schedulers_wait(gloo: ProcessPool, choice: str, sharding: str) -> None:
    # Accelerate steps a scheduler once for each process.
    expected = ([False, True, False], [1 / 4, 1 / 4, 1 / 16])
    assert gloo.run(_skipped, choice, sharding=sharding, world_size=2) == [expected] * 2
