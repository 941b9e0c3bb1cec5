"""What the ranks of a pipeline must know of each other, and when they wait for each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import MuonConfig
from lightning_muon.comm.collectives import axis_group
from lightning_muon.engine.conversion import convert_optimizers
from lightning_muon.optim.gradients import skipped_steps
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.clipping import clip_norm_
from tests.distributed.pipeline.models import (
    VOCABULARY,
    WIDTH,
    Chain,
    Layer,
    batch_of,
    causal_lm,
    chain,
    started,
    take_step,
)
from tests.distributed.test_profiler_ranges import Event, ranges_of
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, whole

_adamw, _sgd = partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=1e-2)
_kept = partial(started, make=_sgd, optimizer="keep")


class _Shifted(Layer):
    """A layer with a parameter whose gradient may be NaN, while those of the layers before it are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.is_broken = nn.Parameter(torch.zeros(WIDTH)), False

    def forward(self, hidden: Tensor) -> Tensor:
        shift = self.shift.clone()
        if self.is_broken:
            shift.register_hook(lambda gradient: gradient * float("nan"))
        return super().forward(hidden) + shift


class _Model(Chain):
    """Four such layers, a head that may be tied, and a loss that may be NaN."""

    has_nan = False

    def __init__(self, *, is_tied: bool) -> None:
        torch.manual_seed(0)
        embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            head.weight = embedding.weight
        super().__init__([embedding, *(_Shifted() for _ in range(4)), head])

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().pipeline_loss(output, target)
        return total * (float("nan") if self.has_nan else 1.0), count


def _three_steps(broken: int | None, *, clips: bool, is_tied: bool, **options: Any) -> tuple[Any, list[Tensor]]:
    """Of the second step, which has a NaN in the loss or in the layer ``broken``: skipped steps, and a change."""
    net: Any = _Model(is_tied=is_tied)
    result: Any = None
    with started(net, _sgd if options.get("optimizer") == "keep" else _adamw, **options) as (engine, optimizer):
        for step in range(3):
            net.has_nan = step == 1 and broken is None
            for index, part in enumerate(net.parts):
                part.is_broken = step == 1 and index == broken
            before = [local_tensor(p.detach()).clone() for p in net.parameters()]
            take_step(engine, optimizer, batch_of(16, 5, seed=step), max_norm=float("inf") if clips else None)
            has_changed = not are_equal(before, map(local_tensor, net.parameters()))
            if step == 1:
                result = skipped_steps(optimizer), has_changed
            else:
                assert has_changed
        tied = ("parts.0.weight", "parts.5.weight")
        return result, [whole(p) for name, p in net.named_parameters() if name in tied]


@pytest.mark.parametrize(
    ("world_size", "broken", "options"),
    [
        (2, None, {}),
        (2, 4, {"clips": True}),
        (4, 1, {"clips": True, "replicate_size": 2}),
        (4, 1, {"optimizer": "keep", "shard_size": 2}),
        (2, 1, {"is_tied": True}),
        (4, 4, {"is_tied": True, "shard_size": 2}),
        # As docs/pipelines.md says: nothing makes the other stage wait for it.
        (2, 4, {}),
    ],
    ids=str,
)
def test_stages_skip_a_step_together(
    gloo: ProcessPool, world_size: int, broken: int | None, options: dict[str, Any]
) -> None:
    chosen = {"clips": False, "is_tied": False} | options
    results = gloo.run(_three_steps, broken, world_size=world_size, **chosen)
    expected = [(1, False)] * world_size
    if broken is not None and not options:
        expected[0] = (0, True)
    assert [found for found, _ in results] == expected
    if chosen["is_tied"]:
        first, *others = [weight for _, weights in results for weight in weights]
        assert len(others) == world_size - 1 and all(torch.equal(each, first) for each in others)


def _permuted(batch: dict[str, Tensor]) -> Any:
    return {key: value.flip(0) for key, value in batch.items()}


def _fewer(batch: dict[str, Tensor]) -> Any:
    return {key: value[:6] for key, value in batch.items()}


def _without_labels(batch: dict[str, Tensor]) -> Any:
    return {"input_ids": batch["input_ids"]}


def _number(_: dict[str, Tensor]) -> Any:
    return dict.fromkeys(("input_ids", "labels"), torch.tensor(1))


def _other_batches(change: Callable[[Any], Any], num_before: int, *, evaluates: bool = False) -> None:
    """The last rank has another batch, after ``num_before`` equal ones."""
    with _kept(chain(2), pipeline_schedule="zb_v" if change is _number else "1f1b") as (engine, optimizer):
        for step in range(num_before):
            take_step(engine, optimizer, batch_of(8, 5, seed=step))
        optimizer.zero_grad()
        batch = batch_of(8, 5, seed=num_before)
        batch = change(batch) if dist.get_rank() == 1 else batch
        if evaluates:
            with torch.no_grad(), engine.around_forward():
                engine.module(batch["input_ids"])
        else:
            engine.run_pipeline(batch)


def _call_in_training() -> None:
    with _kept(net := causal_lm("llama")):
        net(**batch_of(8, 5, seed=0))


def _twice() -> None:
    """Only the ranks of stages that train have gradients left."""
    net = chain(2)
    for part in list(net.parts)[:3]:
        part.requires_grad_(False)
    with _kept(net) as (engine, _):
        engine.run_pipeline(batch_of(8, 5, seed=0))
        engine.run_pipeline(batch_of(8, 5, seed=1))


def _freeze_one_copy() -> None:
    with started(net := _Model(is_tied=True), _adamw, optimizer="keep") as (engine, _):
        if dist.get_rank() == 0:
            next(net.parameters()).requires_grad_(False)
        engine.run_pipeline(batch_of(8, 5, seed=0))


def _interrupt() -> None:
    """Rank 0 has sent an activation when it fails, as rank 1 does; then both go on with another batch."""
    with _kept(chain(2), pipeline_microbatches=4) as (engine, _):
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


def _nothing_to_train() -> None:
    """An optimizer that was made before the cut, of what is trained: no stage of the first rank."""
    net = chain(2)
    for part in list(net.parts)[:3]:
        part.requires_grad_(False)
    with started(net, lambda parameters: _adamw([p for p in parameters if p.requires_grad])):
        pass


def _wrong_for_one_stage(*, fused: bool) -> None:
    net: Any = chain(2)
    if not fused:
        net.parts[2].inner.weight = net.parts[1].inner.weight
    with started(net, _adamw, optimizer=MuonConfig(fused={"parts.3.weight": 1} if fused else {})):
        pass


def _other_groups() -> None:
    """A program makes no group for weight decay of a stage that has no biases, and one of a stage that has."""
    stage = nn.Linear(WIDTH, WIDTH, bias=dist.get_rank() > 0)
    groups = [{"params": [each], "weight_decay": each.ndim / 20} for each in stage.parameters()]
    stages = axis_group(init_device_mesh("cpu", (2,)), (0,))
    convert_optimizers([torch.optim.AdamW(groups)], stage, choice="auto", stages=stages)


# What a rank does, and the error of all of them: of the one that does wrong, which tells the others.
_REFUSED: list[tuple[Callable[[], Any], str]] = [
    (partial(_other_batches, _fewer, 0, evaluates=True), "^ValueError: .* have different batches"),
    (partial(_other_batches, _permuted, 2), "^ValueError: .* have different batches"),
    (partial(_other_batches, _without_labels, 0), "labels"),
    (partial(_other_batches, _without_labels, 1), "labels"),
    (partial(_other_batches, _number, 0), "a batch of a pipeline needs a tensor with rows"),
    (_call_in_training, r"^RuntimeError: .*lightning_muon.forward_backward\(model, batch\)"),
    (_twice, "^RuntimeError: .*still has the gradient of an earlier batch"),
    (_freeze_one_copy, "^RuntimeError: .*copies of one parameter.*one is frozen and another one is trained"),
    (_interrupt, "^RuntimeError: .*has raised before"),
    (partial(_wrong_for_one_stage, fused=True), "not on Muon: parts.3.weight"),
    (partial(_wrong_for_one_stage, fused=False), r"parts\.1\.inner\.weight and parts\.2\.inner\.weight are one"),
    (_nothing_to_train, "has no parameter of a stage of this rank; give it all parameters"),
    (
        _other_groups,
        "^RuntimeError: .*rank 0 of the group has nothing more, rank 1 has 'param group 1'.*have no parameters there",
    ),
]


def _message_of(program: Callable[[], Any]) -> str:
    try:
        program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("program", "match"), _REFUSED)
def test_what_cannot_be_right_is_the_same_error_on_all_ranks(
    gloo: ProcessPool, program: Callable[[], Any], match: str
) -> None:
    for message in gloo.run(_message_of, program, world_size=2):
        assert re.search(match, message, re.DOTALL), message


def _norms_of_one_stage() -> tuple[float, float]:
    """By our norm over the parameters of the first stage alone, which the second rank has none of; and by hand."""
    with _kept(chain(2)) as (engine, _):
        engine.run_pipeline(batch_of(8, 5, seed=0))
        listed = list(engine.module.parameters()) if dist.get_rank() == 0 else []
        squares = [whole(p.grad).square().sum() for p in listed if p.grad is not None]
        return float(engine.clip_by_norm(listed, 1e-3)), float(sum(squares)) ** 0.5


def test_a_rank_without_listed_parameters_clips_too(gloo: ProcessPool) -> None:
    (norm, expected), (other, _) = gloo.run(_norms_of_one_stage, world_size=2)
    assert norm == other == pytest.approx(expected, rel=1e-6)
    # NCCL takes no zero from the memory of the host.
    assert clip_norm_([], 1.0, device=torch.device("meta")).device.type == "meta"


def _profiled() -> list[Event]:
    """Ranges of the second step."""
    options = {"pipeline_microbatches": 8, "pipeline_schedule": "zb_h1", "shard_size": 2}
    with started(causal_lm("llama", tied=True), _adamw, optimizer=MuonConfig(), **options) as (engine, optimizer):
        take_step(engine, optimizer, batch_of(16, 5, seed=0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            take_step(engine, optimizer, batch_of(16, 5, seed=1), max_norm=0.1)
        return ranges_of(profile)


def test_the_ops_of_a_rank_are_ranges_of_a_profile(gloo: ProcessPool) -> None:
    for ranges in gloo.run(_profiled, world_size=4):
        names = [name for name, *_ in ranges]
        counts = Counter(name.partition("[")[0] for name in names)
        assert {kind: counts[kind] for kind in "FIW"} == dict.fromkeys("FIW", 8)
        assert {"unshard", "reduce_grad", "tied", "gather", "newton_schulz", "scatter", "update"} <= counts.keys()
        last = max(index for index, name in enumerate(names) if name[:2] in ("F[", "I[", "W["))
        assert counts["gradient_norm"] == 1 and names.index("gradient_norm[all]") > last
        waits = [each for each in ranges if each[0].startswith("wait[") and each[0] != "wait[batch]"]
        assert waits, "a rank of a pipeline waits for messages"
        ops = [each for each in ranges if not each[0].startswith(("wait", "agree"))]
        assert all(any(low <= begin and end <= high for _, low, high in ops) for _, begin, end in waits)
