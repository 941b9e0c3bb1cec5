"""Loops of Fabric and Accelerate that are written otherwise than their pages show: the weights of one process."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_muon.accelerate
from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps
from tests.integration.integrations.fabric import loop
from tests.integration.integrations.fabric.loop import adamw, network
from tests.integration.training import EXACT, Network, loss_of, max_difference
from tests.support.accelerate_cpu import fresh_accelerate
from tests.support.processes import ProcessPool

Weights = dict[str, Tensor]
# Sums over ranks have another order than those of one process.
_TOLERANCE = 1e-6


def _closure() -> Weights:
    fabric, model, optimizer = loop.set_up()
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            return loop.backward(fabric, model, step)

        assert optimizer.step(closure).isfinite()
    return loop.end(fabric, model)


def _forward_before_step() -> Weights:
    """A forward pass between backward and step, such as one that logs a loss, leaves no old weights."""
    fabric, model, optimizer = loop.set_up()
    for step in range(4):
        optimizer.zero_grad()
        loop.backward(fabric, model, step)
        assert model(loop.micro_batch(step, 0)[0]).isfinite().all()
        optimizer.step()
    return loop.end(fabric, model)


def _thrown_away(**options: Any) -> Weights:
    """A micro-batch without reduction that ``zero_grad`` throws away, before each step."""
    fabric, model, optimizer = loop.set_up(**options)
    for step in range(4):
        for index in range(2):
            tokens, targets = loop.own_rows(loop.micro_batch(step, 1 - index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(loss_of(model(tokens), targets) * (1.0 if index else 1000.0))
            if index == 0:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return loop.end(fabric, model)


def _two_optimizers(*, apart: bool) -> Weights:
    """Matrices and the rest have optimizers of their own, and a kept one works beside ours."""
    fabric = loop.launch()
    model: Any = network()
    named = dict(model.named_parameters())
    muon = torch.optim.AdamW([named[name] for name in loop.MATRICES], **loop.HYPER)
    rest = torch.optim.AdamW([value for name, value in named.items() if name not in loop.MATRICES], **loop.HYPER)
    if apart:
        model = fabric.setup_module(model)
        muon, rest = fabric.setup_optimizers(muon, rest)
    else:
        model, muon, rest = fabric.setup(model, muon, rest)
    assert isinstance(muon, ParallelMuon) and isinstance(rest, torch.optim.AdamW)
    for step in range(4):
        for optimizer in (muon, rest):
            optimizer.zero_grad()
        loop.backward(fabric, model, step)
        muon.step()
        rest.step()
    return loop.end(fabric, model)


def _set_up_twice(*, calls_first: bool, **options: Any) -> Weights:
    fabric = loop.launch(**options)
    module: Any = network()
    first, _ = fabric.setup(module, adamw(module))
    model, optimizer = fabric.setup(module, adamw(module))
    model = first if calls_first else model
    loop.run_steps(fabric, model, optimizer, clip=lambda: fabric.clip_gradients(model, optimizer, max_norm=0.1))
    return loop.end(fabric, model)


def _from_meta(sharding: str) -> Weights:
    """Empty modules are initialized, and then load weights from a file."""
    fabric, plain = loop.launch(sharding=sharding), network().state_dict()
    with fabric.init_module(empty_init=True):
        model: Any = network(seed=dist.get_rank())
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = fabric.setup(model, adamw(model))
    for name, weight in loop.weights(model).items():  # Of the size that reset_parameters gives them.
        assert 0.5 < (weight.norm() + 0.1) / (plain[name].norm() + 0.1) < 2.0, name
    with tempfile.NamedTemporaryFile() as file:
        torch.save(plain, file.name)
        fabric.load_raw(file.name, model)
    loop.run_steps(fabric, model, optimizer)
    return loop.end(fabric, model)


class _Model(Network):
    """With methods that use the root's own weights."""

    def predict(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)

    def loss(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        return loss_of(self.head(self.blocks[1](self.blocks[0](self.embedding(tokens)))), targets)


def _marked_methods() -> Weights:
    """Train through a marked method, with evaluations in between."""
    fabric = loop.launch(reshard_after_forward=False)  # Weights stay whole for a backward pass that may come.
    torch.manual_seed(0)
    model: Any = _Model()
    model, optimizer = fabric.setup(model, adamw(model))
    model.mark_forward_method("loss")
    model.mark_forward_method("predict")
    tokens, _ = loop.micro_batch(3, 0)
    for step in range(4):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            found = model.predict(tokens)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer.zero_grad()
        loop.backward(fabric, model, step, lambda tokens, targets: model.loss(tokens, targets=targets))
        optimizer.step()
    alone = _Model()
    alone.load_state_dict(loop.reference(steps=3))
    assert torch.equal(found, alone.predict(tokens))
    return loop.end(fabric, model)


def _evaluation() -> Weights:
    """A prepared loader whose last batch is short: each row is seen once, and the training goes on as without it."""
    with accelerator_on_cpu(micro_batches=1) as accelerator:
        model: Any = network()
        if dist.get_rank() == 1:  # As fsdp_cpu_ram_efficient_loading leaves what is in no file.
            model.to("meta")
        tokens = torch.arange(7 * 6).view(7, 6) % 23
        model, optimizer, loader = accelerator.prepare(
            model, adamw(model), DataLoader(TensorDataset(tokens), batch_size=2)
        )
        with torch.no_grad():
            assert [len(accelerator.gather_for_metrics(model(batch))) for (batch,) in loader] == [4, 3]
        run_steps(accelerator, model, optimizer, steps=range(2))
        assert accelerator.unwrap_model(model) is model
        return accelerator.get_state_dict(model)


def _without_launcher() -> Weights:
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    with fresh_accelerate({"ACCELERATE_TORCH_DEVICE": "cpu"}):
        accelerator = lightning_muon.accelerate.Accelerator(gradient_accumulation_steps=2, options={"optimizer": EXACT})
        model: Any = network()
        model, optimizer = accelerator.prepare(model, adamw(model))
        assert isinstance(optimizer.optimizer, ParallelMuon) and tuple(accelerator.device_mesh.shape) == (1, 1)
        run_steps(accelerator, model, optimizer)
        result = accelerator.get_state_dict(model)
        accelerator.free_memory()
        return result


# Name -> the loop, how the training in one process differs from that of loop.reference(), and the number of ranks.
_LOOPS: dict[str, tuple[Callable[[], Weights], dict[str, Any], int]] = {
    "a closure": (_closure, {}, 2),
    "a forward pass before a step": (_forward_before_step, {}, 2),
    "thrown away": (_thrown_away, {"accumulate": 1}, 2),
    "thrown away, whole": (
        partial(_thrown_away, reshard_after_backward=False, accumulate="whole"), {"accumulate": 1}, 2,
    ),
    "thrown away, replicas": (partial(_thrown_away, replicate_size=2), {"accumulate": 1}, 2),
    "thrown away, zero2": (partial(_thrown_away, sharding="zero2"), {"accumulate": 1}, 2),
    "two optimizers": (partial(_two_optimizers, apart=False), {}, 2),
    "two optimizers, apart": (partial(_two_optimizers, apart=True), {}, 2),
    "set up twice, fsdp": (partial(_set_up_twice, calls_first=True), {"max_norm": 0.1}, 2),
    "set up twice, zero2": (partial(_set_up_twice, calls_first=False, sharding="zero2"), {"max_norm": 0.1}, 2),
    "from meta, fsdp": (partial(_from_meta, "fsdp"), {}, 2),
    "from meta, ddp": (partial(_from_meta, "ddp"), {}, 2),
    "marked methods": (_marked_methods, {}, 2),
    "an evaluation": (_evaluation, {"steps": 2, "accumulate": 1}, 2),
    "without a launcher": (_without_launcher, {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", _LOOPS)
def test_it_trains_as_one_process(gloo: ProcessPool, name: str) -> None:
    program, differs, num_ranks = _LOOPS[name]
    assert max_difference(gloo.run(program, world_size=num_ranks)[0], loop.reference(**differs)) <= _TOLERANCE
