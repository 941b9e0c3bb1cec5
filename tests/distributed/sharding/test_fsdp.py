"""FSDP2: units that are thawed, outputs changed in place, optimizers that are refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from lightning_muon.engine.conversion import convert_optimizer
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import initialize_roots, shard_model
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of


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


class ViewingBlock(nn.Module):
    """A linear layer of 3-D input computes 2-D products and returns a view; the bias is handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.down(torch.tanh(self.up(x + bias))), "bias": bias}


class InPlaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewingBlock() for _ in range(3))
        self.bias = nn.Parameter(torch.ones(3, 7))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2
        for block in self.blocks:
            outputs = checkpoint(block, x, bias, use_reentrant=False) if self.is_checkpointed else block(x, bias)
            hidden, bias = outputs["hidden"], outputs["bias"]
            hidden += x
            x = hidden
        return x


def _train_in_place(how: str, num_ranks: int) -> dict[str, Tensor]:
    """Two steps; without ``num_ranks`` processes one computes the losses of all."""
    torch.manual_seed(0)
    net = InPlaceNet()
    net.is_checkpointed = how == "checkpointed"
    batches = torch.randn(2, num_ranks, 4, 3, 7)
    mode = None
    if dist.is_initialized():
        mode = make_mode("fsdp", mesh_of((num_ranks,)), ModeOptions(wrap_policy=(ViewingBlock,)))
        mode.prepare(net)
        batches = batches[:, dist.get_rank() : dist.get_rank() + 1]
        for block in net.blocks if how == "compiled" else ():
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if mode is not None:
        mode.attach(net, [optimizer])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view")
        for step in batches:
            optimizer.zero_grad()
            for batch in step:
                (net(batch).square().mean() / len(step)).backward()
            if mode is not None:
                mode.finish_gradients()
            optimizer.step()
    return weights_of(net)


@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled"])
def test_what_a_unit_returns_may_be_changed_in_place(gloo: ProcessPool, how: str) -> None:
    expected = _train_in_place(how, 2)
    for weights in gloo.run(_train_in_place, how, 2, world_size=2):
        # Sums of float32 in another order.
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


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
