"""The order of units, compared over the ranks before weights change."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import FlexDeMo, ModeOptions, make_mode
from tests.distributed.sharding.experts import Mixture, inputs_of, sharded
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


def _one_node_alone(shape: tuple[int, int]) -> bool:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mode = make_mode("fsdp", mesh_of(shape), ModeOptions(decoupled_nodes=True, wrap_policy=(nn.Linear,)))
    mode.prepare(net)
    mode.attach(net, [FlexDeMo(net)])
    node = dist.get_rank() // shape[1]
    x = torch.ones(2, 4)
    (net(x) if node == 0 else net[0](x)).sum().backward()
    mode.finish_gradients()
    mode.close()
    return net[1].weight.grad is not None


def test_nodes_of_flexdemo_may_run_different_units(gloo: ProcessPool) -> None:
    assert gloo.run(_one_node_alone, (2, 2)) == [True, True, False, False]
