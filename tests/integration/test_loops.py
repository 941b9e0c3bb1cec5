"""Loops of Fabric and Accelerate that are written otherwise than their pages show, with several models, or by rank."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_muon.accelerate
from lightning_muon import ParallelMuon
from tests.integration.integrations.accelerate.loop import accelerator_on_cpu, run_steps
from tests.integration.integrations.fabric import loop
from tests.integration.integrations.fabric.loop import adamw, network
from tests.integration.training import EXACT, Network, loss_of, max_difference
from tests.reference.muon_and_adamw import muon_and_adamw
from tests.support.accelerate_cpu import fresh_accelerate
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import run_program

Weights = dict[str, Tensor]
# Sums over ranks have another order than those of one process.
_TOLERANCE = 1e-6


def _closure() -> Weights:
    """With a forward pass between backward and step, such as one that logs a loss: it leaves no old weights."""
    fabric, model, optimizer = loop.set_up()
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loop.backward(fabric, model, step)
            assert model(loop.micro_batch(step, 0)[0]).isfinite().all()
            return loss

        assert optimizer.step(closure).isfinite()
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


_NUM_KEPT = (2, 5)  # Targets of a row in each micro-batch; the mean over passes is not that over tokens.


class _Recomputing(Network):
    """Checkpointing stops in the last block, whose output the loss does not use, before a backward pass enters it."""

    def __init__(self, how: dict[str, bool]) -> None:
        torch.manual_seed(0)
        super().__init__(num_blocks=3)
        self.how = how

    def _two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[1](x), self.blocks[2](x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for part in (self.blocks[0], self._two):
            x = checkpoint(part, x, **self.how) if self.how else part(x)
        return self.head(x[0])


def _recompute(sharding: str) -> list[dict[str, Tensor]]:
    """Weights without checkpointing and with each kind of it."""
    found = []
    for how in ({}, {"use_reentrant": False}, {"use_reentrant": False, "early_stop": False}, {"use_reentrant": True}):
        fabric, module = loop.launch(sharding=sharding), _Recomputing(how)
        model, optimizer = fabric.setup(module, loop.adamw(module))
        loop.run_steps(fabric, model, optimizer)
        found.append({name: value for name, value in loop.end(fabric, model).items() if "blocks.2" not in name})
    return found


@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "ddp"])
def test_activation_checkpointing_changes_nothing(gloo: ProcessPool, sharding: str) -> None:
    plain, *others = gloo.run(_recompute, sharding, world_size=2)[0]
    assert plain and all(torch.equal(weights[name], plain[name]) for weights in others for name in plain)


# Kind -> groups of passes of each step, a pass by its micro-batch and the models whose loss it is. All forward passes
# of a group come before its backward passes; then its models step, or of "thrown away" only those of the last group.
_PASSES: dict[str, list[list[tuple[int, list[int]]]]] = {
    "shared loss": [[(0, [0, 1])], [(1, [0])]],
    "own losses": [[(0, [0]), (1, [1])]],
    "thrown away": [[(0, [0])], [(1, [0])]],
}


def _train(
    kind: str,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], None],
    own_rows: Callable[[Any], Any],
) -> None:
    for step in range(3):
        for number, group in enumerate(_PASSES[kind]):
            passes = list[tuple[Tensor, Tensor]]()
            for index, used in group:
                tokens, targets = loop.micro_batch(step, index)
                targets[:, _NUM_KEPT[index] :] = -100
                tokens, targets = own_rows((tokens, targets))
                logits: Any = sum(models[each](tokens) for each in used)
                passes.append((loss(logits, targets), targets))
            for each in passes:
                backward(*each)
            for each in {each for _, used in group for each in used}:
                if kind != "thrown away" or number == 1:
                    optimizers[each].step()
                optimizers[each].zero_grad()


def _with_fabric(kind: str, sharding: str) -> list[dict[str, Tensor]]:
    """Two models that share a loss, or have one each with its own tokens; or one whose first pass is thrown away."""
    has_tokens = kind != "shared loss"
    fabric = loop.launch(sharding=sharding, **({"loss_scaling": "tokens"} if has_tokens else {}))
    pairs: list[Any] = [fabric.setup(module, adamw(module)) for module in map(loop.network, range(2))]

    def backward(loss: Tensor, targets: Tensor) -> None:
        if has_tokens:
            fabric.strategy.report_tokens((targets != -100).sum())
        fabric.backward(loss)

    loss = loop.summed_loss if has_tokens else loss_of
    _train(kind, *zip(*pairs, strict=True), loss, backward, loop.own_rows)
    result = [loop.weights(model) for model, _ in pairs]
    fabric.strategy.teardown()
    return result


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
@pytest.mark.parametrize("kind", _PASSES)
def test_models_train_as_one_process_does(gloo: ProcessPool, kind: str, sharding: str) -> None:
    found = gloo.run(_with_fabric, kind, sharding, world_size=2)[0]
    modules = [loop.network(0), loop.network(1)]
    optimizers = [muon_and_adamw(each, loop.MATRICES, **loop.HYPER) for each in modules]
    _train(kind, modules, optimizers, loss_of, lambda loss, _: loss.backward(), lambda batch: batch)
    for ours, module in zip(found, modules, strict=True):
        assert max_difference(ours, dict(module.state_dict())) <= _TOLERANCE


def _clip_on_one_rank(how: dict[str, float]) -> None:
    """From the third step on rank 1 alone clips."""
    fabric, model, optimizer = loop.set_up()
    clip = partial(fabric.clip_gradients, model, optimizer, **how)
    loop.run_steps(fabric, model, optimizer, steps=range(2), clip=clip)
    loop.run_steps(fabric, model, optimizer, steps=range(2, 4), clip=clip if dist.get_rank() == 1 else None)


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_ranks_that_clip_alone_are_named_within_seconds(gloo: ProcessPool, how: dict[str, float]) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        gloo.run_fresh(_clip_on_one_rank, how, world_size=2, grace=15.0)
    assert time.monotonic() - began < 20
    if "clip_val" in how:  # Nobody waits there for other ranks; the message of the next step has it.
        match = "clipped on some ranks only: rank 0 steps the optimizer; rank 1 clips gradients"
        assert all(match in failure.message for failure in raised.value.failures.values())
        assert len(raised.value.failures) == 2
    else:
        assert "rank 0 steps the optimizer where it clips gradients in earlier steps" in str(raised.value)
        assert set(raised.value.exit_codes) == {0, 1}


_FAILS = """
import torch.distributed as dist
from tests.integration.integrations.fabric import loop
dist.init_process_group("gloo")
fabric, model, optimizer = loop.set_up(sharding="zero2")
loop.run_steps(fabric, model, optimizer, steps=range(2))
if fabric.global_rank == 0:
    raise OSError("file 4")
loop.run_steps(fabric, model, optimizer, steps=range(2, 4))
"""


def test_an_exception_of_a_rank_is_the_last_error_of_all(tmp_path: Path) -> None:
    """It is rank 0, whose process serves the store; nothing but the end of the program knows of the exception."""
    (tmp_path / "fails.py").write_text(_FAILS)
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\]") as raised:
        run_program(tmp_path / "fails.py", directory=tmp_path, num_ranks=2)
    *_, last = str(raised.value).strip().splitlines()
    assert last == "lightning_muon: rank 1 ends: rank 0 has failed: OSError: file 4"
