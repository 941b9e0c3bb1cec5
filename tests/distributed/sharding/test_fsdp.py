"""Gradients under FSDP2: unused and 0-d parameters, micro-batches, divisors, evaluations."""

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.engine.conversion import convert_optimizer
from lightning_muon.sharding import fsdp
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import initialize_roots, set_gradient_divisor, shard_model
from tests.distributed.sharding.models import Net, assert_close, attach_fsdp, gradients_of, make_mesh, tokens_of_all
from tests.distributed.sharding.training import largest_difference, mesh_of
from tests.support.processes import ProcessPool


class Branches(nn.Module):
    """Each rank uses some of the branches; one is used by none, one block by none; scalars are no shards."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
        self.blocks[0][0].bias.requires_grad_(False)
        self.scale, self.unused = (nn.Parameter(torch.tensor(1.5)) for _ in range(2))

    def forward(self, x: Tensor, branches: list[int]) -> Tensor:
        x = self.blocks[0](x)
        total = torch.stack([self.branches[index](x).sum() for index in branches]).sum()
        return total * self.scale if 1 in branches else total


_BRANCHES = ([0], [0, 1])


def _use_branches() -> list[dict[str, Tensor | None]]:
    mesh = make_mesh((1, 2))
    torch.manual_seed(0)
    model = Branches()
    mode = attach_fsdp(model, mesh)
    results = []
    for branches in (_BRANCHES[dist.get_rank()], [0], [0]):
        if len(results) == 2:
            model.zero_grad()
            model.blocks[0][0].bias.requires_grad_(True)
        model(torch.full((2, 3), dist.get_rank() + 1.0), branches).backward()
        mode.finish_gradients()
        results.append(gradients_of(model))
    return results


def test_gradients_of_some_ranks_count_others_stay_none(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Branches()

    def both(branches: tuple[list[int], list[int]]) -> dict[str, Tensor | None]:
        for rank, chosen in enumerate(branches):
            (model(torch.full((2, 3), rank + 1.0), chosen) / 2).backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    expected = [both(_BRANCHES), both(([0], [0]))]
    model.zero_grad()
    model.blocks[0][0].bias.requires_grad_(True)
    expected.append(both(([0], [0])))
    for results in gloo.run(_use_branches, world_size=2):
        for actual, reference in zip(results, expected, strict=True):
            assert_close(actual, reference)


def _use_branches_before_torch_2_13() -> tuple[list[dict[str, Tensor | None]], int]:
    """And the most memory that a gradient of zeros took."""
    sizes = [0]
    fill = fsdp._fill_with_zeros

    def watched(wholes: list[Tensor], zeros: dict[int, Tensor]) -> None:
        fill(wholes, zeros)
        sizes.extend(zero.untyped_storage().nbytes() for zero in zeros.values())

    with (
        mock.patch.object(fsdp, "hasattr", return_value=False, create=True),
        mock.patch.object(fsdp, "_fill_with_zeros", watched),
    ):
        return _use_branches(), max(sizes)


def test_zeros_before_torch_2_13_take_no_memory(gloo: ProcessPool) -> None:
    expected = gloo.run(_use_branches, world_size=2)[0]
    for results, most in gloo.run(_use_branches_before_torch_2_13, world_size=2):
        assert most == 4
        for actual, wanted in zip(results, expected, strict=True):
            assert_close(actual, wanted)


def _evaluate_then_call_the_inside() -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    attach_fsdp(model, make_mesh((1, 2)))
    tokens = tokens_of_all(2)[0]
    # A block is called before the root has run.
    model.blocks[0](torch.ones(2, 7)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(tokens)
        model.generate(tokens)
    whole = [not isinstance(model.table.weight, DTensor)]
    free_unsharded(model)
    whole.append(not isinstance(model.table.weight, DTensor))
    model.training_step(tokens).backward()
    return whole


def test_whole_weights_are_freed_after_evaluation(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_then_call_the_inside, world_size=2) == [[True, False]] * 2


def _thaw() -> list[bool]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    shard_model(model, make_mesh((1, 2)), ModeOptions(mp_policy=policy))
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


def _told_events() -> list[tuple[bool, str]]:
    model = Net()
    mode = make_mode("fsdp", make_mesh((1, 2)), ModeOptions(early_all_gather=True))
    mode.prepare(model)
    mode.attach(model, [])
    mode.mesh = mock.Mock(device_type="cuda")
    told: list[tuple[bool, str]] = []
    stream = mock.Mock(record_event=lambda: "event")
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(FSDPModule, "set_post_optim_event", lambda unit, event: told.append((unit is model, event))),
    ):
        mode.end_step()
    return told


def test_the_root_is_told_what_its_all_gathers_wait_for(gloo: ProcessPool) -> None:
    assert gloo.run(_told_events, world_size=2) == [[(True, "event")]] * 2


def _divided(shape: tuple[int, int], divisor: float, dtype: torch.dtype | None) -> None:
    mesh = make_mesh(shape)
    torch.manual_seed(0)
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    mode = attach_fsdp(model, mesh, mp_policy=policy)
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = tokens_of_all(size)[rank]

    def gradients(chosen: float | None) -> dict[str, Tensor | None]:
        model.zero_grad()
        mode.set_gradient_divisor(chosen)
        model.training_step(tokens).backward()
        mode.finish_gradients()
        return gradients_of(model)

    sums, quotients, means = gradients(1.0), gradients(divisor), gradients(None)
    assert any(value is not None and value.ndim == 0 for value in sums.values())
    for name, value in sums.items():
        if value is None:
            assert quotients[name] is None and means[name] is None
            continue
        # The division happens in the dtype of the reduction, a power of two is exact in each.
        total = value if dtype is None or value.ndim == 0 else value.to(dtype)
        assert torch.equal(quotients[name], (total / divisor).to(value.dtype)), name
        tolerance = 1e-6 if dtype is None else 1e-2
        torch.testing.assert_close(means[name], value / size, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 1), None), ((1, 3), None), ((2, 2), torch.bfloat16), ((4, 1), torch.bfloat16)], ids=str
)
def test_gradients_are_the_sum_over_the_ranks_divided_once(
    gloo: ProcessPool, shape: tuple[int, int], dtype: torch.dtype | None
) -> None:
    gloo.run(_divided, shape, 37.5, dtype, world_size=shape[0] * shape[1])


@pytest.mark.parametrize("divisor", [0.0, float("inf"), float("nan")])
def test_a_divisor_must_be_positive_and_finite(divisor: float) -> None:
    with pytest.raises(ValueError, match="divisor of the gradients must be positive and finite"):
        set_gradient_divisor(nn.Linear(2, 2), divisor)


def _dropped() -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = make_mesh((1, 2))
    mode = attach_fsdp(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    mode.finish_gradients()
    reference = weakref.ref(model)
    del model, mode
    gc.collect()
    return reference() is None


def test_a_dropped_model_frees_its_process_groups(gloo: ProcessPool) -> None:
    assert gloo.run(_dropped, world_size=2) == [True, True]


def _evaluate_without_training() -> tuple[bool, bool]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13)) for _ in range(3)))
    x = torch.ones(3, 13)
    mode = make_mode("fsdp", mesh_of((2,)), ModeOptions(wrap_policy=(nn.Sequential,)))
    mode.prepare(net)
    mode.watch(net)  # type: ignore[attr-defined]
    call_log = mode.call_log
    assert call_log is not None
    with torch.no_grad():
        net[1](x)
    assert call_log.all_calls.tail()[1]
    mode.finish_evaluation()
    assert not call_log.all_calls.tail()[1]
    mode.attach(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    is_kept = mode.call_log is call_log
    net(x).sum().backward()
    mode.finish_gradients()
    mode.close()
    return is_kept, mode.call_log is None


def test_evaluations_without_a_training_are_compared(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_without_training, world_size=2) == [(True, True)] * 2


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
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in net.named_parameters()
    }


@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled"])
def test_what_a_unit_returns_may_be_changed_in_place(gloo: ProcessPool, how: str) -> None:
    expected = _train_in_place(how, 2)
    for weights in gloo.run(_train_in_place, how, 2, world_size=2):
        # Sums of float32 in another order.
        assert largest_difference(weights, expected)[0] < 1e-6


def _refused_optimizers() -> list[str]:
    module = nn.Linear(5, 7)
    attach_fsdp(module, make_mesh((1, 2)))
    optim, messages = torch.optim, list[str]()
    for kind, options in (
        (optim.LBFGS, {}), (optim.Adafactor, {}), (optim.Rprop, {}),
        (optim.SGD, {"fused": True}), (optim.Adagrad, {"fused": True}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="on the shards of FSDP2") as refused:
            convert_optimizer(kind(module.parameters(), lr=0.1, **options), module, "keep")
        messages.append(str(refused.value).partition(" on the")[0])
    for kind, options in ((optim.SGD, {}), (optim.AdamW, {"fused": True})):
        assert convert_optimizer(kind(module.parameters(), lr=0.1, **options), module, "keep").summary
    return messages


def test_optimizers_that_fail_on_shards_are_refused(gloo: ProcessPool) -> None:
    names = ("LBFGS", "Adafactor", "Rprop", "SGD(fused=True)", "Adagrad(fused=True)")
    assert gloo.run(_refused_optimizers, world_size=2) == [[f"{name} of torch does not work" for name in names]] * 2


def _steps_that_compare_weights(num_steps: int) -> list[int]:
    model = Net()
    mode = attach_fsdp(model, make_mesh((1, dist.get_world_size())))
    steps: list[int] = []
    with mock.patch.object(fsdp, "overwritten_weights", return_value=[]) as compared:
        for step in range(num_steps):
            compared.reset_mock()
            model(tokens_of_all(dist.get_world_size())[0]).sum().backward()
            mode.finish_gradients()
            model.zero_grad()
            if compared.called:
                steps.append(step)
    return steps


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_weights_are_compared_in_few_steps(gloo: ProcessPool, world_size: int) -> None:
    assert gloo.run(_steps_that_compare_weights, 10, world_size=world_size) == [[0, 1, 2, 4, 8]] * world_size
