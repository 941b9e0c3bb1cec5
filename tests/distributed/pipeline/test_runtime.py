"""Gradients of a pipeline are those of one process with the whole model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_muon.engine.training import TrainingEngine
from lightning_muon.schedule.pipeline import SCHEDULES
from tests.distributed.pipeline.models import (
    VOCABULARY,
    WIDTH,
    Chain,
    batch_of,
    causal_lm,
    chain,
    load_example,
    meshes,
    started,
    take_step,
)
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes
from tests.unit.schedule.pipeline.problems import BUILT_IN

# Sums of float32 in another order, relative to the norm of a gradient; up to 1.1e-6 on CPUs without AVX-512.
_TOLERANCE = 3e-6
_sgd = partial(torch.optim.SGD, lr=0.05)


def _cut_by_hand(num_layers: int) -> nn.Module:
    return load_example("pipeline_t5").Reverser(num_layers)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how it is cut."""

    ranks: int = 2
    make: Callable[..., nn.Module] = chain
    num_layers: int = 6
    arguments: dict[str, Any] = field(default_factory=dict)
    frozen: Sequence[str] = ()
    thawed_in: int = 99  # The step from which on they are trained.
    is_checkpointed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    # Rows and length of each batch of all data ranks.
    batches: Sequence[tuple[int, int]] = ((13, 5), (13, 5))
    precision: str = "32-true"

    def net(self) -> nn.Module:
        net: Any = self.make(num_layers=self.num_layers, **self.arguments)
        for name in self.frozen:
            net.get_submodule(name).requires_grad_(False)
        if self.is_checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        return net.to(self.dtype)

    def begin_step(self, net: nn.Module, step: int) -> None:
        for name in self.frozen if step == self.thawed_in else ():
            net.get_submodule(name).requires_grad_(True)

    @property
    def dtype(self) -> torch.dtype:
        """float64 for models whose gradients float32 rounds by more than the tolerance."""
        return torch.float64 if self.make in (_cut_by_hand, meshes) else torch.float32

    def batch(self, step: int) -> dict[str, Tensor]:
        rows, length = self.batches[step]
        batch = batch_of(rows, length, seed=step, is_uneven=self.make is not _cut_by_hand)
        return batch | {"attention_mask": (batch["input_ids"] > 3).long()} if self.make is _cut_by_hand else batch


Steps = list[tuple[float, dict[str, Tensor | None]]]  # The loss and all gradients of each.


def _sum_and_count(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a model in one process, written out."""
    if hasattr(net, "pipeline_step"):
        methods: Any = net
        values, labels = methods.pipeline_step(batch)
        for part in methods.pipeline_parts():
            values = part(*values) if isinstance(values, tuple) else part(values)
        return methods.pipeline_loss(values, labels)
    logits, labels = net(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


def alone(case: Case) -> Steps:
    """The loss is that of data rank 0."""
    num_data_ranks = case.ranks // case.options.get("pipeline_size", case.ranks)
    net, steps = case.net(), Steps()
    optimizer = _sgd(net.parameters())
    for step in range(len(case.batches)):
        optimizer.zero_grad()
        case.begin_step(net, step)
        batch = case.batch(step)
        of_ranks = [{key: value[r::num_data_ranks] for key, value in batch.items()} for r in range(num_data_ranks)]
        parts = [_sum_and_count(net, each) for each in of_ranks]
        count = torch.stack([torch.as_tensor(count) for _, count in parts])
        (torch.stack([total for total, _ in parts]) / count.sum()).sum().backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
        steps.append(((parts[0][0] / parts[0][1]).item(), gradients))
        optimizer.step()
    return steps


def in_pipeline(case: Case) -> Steps:
    """The same, on this rank."""
    net, steps = case.net(), Steps()
    chosen = {"pipeline_size": dist.get_world_size(), "optimizer": "keep", "loss_scaling": "tokens"}
    with started(net, _sgd, precision=case.precision, **(chosen | case.options)) as (engine, optimizer):
        for step in range(len(case.batches)):
            case.begin_step(net, step)
            loss = take_step(engine, optimizer, case.batch(step))
            gradients = {name: p.grad for name, p in net.named_parameters()}
            found = wholes({name: gradient for name, gradient in gradients.items() if gradient is not None})
            steps.append((float(loss), gradients | found))
            if step == 0:
                _check_evaluation(case, engine)
    return steps


def _check_evaluation(case: Case, engine: TrainingEngine) -> None:
    """A forward of the whole model has the same result on every rank, for which there is a loss of its own."""
    assert engine.pipeline is not None
    tokens = case.batch(0)["input_ids"][:3]
    engine.begin_evaluation()
    with torch.no_grad(), engine.around_forward():
        others = (tokens, torch.ones_like(tokens)) if case.make is _cut_by_hand else ()
        output = engine.pipeline.stages.model.root(tokens, *others)
    logits = output if isinstance(output, Tensor) else output.logits
    assert logits.shape[:2] == tokens.shape and logits.dtype == case.dtype
    found = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(found, logits.contiguous())
    assert all(torch.equal(each, logits) for each in found)
    engine.end_evaluation()


def _require_equal(case: Case, expected: Steps, results: Sequence[Steps]) -> None:
    tied = case.arguments.get("tied", case.make is _cut_by_hand)
    for step, (loss, gradients) in enumerate(expected):
        names = {name for result in results for name in result[step][1]}
        assert not {name for name in names ^ gradients.keys() if not name.endswith("lm_head.weight")}
        assert results[0][step][0] == pytest.approx(loss, rel=1e-5)
        for rank, result in enumerate(results):
            for name, gradient in result[step][1].items():
                of = next(iter(gradients)) if tied and name.endswith("lm_head.weight") else name
                wanted, where = gradients[of], f"{name} of rank {rank} in step {step}"
                if wanted is None:
                    assert gradient is None or not gradient.any(), where
                    continue
                assert gradient is not None, where
                assert (gradient - wanted).norm() <= _TOLERANCE * wanted.norm(), where


def _one_after_the_other(cases: list[Case]) -> list[Steps]:
    """With the schedules of examples/schedules.py, which are registered as a user's are."""
    with mock.patch.dict(SCHEDULES):
        load_example("schedules")
        return [in_pipeline(case) for case in cases]


def _cut(schedule: str, **options: Any) -> dict[str, Any]:
    return {"pipeline_schedule": schedule, "pipeline_microbatches": 4, **options}


_LM = {"make": causal_lm, "num_layers": 4}
_TIED = {**_LM, "arguments": {"kind": "llama", "tied": True}}
_SHARDED = {"pipeline_size": 2, "shard_size": 2}
_REPLICATED = {"pipeline_size": 2, "replicate_size": 2}
_AUTO = {"pipeline_microbatches": "auto"}
_BOTH = _SHARDED | _REPLICATED
_ONE_BATCH = ((19, 5),)


_FROZEN = ["parts.0", "parts.1", "parts.2", "parts.3", "parts.6"]
_QUARTERS = ["parts.0", "parts.2", "parts.4", "parts.6"]

# What ranks train one after the other, with what one process has of the first.
CASES: dict[str, list[Case]] = {
    # As many rows as micro-batches for each data rank, or one more; with none to all of their tokens.
    "every schedule": [
        Case(ranks=4, options=_cut(name, pipeline_microbatches=8), batches=((9, 5),)) for name in BUILT_IN
    ],
    "some schedules, tied and checkpointed": [
        Case(ranks=4, **_TIED, is_checkpointed=True, options=_cut(name, **_SHARDED), batches=_ONE_BATCH)
        for name in BUILT_IN[::2]
    ],
    "the other schedules, 8 ranks, replicas": [
        Case(ranks=8, num_layers=2, options=_cut(name, **_BOTH), batches=_ONE_BATCH) for name in BUILT_IN[1::2]
    ],
    # Of examples/schedules.py; the last batch has fewer rows than they take micro-batches.
    "schedules of users": [
        Case(batches=((13, 5), (2, 5)), options={"pipeline_schedule": name, "pipeline_stages_per_rank": stages})
        for name, stages in (("auto", 1), ("auto", 2), ("dual_pipe_v", 2))
    ],
    # By its _pp_plan: windows in every other layer, embeddings that are scaled between two parts, bounded logits.
    "gemma2, tied, split backward": [
        Case(**_LM, arguments={"kind": "gemma2", "tied": True}, options=_cut("zb_v"), is_checkpointed=True)
    ],
    "deepseek_v3": [Case(ranks=4, **_LM, arguments={"kind": "deepseek_v3"}, options=_cut("1f1b", **_SHARDED))],
    "tied and frozen": [Case(**_TIED, options=_cut("1f1b"), frozen=["model.embed_tokens"])],
    "two lengths": [Case(options=_cut("zb_v"), batches=((13, 5), (13, 7), (13, 5)))],
    "fewer rows than ranks, V": [Case(ranks=4, options=_cut("v_half", **_AUTO), batches=((3, 5), (13, 5), (1, 5)))],
    "other numbers of rows": [
        Case(ranks=4, options=_cut("interleaved_1f1b", **_REPLICATED, **_AUTO), batches=((9, 5), (7, 5), (18, 5)))
    ],
    "unfrozen, sharded": [
        Case(ranks=4, options=_cut("zb_v", pipeline_split=_QUARTERS, **_SHARDED), frozen=_FROZEN, thawed_in=1)
    ],
    "T5 by hand": [Case(make=_cut_by_hand, num_layers=2, options=_cut("1f1b"))],
    "many ways, no shards": [Case(ranks=3, make=meshes, num_layers=7, options=_cut("zb_v", sharding="none", **_AUTO))],
    "many ways, sharded": [Case(ranks=4, make=meshes, options=_cut("zb_1p", **_SHARDED))],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(gloo: ProcessPool, name: str) -> None:
    cases = CASES[name]
    expected = alone(cases[0])
    results = gloo.run(_one_after_the_other, cases, world_size=cases[0].ranks, timeout=120.0)
    for case, *of_ranks in zip(cases, *results, strict=True):
        _require_equal(case, expected, of_ranks)


def _sum_of_microbatches(case: Case) -> dict[str, Tensor]:
    """Gradients of micro-batches of one row in bfloat16, summed in float32 in one process."""
    net: Any = case.net()
    batch = case.batch(0)
    sums = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    rounded = copy.deepcopy(net).bfloat16()
    count = (batch["labels"] != -100).sum()
    for row in range(case.batches[0][0]):
        with torch.autocast("cpu", torch.bfloat16):
            hidden: Any = batch["input_ids"][row : row + 1]
            for part in rounded.parts:  # FSDP2 rounds what a unit gets.
                hidden = part(hidden.bfloat16() if hidden.is_floating_point() else hidden)
            total, _ = net.pipeline_loss(hidden.float(), batch["labels"][row : row + 1])
        rounded.zero_grad()
        total.backward()
        for name, parameter in rounded.named_parameters():
            sums[name] += 0 if parameter.grad is None else parameter.grad.float()
    return {name: each / count for name, each in sums.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_bfloat16_gradients_are_summed_in_float32(gloo: ProcessPool, schedule: str) -> None:
    case = Case(options=_cut(schedule, pipeline_microbatches=64), precision="bf16-mixed", batches=((64, 5),))
    expected = _sum_of_microbatches(case)
    for ((_, gradients),) in gloo.run(in_pipeline, case, world_size=2):
        for name, gradient in gradients.items():
            wanted = expected[name]
            # Sums in bfloat16 of runs of weight parts were wrong by 1.3e-4.
            assert (wanted if gradient is None else gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


class _Noisy(nn.Module):
    """A layer with dropout, whose activations are computed again in the backward; it keeps what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.drawn = list[tuple[float, ...]]()

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self._run, hidden, use_reentrant=False)

    def _run(self, hidden: Tensor) -> Tensor:
        noise = F.dropout(torch.ones(64), 0.5, self.training)
        self.drawn.append(tuple(noise.tolist()))
        return torch.tanh(self.inner(hidden)) * noise[:WIDTH]


def _with_dropout() -> list[list[tuple[float, ...]]]:
    """What each layer of this rank has drawn in two steps, and in the second one again, as a resumed run takes it."""
    torch.manual_seed(0)
    net = Chain([nn.Embedding(VOCABULARY, WIDTH), *(_Noisy() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)])
    firsts = ["parts.0", "parts.2", "parts.3", "parts.4"]
    states: dict[int, Tensor] = {}
    with started(net, _sgd, optimizer="keep", **_cut("zb_v", pipeline_split=firsts)) as (engine, optimizer):
        for step in (0, 1, 1):
            torch.set_rng_state(states.setdefault(step, torch.get_rng_state()))
            take_step(engine, optimizer, batch_of(8, 5, seed=step))
    return [module.drawn for module in net.modules() if isinstance(module, _Noisy)]


def test_stages_draw_numbers_of_their_own(gloo: ProcessPool) -> None:
    layers = [layer for drawn in gloo.run(_with_dropout, world_size=2) for layer in drawn]
    assert len(layers) == 4
    counts = list[Counter[tuple[float, ...]]]()
    for layer in layers:
        size = len(layer) // 3
        assert layer[size : 2 * size] == layer[2 * size :]
        counts.append(Counter(layer[: 2 * size]))
    # Two steps of four micro-batches; each forward again for each part of the backward, with the same numbers.
    assert all(len(count) == 8 for count in counts) and len(set().union(*counts)) == 4 * 8
    assert [set(count.values()) for count in counts] == [{2}, {3}, {3}, {3}]
