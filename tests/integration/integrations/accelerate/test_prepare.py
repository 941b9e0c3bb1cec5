"""An Accelerator that the program has made itself becomes one of ours."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

import lightning_muon.accelerate
from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps
from tests.integration.integrations.fabric.loop import HYPER, MATRICES, adamw, network, reference
from tests.integration.training import EXACT, Block, max_difference
from tests.support.accelerate_cpu import ddp_on_cpu, fresh_accelerate, fsdp2_on_cpu
from tests.support.processes import ProcessPool


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
def test_weights_are_those_of_one_process(gloo: ProcessPool, own: bool) -> None:
    found = gloo.run(_converted, own=own, world_size=4)[0]
    assert max_difference(found, reference(max_norm=0.1)) <= 1e-6


def _wrong(what: str) -> None:
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
    gloo.expect_error_on_all_ranks(_wrong, what, match=match, world_size=2)


_CHECKPOINTING = {
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
}


def _checkpointed() -> tuple[dict[str, Tensor], int]:
    """How often the first block has run forward, too."""
    calls = []
    with accelerator_on_cpu(variables=_CHECKPOINTING) as accelerator:
        model: Any = network()
        model.blocks[0].up.register_forward_hook(lambda *_: calls.append(None))
        model, optimizer = accelerator.prepare(model, adamw(model))
        run_steps(accelerator, model, optimizer)
        return accelerator.get_state_dict(model), len(calls)


def test_activations_may_be_dropped(gloo: ProcessPool) -> None:
    found, num_calls = gloo.run(_checkpointed, world_size=2)[0]
    assert num_calls == 2 * 8
    assert max_difference(found, reference()) <= 1e-6


def _kept() -> list[bool]:
    """Which of the whole parameters are still there."""
    with accelerator_on_cpu() as accelerator:
        model: Any = network()
        optimizer: Any = adamw(model)
        references = [weakref.ref(parameter) for parameter in model.parameters()]
        model, optimizer = accelerator.prepare(model, optimizer)
        run_steps(accelerator, model, optimizer, steps=range(1))
        gc.collect()
        return [reference() is not None for reference in references]


def test_whole_parameters_are_not_kept(gloo: ProcessPool) -> None:
    assert not any(gloo.run(_kept, world_size=2)[0])


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
