"""Fabric programs give the weights of one process with whole matrices; methods other than forward, exceptions."""

import subprocess
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_muon import ParallelMuon
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration.integrations.fabric import loop
from tests.integration.training import Network, loss_of, max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import program_environment
from tests.support.warm_python import warm_python
from tests.support.worker import free_port

# Sums over ranks have another order than those of one process.
_TOLERANCE = 1e-6


def _scheduled() -> dict[str, Tensor]:
    """A scheduler of the user's optimizer, which the strategy is not told of."""
    fabric, module = loop.launch(), loop.network()
    given = loop.adamw(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 / (1 + step))
    model, optimizer = fabric.setup(module, given)
    with warnings.catch_warnings():
        # Schedulers warn if nobody steps their optimizer.
        warnings.filterwarnings("error", message=r".*`(optimizer|lr_scheduler)\.step")
        loop.run_steps(fabric, model, optimizer, scheduler=scheduler)
    assert given.param_groups is optimizer.param_groups
    with pytest.raises(RuntimeError, match="a ParallelMuon has taken its place"):
        given.step()
    return loop.end(fabric, model)


def test_a_scheduler_may_be_made_before_setup(gloo: ProcessPool) -> None:
    expected = loop.reference(rate=lambda step: 1.0 / (1 + step))
    assert max_difference(gloo.run(_scheduled, world_size=2)[0], expected) <= _TOLERANCE


def _two_optimizers(*, apart: bool) -> dict[str, Tensor]:
    """Matrices and the rest have optimizers of their own, and a kept one works beside ours."""
    fabric = loop.launch()
    model: Any = loop.network()
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
        for index in range(2):
            tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(loss_of(model(tokens), targets) / 2)
        muon.step()
        rest.step()
    return loop.end(fabric, model)


@pytest.mark.parametrize("apart", [False, True])
def test_a_module_may_have_several_optimizers(gloo: ProcessPool, apart: bool) -> None:
    assert max_difference(gloo.run(_two_optimizers, apart=apart, world_size=2)[0], loop.reference()) <= _TOLERANCE


def _two_modules(sharding: str) -> list[dict[str, Tensor]]:
    fabric = loop.launch(sharding=sharding)
    pairs: list[Any] = [fabric.setup(module, loop.adamw(module)) for module in (loop.network(0), loop.network(1))]
    (first, _), (second, _) = pairs
    for step in range(3):
        tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, 0))
        fabric.backward(loss_of(first(tokens) + second(tokens), targets))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        # Only one of them runs.
        tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, 1))
        fabric.backward(loss_of(first(tokens), targets))
        pairs[0][1].step()
        pairs[0][1].zero_grad()
    result = [loop.weights(model) for model, _ in pairs]
    fabric.strategy.teardown()
    return result


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


def _set_up_twice(*, calls_first: bool, **options: Any) -> dict[str, Tensor]:
    fabric = loop.launch(**options)
    module: Any = loop.network()
    first, _ = fabric.setup(module, loop.adamw(module))
    model, optimizer = fabric.setup(module, loop.adamw(module))
    model = first if calls_first else model
    loop.run_steps(fabric, model, optimizer, clip=lambda: fabric.clip_gradients(model, optimizer, max_norm=0.1))
    return loop.end(fabric, model)


@pytest.mark.parametrize(("sharding", "calls_first"), [("fsdp", True), ("zero2", False)])
def test_a_module_may_be_set_up_again(gloo: ProcessPool, sharding: str, calls_first: bool) -> None:
    found = gloo.run(_set_up_twice, calls_first=calls_first, sharding=sharding, world_size=2)[0]
    assert max_difference(found, loop.reference(max_norm=0.1)) <= _TOLERANCE


def _two_modules_alone() -> list[dict[str, Tensor]]:
    modules = [loop.network(0), loop.network(1)]
    optimizers = [
        MuonAndAdamW(module, loop.MATRICES, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **loop.HYPER) for module in modules
    ]
    for step in range(3):
        for index, used in ((0, 2), (1, 1)):
            for module in modules:
                module.zero_grad()
            tokens, targets = loop.micro_batch(step, index)
            logits = sum(module(tokens) for module in modules[:used])
            loss_of(logits, targets).backward()  # type: ignore[arg-type]
            for optimizer in optimizers[:used]:
                optimizer.step()
    return [dict(module.state_dict()) for module in modules]


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_modules_with_optimizers_of_their_own_share_a_loss(gloo: ProcessPool, sharding: str) -> None:
    found = gloo.run(_two_modules, sharding, world_size=2)[0]
    for ours, alone in zip(found, _two_modules_alone(), strict=True):
        assert max_difference(ours, alone) <= _TOLERANCE


def _not_set_up(what: str) -> None:
    fabric = loop.launch()
    model: Any = loop.network()
    foreign = loop.adamw(Network())
    if what == "state":
        used = loop.adamw(model)
        model(loop.micro_batch(0, 0)[0]).sum().backward()
        used.step()
        fabric.setup(model, used)
    if what == "ranks" and fabric.global_rank == 1:
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if what == "setup":
        model = fabric.setup_module(model)
        fabric.setup_optimizers(foreign)
    model, optimizer = fabric.setup(model, loop.adamw(model))
    if what == "shared":
        fabric.setup(torch.nn.Sequential(model.module), loop.adamw(model))
    if what == "first":
        fabric.setup(model.module, loop.adamw(model))
        optimizer.step()
    if what == "step":
        fabric.strategy.optimizer_step(foreign)
    if what == "norm":
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
    if what == "tokens":
        fabric.strategy.report_tokens(3)


@pytest.mark.parametrize(
    ("what", "exception", "match"),
    [
        ("state", ValueError, r"AdamW has state for \w+\.\S+, which was sharded since"),
        ("ranks", RuntimeError, "the optimizers that were set up differs between ranks"),
        ("setup", ValueError, "parameters of no module that was set up before it"),
        ("step", ValueError, "this AdamW was not set up"),
        ("shared", ValueError, r"Sequential shares parameters with \w*Network, which has been set up"),
        ("first", ValueError, "this ParallelMuon was not set up"),
        ("norm", ValueError, "norm_type=2.0"),
        ("tokens", RuntimeError, "loss_scaling='tokens'"),
    ],
)
def test_what_cannot_work_is_an_error_on_all_ranks(
    gloo: ProcessPool, what: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_not_set_up, what, exception=exception, match=match, world_size=2)


def _train_from_meta(sharding: str, file: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after ``setup``, and after a training that starts from the weights in ``file``."""
    fabric = loop.launch(sharding=sharding)
    with fabric.init_module(empty_init=True):
        model: Any = loop.network(seed=dist.get_rank())
    assert all(parameter.is_meta for parameter in model.parameters())
    model, optimizer = fabric.setup(model, loop.adamw(model))
    initial = loop.weights(model)
    fabric.load_raw(file, model)
    loop.run_steps(fabric, model, optimizer)
    result = loop.weights(model)
    fabric.strategy.teardown()
    return initial, result


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_empty_modules_are_initialized_and_load_weights(gloo: ProcessPool, sharding: str, tmp_path: Path) -> None:
    plain = loop.network().state_dict()
    torch.save(plain, tmp_path / "raw.pt")
    initial, trained = gloo.run(_train_from_meta, sharding, str(tmp_path / "raw.pt"), world_size=2)[0]
    for name, weight in plain.items():
        # Of the size that reset_parameters gives them.
        assert 0.5 < (initial[name].norm() + 0.1) / (weight.norm() + 0.1) < 2.0, name
    assert max_difference(trained, loop.reference()) <= 1e-6


class _Model(Network):
    """With methods that use the root's own weights, and an inner model that generates."""

    def predict(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)

    def loss(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        return loss_of(self.head(self.blocks[1](self.blocks[0](self.embedding(tokens)))), targets)


def _model() -> Any:
    torch.manual_seed(0)
    return _Model()


def _train_by_methods() -> tuple[dict[str, Tensor], Tensor, list[bool]]:
    """Train through a marked method, with evaluations in between."""
    fabric = loop.launch(reshard_after_forward=False)  # Weights stay whole for a backward pass that may come.
    model = _model()
    model, optimizer = fabric.setup(model, loop.adamw(model))
    model.mark_forward_method("loss")
    model.mark_forward_method("predict")
    found = torch.empty(0)
    are_shards = []
    for step in range(4):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            found = model.predict(loop.micro_batch(step, 0)[0]).clone()
        are_shards.append(all(isinstance(parameter, DTensor) for parameter in model.parameters()))
        optimizer.zero_grad()
        for index in range(2):
            tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(model.loss(tokens, targets=targets) / 2)
        optimizer.step()
    result = loop.weights(model)
    fabric.strategy.teardown()
    return result, found, are_shards


def test_marked_methods_train_and_evaluate(gloo: ProcessPool) -> None:
    found, predicted, are_shards = gloo.run(_train_by_methods, world_size=2)[0]
    assert max_difference(found, loop.reference()) <= 1e-6
    assert are_shards == [True] * 4
    alone = _model()
    alone.load_state_dict(loop.reference(steps=3))
    with torch.no_grad():
        assert torch.equal(predicted, alone.predict(loop.micro_batch(3, 0)[0]))


def _make_lightning_module() -> Any:
    """A LightningModule, whose steps Fabric knows."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = Network()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_of(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **loop.HYPER)

    return Module()


def _lightning_module() -> dict[str, Tensor]:
    fabric = loop.launch()
    module = _make_lightning_module()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for step in range(4):
        optimizer.zero_grad()
        for index in range(2):
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(model.training_step(loop.own_rows(fabric, loop.micro_batch(step, index))) / 2)
        optimizer.step()
    return loop.end(fabric, model)


def test_steps_of_a_lightning_module_work_in_fabric(gloo: ProcessPool) -> None:
    expected = {f"network.{name}": value for name, value in loop.reference().items()}
    assert max_difference(gloo.run(_lightning_module, world_size=2)[0], expected) <= 1e-6


def _clip_on_one_rank(how: dict[str, float], **options: Any) -> None:
    """From the third step on rank 1 alone clips."""
    fabric, model, optimizer = loop.set_up(**options)
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
fabric = loop.launch(sharding="zero2")
network = loop.network()
model, optimizer = fabric.setup(network, loop.adamw(network))
loop.run_steps(fabric, model, optimizer, steps=range(2))
if fabric.global_rank == 0:
    raise OSError("file 4")
loop.run_steps(fabric, model, optimizer, steps=range(2, 4))
"""


def test_an_exception_of_a_rank_is_the_last_error_of_all(tmp_path: Path) -> None:
    """It is rank 0, whose process serves the store; nothing but the end of the program knows of the exception."""
    (tmp_path / "fails.py").write_text(_FAILS)
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    common = program_environment() | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen(
            [warm_python(), str(tmp_path / "fails.py")],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [program.communicate(timeout=100)[1].strip().splitlines() for program in programs]
    assert all(program.returncode for program in programs)
    assert errors[0][-1].endswith("OSError: file 4")
    assert errors[1][-1].endswith("rank 0 has failed: OSError: file 4")
