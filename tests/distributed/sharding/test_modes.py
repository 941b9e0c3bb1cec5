"""What modes hold, thaw and refuse."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.engine.conversion import convert_optimizer
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import initialize_roots, shard_model
from tests.distributed.sharding.training import Training, loss, mesh_of, model
from tests.support.processes import ProcessPool


def _held(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Elements of what is updated, state and gradients, and of the largest tensor."""
    training = Training.start("zero2", mesh_of(shape), net=model(dtype), bucket_bytes=600)
    parameters, layout = [p for p in training.net.parameters() if p.requires_grad], training.mode.layout
    for step in range(2):  # The second one knows which gradients to expect.
        training.backward(step)
        assert all(parameter.grad is None for parameter in parameters)
        gradients = [each for parameter in parameters if (each := layout.gradient(parameter)) is not None]
        alive, states = [weakref.ref(gradient) for gradient in gradients], training.optimizer.state
        held = {
            "weights": [layout.local(parameter) for parameter in parameters],
            "gradients": gradients,
            "state": [local_tensor(each) for p in parameters for key, each in states[p].items() if key != "step"],
        }
        assert {each.dtype for tensors in held.values() for each in tensors} == {torch.float32}
        counts = {kind: sum(each.numel() for each in tensors) for kind, tensors in held.items()}
        del gradients, each, held
        training.optimizer.step()
        assert not any(reference() is not None for reference in alive), "memory of gradients is free again"
    return counts, max(p.numel() for p in parameters)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_updated_is_sharded(gloo: ProcessPool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = torch.Size(shape).numel()
    ((alone, largest),) = gloo.run(_held, (1,), dtype, world_size=1)
    results = [held for held, _ in gloo.run(_held, shape, dtype, world_size=size)]
    for kind, count in alone.items():
        # No rank has much more than its share: at most one matrix, or the rows that do not divide.
        assert all(held[kind] <= count / shape[-1] + 2 * largest for held in results)
        # One 0-d parameter is on every rank, with two moments.
        extra = (size - size // shape[-1]) * (2 if kind == "state" else 1)
        assert sum(held[kind] for held in results) == count * size // shape[-1] + extra


def _added_pass() -> None:
    """A backward pass between two calls of :meth:`finish_gradients`, of which the first one has divided."""
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(3.0)
    for _ in range(2):
        net(torch.ones(1, 1)).sum().backward()
        mode.finish_gradients()
        mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
        assert net.weight.grad is not None and net.weight.grad.item() == 1 / torch.tensor(3.0)


def _goes_on(first: str, second: str) -> None:
    """The state of one mode in another, which ends with a step of gradients that nobody has summed."""
    before, expected = (Training.start(name, mesh_of((1, 2))) for name in (first, second))
    before.step(0)
    expected.step(0)
    saved = before.optimizer.state_dict()
    before.mode.close()
    after = Training.start(second, mesh_of((1, 2)), net=before.net)
    after.optimizer.load_state_dict(saved)
    after.step(1)
    expected.step(1)
    torch.testing.assert_close(after.weights(), expected.weights(), rtol=0, atol=1e-6)
    loss(after.net, 2, dist.get_rank()).backward()
    after.optimizer.step()


def _thaw() -> list[bool]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    shard_model(model, mesh_of((1, 2)), ModeOptions(mp_policy=policy))
    initialize_roots(model)
    results = []
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        gradient = model[0][0].weight.grad
        results.append(gradient is not None and gradient.dtype == torch.float32 and bool(gradient.full_tensor().any()))
        model[0].requires_grad_(True)
    return results


def test_a_frozen_unit_can_be_thawed_under_mixed_precision(gloo: ProcessPool) -> None:
    assert gloo.run(_thaw, world_size=2) == [[False, True]] * 2


def _refused_optimizers() -> list[str]:
    module = nn.Linear(5, 7)
    shard_model(module, mesh_of((1, 2)), ModeOptions())
    optim, messages = torch.optim, list[str]()
    for kind, options in (
        (optim.LBFGS, {}), (optim.Adafactor, {}), (optim.Rprop, {}),
        (optim.SGD, {"fused": True}), (optim.Adagrad, {"fused": True}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="on the shards of FSDP2") as refused:
            convert_optimizer(kind(module.parameters(), lr=0.1, **options), module, "keep")
        messages.append(str(refused.value).partition(" on the")[0])
        assert ("sharding='ddp'" in str(refused.value)) == (kind is not optim.LBFGS)
    for kind, options in ((optim.SGD, {}), (optim.AdamW, {"fused": True})):
        assert convert_optimizer(kind(module.parameters(), lr=0.1, **options), module, "keep").summary
    return messages


def test_optimizers_that_fail_on_shards_are_refused(gloo: ProcessPool) -> None:
    names = ("LBFGS", "Adafactor", "Rprop", "SGD(fused=True)", "Adagrad(fused=True)")
    assert gloo.run(_refused_optimizers, world_size=2) == [[f"{name} of torch does not work" for name in names]] * 2


def _attach(optimizer: str = "nodes", sharding: str = "fsdp", *, decoupled: bool = True, sharded: bool = False) -> None:
    net, mesh = nn.Sequential(nn.Linear(4, 4)), mesh_of((2, 1))
    if sharded:
        fully_shard(net[0], mesh=mesh)
    mode = make_mode(sharding, mesh, ModeOptions(decoupled_nodes=decoupled))
    mode.prepare(net)
    kind = {"sgd": torch.optim.SGD, "muon": ParallelMuon, "nodes": FlexDeMo}[optimizer]
    mode.attach(net, [kind(net.parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("program", "options", "world_size", "match"),
    [
        (_added_pass, {}, 1, "zero_grad"),
        (_added_pass, {}, 2, "there are 2 data-parallel ranks"),
        (_goes_on, {"first": "zero2", "second": "ddp"}, 2, r"call mode\.finish_gradients"),
        (_goes_on, {"first": "ddp", "second": "zero2"}, 2, r"call mode\.finish_gradients"),
        (_attach, {"optimizer": "sgd"}, 2, "drift apart; use FlexDeMo"),
        (_attach, {"optimizer": "muon"}, 2, "drift apart; use FlexDeMo"),
        (_attach, {"decoupled": False}, 2, r"ModeOptions\(decoupled_nodes=True\)"),
        (_attach, {"decoupled": False, "sharding": "ddp"}, 2, r"ModeOptions\(decoupled_nodes=True\)"),
        (_attach, {"sharded": True}, 2, r"0\.weight is a DTensor on .*'shard'\]"),
    ],
)
def test_added_passes_and_ranks_or_nodes_without_a_sum_are_errors(
    gloo: ProcessPool, program: Any, options: dict[str, Any], world_size: int, match: str
) -> None:
    kind = RuntimeError if program is _goes_on else ValueError
    gloo.expect_error_on_all_ranks(program, **options, world_size=world_size, match=match, exception=kind)
