"""The order of units, compared over the ranks before weights change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.sharding.outputs import tensors_in
from tests.distributed.sharding.experts import Mixture, inputs_of, sharded, watching
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, weights_of, wholes


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return wholes({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _run(units: Sequence[str], chosen: Sequence[Sequence[int]]) -> None:
    """One step of two replicas in which each rank chooses its experts, all of the same shape."""
    model, mode = sharded(mesh_of((2, 2)), units)
    before = weights_of(model)
    model(inputs_of(dist.get_rank()), chosen[dist.get_rank()]).square().mean().backward()
    try:
        mode.finish_gradients()
    finally:
        assert are_equal(weights_of(model).values(), before.values())


def test_other_experts_by_rank_are_an_error_everywhere(gloo: ProcessPool) -> None:
    match = r"(runs|pass of) 'layers\.\d\.experts\.[01]' \(Expert\); ranks? .*experts\.[01]' .*wrap_policy"
    chosen = ([0], [0], [1], [1])
    failures = gloo.expect_error_on_all_ranks(_run, ["Expert"], chosen, match=match, exception=RuntimeError)
    assert len({failure.message for failure in failures.values()}) == 1


@dataclass(slots=True)
class Slots:
    hidden: Tensor


def test_tensors_are_found_in_containers() -> None:
    nested: list[object] = [tensor := torch.ones(3), Slots]
    nested.append({"again": nested, "slots": Slots(tensor)})
    assert [id(found) for found in tensors_in(nested, set())] == [id(tensor)] * 2


def _evaluate(chosen: Sequence[Sequence[Sequence[int]]]) -> dict[str, Tensor]:
    """Each rank of two replicas evaluates its batches of experts; then a step that is the same everywhere."""
    model, mode = sharded(mesh_of((2, 2)), ["Expert"])
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
    return _gradients(model)


def test_replicas_may_evaluate_differently(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Mixture()
    for rank in range(4):
        (model(inputs_of(rank), [0]).square().mean() / 4).backward()
    for result in gloo.run(_evaluate, [[[0], [1]], [[0], [1]], [[1]] * 4, [[1]] * 4]):
        torch.testing.assert_close(result, _gradients(model), rtol=1e-5, atol=1e-6)


def _different_crops(num_calls: Sequence[int]) -> list[dict[str, Tensor]]:
    """Two steps with one unit, the root, that stays whole while it is called more or less often."""
    model, mode = sharded(mesh_of((1, 2)), [])
    results = []
    for _ in range(2):
        parts = inputs_of(dist.get_rank()).tensor_split(num_calls[dist.get_rank()])
        torch.stack([model(part, [0]).square().sum() for part in parts]).sum().backward()
        mode.finish_gradients()
        results.append(_gradients(model))
    return results


def test_whole_weights_may_be_called_differently_often(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Mixture()
    expected = []
    for _ in range(2):
        for rank in range(2):
            (model(inputs_of(rank), [0]).square().sum() / 2).backward()
        expected.append(_gradients(model))
    for results in gloo.run(_different_crops, (3, 1), world_size=2):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
