"""The order of units, compared over the ranks before weights change."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.sharding.call_log import CallLog
from lightning_muon.sharding.outputs import tensors_in
from lightning_muon.sharding.unit_hooks import listen
from tests.distributed.sharding.experts import Mixture, inputs_of, sharded, watching
from tests.distributed.sharding.models import assert_close, full, gradients_of, make_mesh
from tests.support.processes import ProcessPool


def _run(shape: tuple[int, int], units: Sequence[str], chosen: Sequence[Sequence[int]]) -> dict[str, Tensor | None]:
    """One step in which each rank chooses its experts, all of the same shape."""
    model, mode = sharded(make_mesh(shape), units)
    rank = dist.get_rank()
    before = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}
    model(inputs_of(rank), chosen[rank]).square().mean().backward()
    try:
        mode.finish_gradients()
    finally:
        after = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}
        assert all(torch.equal(after[name], value) for name, value in before.items())  # type: ignore[arg-type]
    return gradients_of(model)


@pytest.mark.parametrize(("shape", "chosen"), [((1, 2), ([0], [1])), ((2, 2), ([0], [0], [1], [1]))], ids=str)
def test_other_experts_by_rank_are_an_error_everywhere(
    gloo: ProcessPool, shape: tuple[int, int], chosen: Sequence[Sequence[int]]
) -> None:
    failures = gloo.expect_error_on_all_ranks(
        _run,
        shape,
        ["Expert"],
        chosen,
        match=r"(runs|pass of) 'layers\.\d\.experts\.[01]' \(Expert\); ranks? .*experts\.[01]' .*wrap_policy",
        exception=RuntimeError,
        world_size=len(chosen),
    )
    assert len({failure.message for failure in failures.values()}) == 1


@dataclass(slots=True)
class Slots:
    hidden: Tensor


class Outputs(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, object]:  # type: ignore[override]
        return {"nested": [Slots(super().forward(x)), "text"]}


def _backward_through_containers() -> list[int]:
    model = nn.Sequential(Outputs(3, 3))
    mesh = make_mesh((1, 2))
    fully_shard(model[0], mesh=mesh)
    call_log = CallLog(model, mesh)
    listen(model, [call_log])
    model(torch.ones(2, 3))["nested"][0].hidden.sum().backward()
    return call_log.calls()[0].last


def test_backward_passes_are_seen_through_containers(gloo: ProcessPool) -> None:
    assert gloo.run(_backward_through_containers, world_size=2) == [[0, 1]] * 2
    nested: list[object] = [tensor := torch.ones(3), Slots]
    nested.append({"again": nested, "slots": Slots(tensor)})
    assert [id(found) for found in tensors_in(nested, set())] == [id(tensor)] * 2


def _evaluate(shape: tuple[int, int], chosen: Sequence[Sequence[Sequence[int]]]) -> dict[str, Tensor | None]:
    """Each rank evaluates its batches of experts; then a step that is the same everywhere."""
    model, mode = sharded(make_mesh(shape), ["Expert"])
    rank = dist.get_rank()
    with watching(mode.call_log, patience=1.0, interval=0.1):
        with torch.no_grad():
            for experts in chosen[rank]:
                model(inputs_of(rank), experts)
        assert mode.call_log is not None
        mode.call_log.evaluation_has_ended()
        free_unsharded(model)
        model(inputs_of(rank), [0]).square().mean().backward()
        mode.finish_gradients()
    return gradients_of(model)


@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((2, 2), [[[0], [1]], [[0], [1]], [[1]] * 4, [[1]] * 4]),
        ((2, 1), [[[0], [1, 0]], [[1]]]),  # Ranks that gather nothing.
    ],
)
def test_replicas_may_evaluate_differently(
    gloo: ProcessPool, shape: tuple[int, int], chosen: Sequence[Sequence[Sequence[int]]]
) -> None:
    torch.manual_seed(0)
    model = Mixture()
    for rank in range(len(chosen)):
        (model(inputs_of(rank), [0]).square().mean() / len(chosen)).backward()
    for result in gloo.run(_evaluate, shape, chosen, world_size=len(chosen)):
        assert_close(result, gradients_of(model))


def test_ranks_that_share_weights_must_evaluate_the_same(gloo: ProcessPool) -> None:
    match = "run different units"
    gloo.expect_end_of_all_ranks(_evaluate, (1, 2), [[[0]], [[0], [0]]], match=match, world_size=2)
    gloo.expect_error_on_all_ranks(_evaluate, (2, 2), [[[0]], [[0]], [[0]], [[1]]], match=match, exception=RuntimeError)


def _different_crops(num_calls: Sequence[int]) -> list[dict[str, Tensor | None]]:
    """Two steps with one unit, the root, that stays whole while it is called more or less often."""
    model, mode = sharded(make_mesh((1, 2)), [])
    results = []
    for _ in range(2):
        parts = inputs_of(dist.get_rank()).tensor_split(num_calls[dist.get_rank()])
        torch.stack([model(part, [0]).square().sum() for part in parts]).sum().backward()
        mode.finish_gradients()
        results.append(gradients_of(model))
    return results


def test_whole_weights_may_be_called_differently_often(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Mixture()
    expected = []
    for _ in range(2):
        for rank in range(2):
            (model(inputs_of(rank), [0]).square().sum() / 2).backward()
        expected.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    for results in gloo.run(_different_crops, (3, 1), world_size=2):
        for result, reference in zip(results, expected, strict=True):
            assert_close(result, reference)
