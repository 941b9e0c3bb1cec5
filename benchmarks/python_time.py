"""CPU seconds of Python in the plan, the hooks of backward and the step of ParallelMuon, on any number of ranks.

    python benchmarks/python_time.py --shapes deepseek-v3 --ranks 64

One process is rank 0 of ``--ranks``. Weights are DTensors without memory (device "meta"), as ``fully_shard`` leaves
them; nothing travels, and arithmetic and copies are left out: what remains is what the host has to do before a device
has anything to do. All ranks have the same share of it, so one stands for all. ``record_function`` and the making of
views count, streams and events of CUDA do not.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_muon import ParallelMuon
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.config import Overlap
from lightning_muon.optim.gradients import agree_on_gradients
from lightning_muon.schedule.shapes import ParameterShape, read_shapes

Found = Sequence[tuple[ParameterShape, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """CPU seconds.

    Attributes:
        plan: Making the plan, once in a training.
        first: The first step after it.
        second: The second one, with the hooks of its backward pass.
        hooks: Hooks of a backward pass, median of all but the first two.
        step: The median of the steps that follow.
    """

    plan: float
    first: float
    second: float
    hooks: float
    step: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b", help="a model that `lightning-muon plan --shapes` knows")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--overlap", choices=get_args(Overlap), default="backward")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| shapes | ranks | plan s | first step ms | second step ms | hooks ms | step ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for ranks in arguments.ranks:
        with rank_of(ranks):
            found = weights(read_shapes(arguments.shapes).parameters, init_device_mesh("cpu", (ranks,)))
            seconds = measure(found, arguments.overlap, arguments.steps)
        row = [seconds.first, seconds.second, seconds.hooks, seconds.step]
        cells = " | ".join(f"{1000 * each:.0f}" for each in row)
        print(f"| {arguments.shapes} | {ranks} | {seconds.plan:.2f} | {cells} |")


def measure(found: Found, overlap: str, num_steps: int) -> Seconds:
    """Time ``num_steps`` steps, at least three, inside of :func:`rank_of`."""
    optimizer = optimizer_of(found, overlap)
    gradients = [torch.zeros_like(tensor) for _, tensor in found]
    hooks: list[float] = []
    steps: list[float] = []
    for _ in range(num_steps):
        hooks.append(_seconds(lambda: backward(found, gradients)))
        if not steps:
            # As in training: the first backward pass is over, so hooks have their first call in the second.
            plan = _seconds(optimizer._make_plan)
        steps.append(_seconds(optimizer.step))
        optimizer.zero_grad()
    return Seconds(
        plan=plan,
        first=steps[0],
        second=hooks[1] + steps[1],
        hooks=statistics.median(hooks[2:]),
        step=statistics.median(steps[2:]),
    )


def _seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


@contextlib.contextmanager
def rank_of(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``; all others are taken to answer the same, and nothing is computed."""

    def reduce(values: Tensor, group: AxisGroup) -> mock.Mock:
        values.mul_(group.size)
        return mock.Mock()

    def from_this_rank(found: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        del group
        found[:] = [value] * len(found)

    def no_matrix(matrix: Tensor, **_: object) -> Tensor:
        return matrix

    def nothing(*_: object, **__: object) -> None:
        return None

    def first(tensors: Sequence[Tensor], *_: object, **__: object) -> list[Tensor]:
        return list(tensors)

    package, norm = "lightning_muon", torch.zeros((), device="meta")
    replaced: dict[str, Any] = {
        "torch.distributed.all_gather_object": from_this_rank,
        f"{package}.comm.groups.host_group": lambda group: group,
        f"{package}.comm.groups.world_timeout": timedelta,
        f"{package}.optim.gradients.start_all_reduce_sum": reduce,
        # There is nothing to read from these tensors.
        f"{package}.optim.planned_optimizer.agree_on_gradients": _without_check,
        f"{package}.optim.planned_optimizer.adamw_step_": nothing,
        f"{package}.optim.transfer.start_all_to_all": lambda *_, **__: [],
        f"{package}.optim.transfer.start_messages": lambda *_: [],
        f"{package}.optim.transfer.Transfer.is_packed": lambda *_: [],
        f"{package}.math.newton_schulz.orthogonalize": no_matrix,
        f"{package}.compat.foreach.norm": lambda tensors, *_, **__: [norm] * len(tensors),
        f"{package}.compat.foreach.lerp": first,
        **{f"{package}.compat.foreach.{name}": nothing for name in ("add_", "copy_", "lerp_", "mul_")},
    }
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            for name, replacement in replaced.items():
                stack.enter_context(mock.patch(name, replacement))
            yield
    finally:
        dist.destroy_process_group()


def _without_check(*arguments: Any, **options: Any) -> Any:
    agreed = agree_on_gradients(*arguments, **options)
    return agreed and replace(agreed, deferred_check=agreed.deferred_check and (lambda: None))


def weights(shapes: Sequence[ParameterShape], mesh: DeviceMesh) -> Found:
    """Trainable bfloat16 parameters on rank 0 of a 1-D mesh, without memory."""
    found: list[tuple[ParameterShape, nn.Parameter]] = []
    for shape in shapes:
        if not shape.frozen:
            placements = [Shard(shape.shard_dim)]
            local_shape, _ = local_shape_and_offset(shape.shape, tuple(mesh.shape), [0], placements)
            whole = torch.empty(shape.shape, dtype=torch.bfloat16, device="meta")
            local = torch.empty(local_shape, dtype=torch.bfloat16, device="meta")
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            found.append((shape, nn.Parameter(tensor)))
    return found


def optimizer_of(found: Found, overlap: str) -> ParallelMuon:
    """With the groups and fused weights that the shapes say."""
    muon = [(shape.name, tensor) for shape, tensor in found if shape.kind != "elementwise"]
    adamw = [(shape.name, tensor) for shape, tensor in found if shape.kind == "elementwise"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]
    fused = {shape.name: shape.splits for shape, _ in found if shape.splits}
    return ParallelMuon(
        [group for group in groups if group["params"]], fused=fused, overlap=overlap, compute_dtype="bfloat16"
    )


@torch.no_grad()
def backward(found: Found, gradients: Sequence[Tensor]) -> None:
    """Give every parameter its gradient and call its hooks, the last parameter first, as FSDP2 does."""
    for (_, tensor), gradient in zip(reversed(found), reversed(gradients), strict=True):
        tensor.grad = gradient
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(tensor)


if __name__ == "__main__":
    main()
