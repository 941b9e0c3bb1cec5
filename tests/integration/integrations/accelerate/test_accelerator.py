"""Programs of Accelerate, with our Accelerator or one that becomes ours, give the weights of one process."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_muon.accelerate
from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, adamw, network, reference
from tests.integration.training import EXACT, Block, max_difference
from tests.support.accelerate_cpu import ddp_on_cpu, fresh_accelerate, fsdp2_on_cpu
from tests.support.processes import ProcessPool

# Sums over ranks have another order than those of one process.
_TOLERANCE = 1e-6


def _scheduled() -> dict[str, Tensor]:
    """A scheduler of what ``prepare`` has returned."""
    with accelerator_on_cpu() as accelerator:
        module: Any = network()
        model, optimizer = accelerator.prepare(module, adamw(module))
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
        run_steps(accelerator, model, optimizer, scheduler=scheduler)
        return accelerator.get_state_dict(model)


def test_a_scheduler_may_be_made_after_prepare(gloo: ProcessPool) -> None:
    # Accelerate steps a scheduler once for each process.
    expected = reference(rate=lambda step: 1.0 / (1 + 2 * step))
    assert max_difference(gloo.run(_scheduled, world_size=2)[0], expected) <= _TOLERANCE


def _loader() -> tuple[list[int], list[int], dict[str, Tensor]]:
    """An evaluation with a prepared loader, whose last batch is short, and a training after it."""
    with accelerator_on_cpu(accumulate=1) as accelerator:
        model: Any = network()
        if dist.get_rank() == 1:  # As fsdp_cpu_ram_efficient_loading leaves what is in no file.
            model.to("meta")
        tokens = torch.arange(7 * 6).view(7, 6) % 23
        loader = DataLoader(TensorDataset(tokens), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
        model.eval()
        with torch.no_grad():
            rows = [accelerator.gather_for_metrics(model(batch)[:, 0, 0]) for (batch,) in loader]
            seen = [accelerator.gather_for_metrics(batch[:, 0]) for (batch,) in loader]
        model.train()
        run_steps(accelerator, model, optimizer, steps=range(2))
        unwrapped = accelerator.unwrap_model(model)
        assert unwrapped is model
        return torch.cat(seen).tolist(), [len(row) for row in rows], accelerator.get_state_dict(model)


def test_an_evaluation_sees_each_row_once_and_changes_nothing(gloo: ProcessPool) -> None:
    seen, lengths, state = gloo.run(_loader, world_size=2)[0]
    assert sorted(seen) == sorted((torch.arange(7) * 6 % 23).tolist())
    assert lengths == [4, 3]
    assert max_difference(state, reference(steps=2, accumulate=1)) <= _TOLERANCE


def _wrong(what: str) -> None:
    options = {"wrap_policy": [["Block"], ["Linear"]][dist.get_rank()]} if what == "ranks" else {}
    with fsdp2_on_cpu():
        accelerator = lightning_muon.accelerate.Accelerator(options=options)
        model: Any = network()
        optimizer = adamw(model)
        if what == "meta":
            model.head.to("meta")
        if what == "clip":
            accelerator.clip_grad_norm_(accelerator.prepare(model).parameters(), 1.0)
        model, _ = accelerator.prepare(model, optimizer)
        if what == "again":
            accelerator.prepare(network())
        if what == "norm":
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
        if what == "tokens":
            accelerator.report_tokens(3)


@pytest.mark.parametrize(
    ("what", "exception", "match"),
    [
        ("ranks", RuntimeError, "the options of lightning_muon differs between ranks"),
        ("meta", ValueError, r"(head|table).weight .* is on the meta device on rank 0, too"),
        ("again", ValueError, "1 models after another one"),
        ("norm", ValueError, "only the 2-norm"),
        ("clip", RuntimeError, "a module that no optimizer was set up for"),
        ("tokens", RuntimeError, "loss_scaling='tokens'"),
    ],
)
def test_what_cannot_work_is_an_error_on_all_ranks(
    gloo: ProcessPool, what: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_wrong, what, exception=exception, match=match, world_size=2)


class _Own(Accelerator):
    """Of a program that has its own."""

    num_backward = 0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.num_backward += 1
        super().backward(loss, **kwargs)


def _converted(*, own: bool) -> dict[str, Tensor]:
    with ddp_on_cpu() if own else fsdp2_on_cpu(replicate_size=2, shard_size=2):
        accelerator = (_Own if own else Accelerator)(gradient_accumulation_steps=2)
        model: Any = network()
        scheduler: Any
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        # Another function on each rank: ranks compare its name.
        options = {"optimizer": EXACT, "wrap_policy": lambda _, module: isinstance(module, Block)}
        prepared = lightning_muon.accelerate.prepare(accelerator, model, scheduler, optimizer, options=options)
        model, scheduler, optimizer = prepared
        assert isinstance(accelerator, lightning_muon.accelerate.Accelerator)
        run_steps(accelerator, model, optimizer, clip=lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
        if own:
            assert isinstance(accelerator, _Own) and accelerator.num_backward == 8
        result = accelerator.get_state_dict(model)
        accelerator.free_memory()
        return result


@pytest.mark.parametrize("own", [False, True])
def test_an_accelerator_of_the_program_trains_the_same(gloo: ProcessPool, own: bool) -> None:
    found = gloo.run(_converted, own=own, world_size=4)[0]
    assert max_difference(found, reference(max_norm=0.1)) <= 1e-6


def _too_late(what: str) -> None:
    with ddp_on_cpu():
        model: Any = network()
        ours = what == "ours"
        accelerator = lightning_muon.accelerate.Accelerator() if ours else Accelerator()
        if what == "prepared":
            accelerator.prepare(model)
        options = {"timeout": timedelta(seconds=60)} if what == "timeout" else {}
        lightning_muon.accelerate.prepare(accelerator, model, adamw(model), options=options)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("ours", "the Accelerator has its own already"),
        ("prepared", "has prepared a model already"),
        ("timeout", "come too late"),
    ],
)
def test_what_comes_too_late_is_an_error(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_too_late, what, match=match, world_size=2)


def _kinds(**options: Any) -> list[str]:
    """What became of two optimizers; and what of the model is divided."""
    with accelerator_on_cpu(**options) as accelerator:
        model: Any = network()
        model.head.weight.data = model.head.weight.data.bfloat16()
        named = dict(model.named_parameters())
        given = [
            torch.optim.AdamW([named[name] for name in MATRICES], **HYPER),
            torch.optim.SGD([value for name, value in named.items() if name not in MATRICES], lr=0.1),
        ]
        sgd, model, adamw = accelerator.prepare(given[1], model, given[0])
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return [type(adamw.optimizer).__name__, type(sgd.optimizer).__name__]


def test_each_optimizer_is_adopted_or_kept(gloo: ProcessPool) -> None:
    found = gloo.run(_kinds, mixed_precision="bf16", world_size=2)
    assert found == [["ParallelMuon", "SGD"]] * 2
    found = gloo.run(_kinds, mixed_precision="bf16", optimizer="keep", world_size=2)
    assert found == [["AdamW", "SGD"]] * 2


def _alone() -> dict[str, Tensor]:
    """A program that nobody has launched."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    with fresh_accelerate({"ACCELERATE_TORCH_DEVICE": "cpu"}):
        accelerator = lightning_muon.accelerate.Accelerator(gradient_accumulation_steps=2, options={"optimizer": EXACT})
        model: Any = network()
        model, optimizer = accelerator.prepare(model, adamw(model))
        assert isinstance(optimizer.optimizer, ParallelMuon)
        assert tuple(accelerator.device_mesh.shape) == (1, 1)
        run_steps(accelerator, model, optimizer)
        result = accelerator.get_state_dict(model)
        accelerator.free_memory()
        return result


def test_one_process_needs_no_launcher(gloo: ProcessPool) -> None:
    assert max_difference(gloo.run(_alone, world_size=1)[0], reference()) <= 1e-6


def _mesh(**options: Any) -> tuple[int, ...]:
    with accelerator_on_cpu(variables={"LOCAL_WORLD_SIZE": "2"}, **options) as accelerator:
        model: Any = network()
        accelerator.prepare(model, adamw(model))
        return tuple(accelerator.device_mesh.shape)


def test_replicas_are_nodes_unless_the_user_says_otherwise(gloo: ProcessPool) -> None:
    assert gloo.run(_mesh, world_size=4) == [(2, 2)] * 4
    assert gloo.run(_mesh, shard_size=4, world_size=4) == [(1, 4)] * 4
