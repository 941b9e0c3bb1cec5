"""What the ranks of a pipeline must know of each other, and when they wait for each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import MuonConfig
from lightning_muon.comm.groups import axis_group
from lightning_muon.engine.conversion import convert_optimizers
from lightning_muon.optim.gradients import skipped_steps
from lightning_muon.params.layout import local_tensor
from lightning_muon.params.routing import route_module
from lightning_muon.sharding.clipping import clip_norm_
from tests.distributed.pipeline.models import (
    VOCABULARY,
    WIDTH,
    Chain,
    Layer,
    batch_of,
    causal_lm,
    chain,
    start,
    take_step,
)
from tests.distributed.sharding.test_traffic import ALL_REDUCE, MESSAGE, Wire
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, whole

_ALL_SKIP = [(1, False), (1, False)]


class _Nan(torch.autograd.Function):
    """The gradient, and nothing else, is NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * float("nan")


class _Shifted(Layer):
    """A layer with a parameter whose gradient may be NaN, while those of the layers before it are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.is_broken = nn.Parameter(torch.zeros(WIDTH)), False

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + (_Nan.apply(self.shift) if self.is_broken else self.shift)


class _Model(Chain):
    """Four such layers, and a loss that may be NaN."""

    has_nan = False

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().pipeline_loss(output, target)
        return total * (float("nan") if self.has_nan else 1.0), count


def _model(*, is_tied: bool = False) -> Any:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    if is_tied:
        head.weight = embedding.weight
    return _Model([embedding, *(_Shifted() for _ in range(4)), head])


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def _three_steps(broken: int | None, *, clips: bool, is_tied: bool, **options: Any) -> tuple[Any, list[Tensor]]:
    """Of the second step, which has a NaN in the loss or in the layer ``broken``: skipped steps, and a change."""
    net: Any = _model(is_tied=is_tied)
    is_kept = options.get("optimizer") == "keep"
    engine, optimizer = start(net, _sgd if is_kept else _adamw, **options)
    result: Any = None
    for step in range(3):
        net.has_nan = step == 1 and broken is None
        for index, part in enumerate(net.parts):
            part.is_broken = step == 1 and index == broken
        before = [local_tensor(p.detach()).clone() for p in net.parameters()]
        optimizer.zero_grad()
        engine.run_pipeline(batch_of(8, 5, seed=step))
        if clips:
            engine.clip_by_norm(list(net.parameters()), float("inf"))
        engine.step(optimizer, take_step)
        has_changed = not are_equal(before, map(local_tensor, net.parameters()))
        if step == 1:
            result = skipped_steps(optimizer), has_changed
        else:
            assert has_changed
    weights = [whole(p) for name, p in net.named_parameters() if name in ("parts.0.weight", "parts.5.weight")]
    engine.end_training()
    engine.close()
    return result, weights


CASES: dict[str, tuple[int, int | None, dict[str, Any], list[tuple[int, bool]]]] = {
    "loss": (2, None, {}, _ALL_SKIP),
    "loss, V": (2, None, {"pipeline_schedule": "zb_v"}, _ALL_SKIP),
    "last stage, clipped": (2, 4, {"clips": True}, _ALL_SKIP),
    "first stage, clipped": (2, 1, {"clips": True}, _ALL_SKIP),
    "last stage, clipped, replicated": (4, 4, {"clips": True, "replicate_size": 2}, _ALL_SKIP * 2),
    "last stage, kept": (2, 4, {"optimizer": "keep"}, _ALL_SKIP),
    "first stage, kept, sharded": (4, 1, {"optimizer": "keep", "shard_size": 2}, _ALL_SKIP * 2),
    "first stage, tied": (2, 1, {"is_tied": True}, _ALL_SKIP),
    "last stage, tied, sharded": (4, 4, {"is_tied": True, "shard_size": 2}, _ALL_SKIP * 2),
    # As docs/pipelines.md says: nothing makes the other stage wait for it.
    "last stage": (2, 4, {}, [(0, True), (1, False)]),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_skip_a_step_together(gloo: ProcessPool, name: str) -> None:
    world_size, broken, options, expected = CASES[name]
    chosen = {"clips": False, "is_tied": False} | options
    results = gloo.run(_three_steps, broken, world_size=world_size, **chosen)
    assert [found for found, _ in results] == expected
    if chosen["is_tied"]:
        (first, *others) = [weight for _, weights in results for weight in weights]
        assert len(others) == world_size - 1 and all(torch.equal(each, first) for each in others)


def _collectives(**options: Any) -> list[str]:
    """Those of a second step of training; not point-to-point messages."""
    engine, optimizer = start(_model(), _adamw, **options)
    for step in range(2):
        optimizer.zero_grad()
        with Wire() as wire:
            engine.run_pipeline(batch_of(8, 5, seed=step))
            engine.step(optimizer, take_step)
    engine.close()
    return [each.operator for each in wire.sent if not each.is_payload and each.operator not in (MESSAGE, "recv_")]


@pytest.mark.parametrize(("world_size", "options", "within_stages"), [(2, {}, 0), (4, {"shard_size": 2}, 2)])
def test_collectives_of_a_step(gloo: ProcessPool, world_size: int, options: dict[str, Any], within_stages: int) -> None:
    """The comparison of batches, and those of FSDP2 and of the optimizer within a stage."""
    expected = [ALL_REDUCE] * (1 + within_stages)
    assert gloo.run(_collectives, world_size=world_size, **options) == [expected] * world_size


def _permuted(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flip(0) for key, value in batch.items()}


def _fewer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:6] for key, value in batch.items()}


@contextmanager
def _started(net: nn.Module, make: Any = None, **options: Any) -> Generator[tuple[Any, Any]]:
    """An engine over two stages and its optimizer, which is kept if nothing else is said."""
    engine, optimizer = start(net, make or _sgd, **{"optimizer": "keep", **options})
    try:
        yield engine, optimizer
    finally:
        engine.close()


def _other_batches(change: Callable[[Any], Any], num_before: int, *, evaluates: bool = False) -> None:
    """The last rank has another batch, after ``num_before`` equal ones."""
    with _started(chain(2)) as (engine, optimizer):
        for step in range(num_before + 1):
            optimizer.zero_grad()
            batch = batch_of(8, 5, seed=step)
            if step == num_before and dist.get_rank() == dist.get_world_size() - 1:
                batch = change(batch)
            if evaluates and step == num_before:
                with torch.no_grad(), engine.around_forward():
                    engine.module(batch["input_ids"])
            else:
                engine.run_pipeline(batch)
                engine.step(optimizer, take_step)


@pytest.mark.parametrize("change", [_permuted, _fewer])
def test_other_batches_are_found_before_a_message(gloo: ProcessPool, change: Any) -> None:
    # In training and in evaluation, of the first batch and of a later one.
    for num_before, evaluates in ((0, False), (2, True), (0, True), (2, False))[: 4 if change is _fewer else 2]:
        gloo.expect_error_on_all_ranks(
            _other_batches, change, num_before, evaluates=evaluates, match="have different batches", world_size=2
        )


def _without_labels(num_before: int) -> None:
    _other_batches(lambda _: {"input_ids": torch.zeros(8, 5, dtype=torch.int64)}, num_before)


def _call_in_training(kind: str) -> None:
    with _started(net := causal_lm(kind)):
        net(**batch_of(8, 5, seed=0))


def _twice(frozen: int) -> None:
    """Only the ranks of stages that train have gradients left."""
    net = chain(2)
    for part in list(net.parts)[:frozen]:
        part.requires_grad_(False)
    with _started(net) as (engine, optimizer):
        engine.run_pipeline(batch_of(8, 5, seed=0))
        engine.run_pipeline(batch_of(8, 5, seed=1))
        engine.step(optimizer, take_step)


def _odd_batch(case: str) -> None:
    """The last rank has a batch that a pipeline does not take."""
    net: Any = causal_lm("llama") if case == "no mapping" else chain(2)
    with _started(net, pipeline_schedule="zb_v") as (engine, _):
        number = torch.tensor(1)
        odd = torch.ones(8, 5).long() if case == "no mapping" else {"input_ids": number, "labels": number}
        engine.run_pipeline(odd if dist.get_rank() == 1 else batch_of(8, 5, seed=0))


def _freeze_one_copy(_: None) -> None:
    net: Any = _model(is_tied=True)
    with _started(net, _adamw) as (engine, _):
        if dist.get_rank() == 0:
            next(net.parameters()).requires_grad_(False)
        engine.run_pipeline(batch_of(8, 5, seed=0))


def _interrupt(num_microbatches: int) -> None:
    """Rank 0 has sent an activation when it fails, as rank 1 does; then both go on with another batch."""
    with _started(chain(2), pipeline_microbatches=num_microbatches) as (engine, _):
        model: Any = engine.pipeline.stages.model
        forward, num_calls = model.run, count()

        def fail(*args: Any) -> Any:
            if next(num_calls) == 1 - dist.get_rank():
                raise MemoryError
            return forward(*args)

        model.run = fail
        with pytest.raises(MemoryError):
            engine.run_pipeline(batch_of(8, 5, seed=0))
        model.run = forward
        engine.run_pipeline(batch_of(8, 5, seed=1))


def _norms_of_one_stage() -> tuple[float, float]:
    """By our norm over the parameters of the first stage alone, which the second rank has none of; and by hand."""
    with _started(chain(2)) as (engine, _):
        engine.run_pipeline(batch_of(8, 5, seed=0))
        listed = list(engine.module.parameters()) if dist.get_rank() == 0 else []
        squares = [whole(p.grad).square().sum() for p in listed if p.grad is not None]
        return float(engine.clip_by_norm(listed, 1e-3)), float(sum(squares)) ** 0.5


def test_a_rank_without_listed_parameters_clips_too(gloo: ProcessPool) -> None:
    (norm, expected), (other, _) = gloo.run(_norms_of_one_stage, world_size=2)
    assert norm == other == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_nothing_is_on_the_device_of_the_others() -> None:
    # NCCL takes no zero from the memory of the host.
    assert clip_norm_([], 1.0, device=torch.device("meta")).device.type == "meta"


def _nothing_to_train(choice: str) -> None:
    """An optimizer that was made before the cut, of what is trained: no stage of the first rank."""
    net = chain(2)
    for part in list(net.parts)[:3]:
        part.requires_grad_(False)
    with _started(net, lambda parameters: _adamw([p for p in parameters if p.requires_grad]), optimizer=choice):
        pass


def _wrong_for_one_stage(kind: str) -> None:
    net: Any = chain(2)
    if kind == "shared":
        net.parts[2].inner.weight = net.parts[1].inner.weight
    with _started(net, _adamw, optimizer=MuonConfig(fused={"parts.3.weight": 1} if kind == "fused" else {})):
        pass


# What a rank does, and the error of all of them: of the one that does wrong, which tells the others.
_REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    (_without_labels, 0, "labels"),
    (_without_labels, 1, "labels"),
    (_call_in_training, "llama", r"^RuntimeError: .*lightning_muon.forward_backward\(model, batch\)"),
    (_twice, 3, "^RuntimeError: .*still has the gradient of an earlier batch"),
    (_odd_batch, "batch", "a batch of a pipeline needs a tensor with rows"),
    (
        *(_odd_batch, "no mapping"),
        "(?s)a batch is a Tensor, but a pipeline calls LlamaForCausalLM itself.*def pipeline_step",
    ),
    (_freeze_one_copy, None, "^RuntimeError: .*copies of one parameter.*one is frozen and another one is trained"),
    (_interrupt, 4, "^RuntimeError: .*has raised before"),
    (_wrong_for_one_stage, "fused", "not on Muon: parts.3.weight"),
    (_wrong_for_one_stage, "shared", r"parts\.1\.inner\.weight and parts\.2\.inner\.weight are one parameter"),
    (_nothing_to_train, "auto", "has no parameter of a stage of this rank; give it all parameters"),
    (_nothing_to_train, "keep", "has no parameter of a stage of this rank; give it all parameters"),
]


def _message_of(program: Callable[[Any], Any], argument: Any) -> str:
    try:
        program(argument)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("program", "argument", "match"), _REFUSED)
def test_what_cannot_be_right_is_the_same_error_on_all_ranks(
    gloo: ProcessPool, program: Callable[[Any], Any], argument: Any, match: str
) -> None:
    for message in gloo.run(_message_of, program, argument, world_size=2):
        assert re.search(match, message, re.DOTALL), message


_ROWS = _LENGTH = 5  # Equally many: a tensor by positions must not be taken for one by rows.


def _padded() -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCABULARY, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(_LENGTH) >= torch.arange(_ROWS)[:, None]).long()  # Row n has n tokens of padding at its left.
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _call(net: Any) -> tuple[Tensor, Tensor]:
    """What is generated, and logits of a call with three positional arguments."""
    batch = _padded()
    net.generation_config.pad_token_id = 0
    positions = 3 * torch.arange(_LENGTH).expand(_ROWS, -1)
    with torch.no_grad():
        tokens = net.generate(**batch, max_new_tokens=4, do_sample=False, use_cache=False)
        return tokens, net(batch["input_ids"], batch["attention_mask"], positions, use_cache=False).logits


def _generate(kind: str, schedule: str) -> tuple[Tensor, Tensor]:
    net = causal_lm(kind)
    engine, _ = start(net, _sgd, optimizer="keep", pipeline_schedule=schedule)
    engine.begin_evaluation()
    with engine.around_forward():
        result = _call(net.eval())
    engine.end_evaluation()
    engine.close()
    return result


@pytest.mark.parametrize(("kind", "schedule"), [("llama", "1f1b"), ("llama", "zb_v"), ("qwen3", "1f1b")])
def test_left_padded_prompts_go_on_as_in_one_process(gloo: ProcessPool, kind: str, schedule: str) -> None:
    tokens, logits = _call(causal_lm(kind).eval())
    nearer = causal_lm(kind).eval()(**_padded(), use_cache=False).logits
    assert (logits - nearer).abs().max() > 1e-4  # The positions have an effect.
    for found, of_call in gloo.run(_generate, kind, schedule, world_size=2):
        assert torch.equal(found, tokens)
        # Micro-batches have fewer rows, for which a kernel may add in another order.
        torch.testing.assert_close(of_call, logits, rtol=1e-5, atol=1e-6)


def _layers() -> nn.Module:
    return Chain([nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def _routes() -> dict[str, str]:
    with _started(_layers(), _adamw, optimizer=MuonConfig(), sharding="none") as (_, optimizer):
        return {route.name: route.algorithm for route in optimizer.routes}


def test_the_last_layer_of_a_stage_is_no_output_head(gloo: ProcessPool) -> None:
    first, last = gloo.run(_routes, world_size=2)
    assert first and last and first | last == {r.name: r.algorithm for r in route_module(_layers()).values()}


def _groups_of_stage(*, keeps_empty: bool) -> int:
    """A program makes groups for weight decay of a stage that has no biases, and of one that has."""
    stage = nn.Linear(WIDTH, WIDTH, bias=dist.get_rank() > 0)
    decays = {ndim: [each for each in stage.parameters() if each.ndim == ndim] for ndim in (2, 1)}
    groups = [{"params": params, "weight_decay": ndim / 20} for ndim, params in decays.items() if params or keeps_empty]
    stages = axis_group(init_device_mesh("cpu", (2,)), (0,))
    (found,) = convert_optimizers([torch.optim.AdamW(groups)], stage, choice="auto", stages=stages)
    return len(found.optimizer.param_groups)


def test_param_groups_are_the_same_on_all_stages(gloo: ProcessPool) -> None:
    assert gloo.run(_groups_of_stage, keeps_empty=True, world_size=2) == [2, 2]
    match = r"rank 0 of the group has nothing more, rank 1 has 'param group 1'.*that have no parameters there"
    gloo.expect_error_on_all_ranks(
        _groups_of_stage, keeps_empty=False, match=match, exception=RuntimeError, world_size=2
    )
