"""Which buckets may be gathered early, and that what is sent is what the step would send."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import ParallelMuon
from lightning_muon.optim.backward_prefetch import GatherPrefetch
from lightning_muon.params.layout import local_tensor
from tests.support.processes import ProcessPool

FLOAT32 = {"compute_dtype": "float32", "wire_dtype": "float32"}


def _bound(is_sharded: bool) -> tuple[nn.Module, ParallelMuon]:
    """An optimizer with a plan: one step has been taken."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(13, 7, bias=False), nn.Linear(7, 20, bias=False), nn.Linear(20, 6), nn.Linear(6, 5))
    if is_sharded:
        fully_shard(model, mesh=mesh)
        optimizer = ParallelMuon(model, lr=0.01, chunk_bytes=1, overlap="backward", **FLOAT32)
    else:
        optimizer = ParallelMuon(model, lr=0.01, chunk_bytes=1, overlap="backward", mesh=mesh, **FLOAT32)
    for step in range(2):
        _gradients(model, step)
        optimizer.step()
    return model, optimizer


def _gradients(model: nn.Module, step: int) -> dict[Tensor, Tensor]:
    """Local gradients, equal on all ranks where the weights are whole."""
    model.zero_grad()
    model(torch.randn(3, 13, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    if hasattr(model, "reshard"):
        model.reshard()
    return {p: local_tensor(p.grad) for p in model.parameters() if p.grad is not None}


def _early(optimizer: ParallelMuon) -> GatherPrefetch:
    assert optimizer._bound is not None
    assert isinstance(optimizer._bound.early, GatherPrefetch)
    return optimizer._bound.early


def _buckets_of_sharded_weights() -> None:
    model, optimizer = _bound(is_sharded=True)
    early = _early(optimizer)
    by_name = dict(model.named_parameters())
    matrices = [by_name[route.name] for route in optimizer.routes if route.algorithm == "muon"]
    assert len(matrices) == 3
    keys = early.keys(set(matrices))
    # What AdamW takes is in none.
    assert keys
    found = {tensor for key in keys for tensor in early._buckets[key]}
    assert found == set(matrices)
    assert early.keys_of([model.get_parameter("2.bias")]) == []
    assert all(by_name[early._leader[key]] in early._buckets[key] for key in keys)
    # Backward finishes the last weights first.
    assert early._buckets[keys[0]][0] is matrices[2]


def test_all_matrices_that_are_divided_may_go_early(gloo: ProcessPool) -> None:
    gloo.run(_buckets_of_sharded_weights, world_size=2)


def _sends_whole_weights() -> bool:
    _, optimizer = _bound(is_sharded=False)
    assert optimizer._bound is not None
    return optimizer._bound.early is not None


def test_whole_weights_have_nothing_to_gather_early(gloo: ProcessPool) -> None:
    assert gloo.run(_sends_whole_weights, world_size=2) == [False, False]


def _sent() -> None:
    model, optimizer = _bound(is_sharded=True)
    early = _early(optimizer)
    momenta = {p: local_tensor(s["momentum_buffer"]).clone() for p, s in optimizer.state.items()
               if "momentum_buffer" in s}  # fmt: skip
    gradients = _gradients(model, 7)
    keys = list(early._buckets)
    assert [early.is_sent(key) for key in keys] == [True] * len(keys), "backward has finished"
    for key in keys:
        assert not early.differs(key, gradients)
        for tensor in early._buckets[key]:
            if local_tensor(tensor).numel():
                changed = gradients | {tensor: gradients[tensor] + 1}
                assert early.differs(key, changed)
    assert all(torch.equal(local_tensor(optimizer.state[p]["momentum_buffer"]), m) for p, m in momenta.items())
    # Nobody wants them: all is as if nothing had been sent.
    early.settle(keys, keys, gradients)
    assert not any(early.is_sent(key) for key in keys)
    before = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    early.close()
    optimizer.step()
    assert not all(
        torch.equal(one, local_tensor(other.detach())) for one, other in zip(before, model.parameters(), strict=True)
    )


def test_what_is_sent_early_is_compared_and_can_be_dropped(gloo: ProcessPool) -> None:
    gloo.run(_sent, world_size=2)
