"""Steps of the optimizers on fake CUDA devices: weights as ``fully_shard`` leaves them, backward as FSDP2 runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_muon import FlexDeMo, ModeOptions, ParallelMuon, make_mode
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.grad_sync.clipping import clip_norm_
from lightning_muon.schedule.shapes import ParameterShape, read_shapes
from tests.support.fake_cuda import Tracker, world
from tests.support.fake_device import Simulation, active

Found = Sequence[tuple[ParameterShape, nn.Parameter]]
# Steps before the one that is watched: the first makes the plan and the buffers.
_WARM_UP = 2


def quiet(agree: Callable[..., Any]) -> Callable[..., Any]:
    """``agree_on_gradients`` without a look at the device: with meta tensors there is nothing to read."""

    def wrapped(*args: Any, **options: Any) -> Any:
        agreed = agree(*args, **options)
        return (
            agreed if agreed is None or agreed.deferred_check is None else replace(agreed, deferred_check=lambda: None)
        )

    return wrapped


def shapes_of(name: str) -> list[ParameterShape]:
    """Parameters of a model that the package knows by name, or of ``"small"``."""
    if name != "small":
        return list(read_shapes(name).parameters)
    layer = {"q": (64, 64), "up": (192, 64), "down": (64, 192), "norm": (64,)}
    shapes = {f"layers.{index}.{part}.weight": shape for index in range(3) for part, shape in layer.items()}
    shapes = {"embed.weight": (256, 64), **shapes, "head.weight": (256, 64)}
    return [
        ParameterShape(
            name=name, shape=shape, kind="matrix" if ".layers." in f".{name}" and len(shape) == 2 else "elementwise"
        )
        for name, shape in shapes.items()
    ]


def mesh_of(size: int, replicas: int, *, always2d: bool = False) -> DeviceMesh:
    """Mesh of all ranks: (shard), or (replicate, shard)."""
    if replicas == 1 and not always2d:
        return init_device_mesh("cuda", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cuda", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def weights(
    shapes: Sequence[ParameterShape], mesh: DeviceMesh, *, device: str = "cuda", dtype: torch.dtype = torch.float32
) -> Found:
    """The parameters that are not frozen, sharded over the last axis of the mesh."""
    found: list[tuple[ParameterShape, nn.Parameter]] = []
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for shape in shapes:
        if shape.frozen:
            continue
        last = Shard(shape.shard_dim) if shape.shape else Replicate()
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), last)
        local_shape, _ = local_shape_and_offset(shape.shape, tuple(mesh.shape), coordinate, placements)
        local = torch.empty(local_shape, dtype=dtype, device=device)
        stride = torch.empty(shape.shape, device="meta").stride()
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape.shape), stride=stride
        )
        found.append((shape, nn.Parameter(whole)))
    return found


def groups_of(found: Found) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Param groups for Muon and AdamW, and ``fused``."""
    muon = [(shape.name, tensor) for shape, tensor in found if shape.kind != "elementwise"]
    adamw = [(shape.name, tensor) for shape, tensor in found if shape.kind == "elementwise"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]
    return [group for group in groups if group["params"]], {
        shape.name: shape.splits for shape, _ in found if shape.splits
    }


def layer_of(name: str) -> str:
    """The FSDP2 unit of a parameter: its block, or the module that holds it."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("layers") + 2] if "layers" in parts else parts[:-1]) or name


class Backward:
    """What FSDP2 does in backward: the reduce-scatter of each unit on a stream of its own, then .grad and hooks there.

    Read in ``foreach_reduce`` of torch 2.13.
    """

    def __init__(self, found: Found, unit: Callable[[str], str] = layer_of) -> None:
        self._stream: Any = torch.cuda.Stream()
        self._stream.id = "reduce_scatter"
        self._units: dict[str, list[nn.Parameter]] = {}
        for shape, tensor in found:
            self._units.setdefault(unit(shape.name), []).append(tensor)

    def run(self, device: str = "cuda") -> None:
        """One backward pass; all gradients are zero."""
        default = torch.cuda.current_stream()
        for tensors in reversed(self._units.values()):
            self._stream.wait_stream(default)
            with torch.no_grad(), torch.cuda.stream(self._stream):
                _reduce(tensors, device)
                reduced = self._stream.record_event()
        default.wait_event(reduced)
        active().end_backward()


def _reduce(tensors: Sequence[nn.Parameter], device: str) -> None:
    sizes = [_local(tensor).numel() for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=device)
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        assert isinstance(tensor, DTensor)
        local = part.view(_local(tensor).shape)
        tensor.grad = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        _call_hooks(tensor)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _call_hooks(tensor: Tensor) -> None:
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(tensor)


def run_fsdp(
    shapes: Sequence[ParameterShape],
    size: int,
    *,
    replicas: int = 1,
    steps: int = 3,
    clip: bool = False,
    races: bool = True,
    watch: bool = True,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    lr_on_device: bool = False,
    timing: list[tuple[float, float]] | None = None,
    **options: Any,
) -> tuple[Simulation, ParallelMuon]:
    """Steps of ParallelMuon on FSDP2 parameters; counts are of the last step, syncs and races of all but the first two.

    Args:
        shapes: The parameters.
        size: Ranks.
        replicas: Size of the replicate axis.
        steps: How many.
        clip: Clip gradients before each step.
        races: Look for races and unsafe frees.
        watch: Look at all.
        device: "cuda", or "meta" for the time of Python alone.
        dtype: Of the parameters.
        lr_on_device: The learning rate is a tensor on the device.
        timing: Gets the seconds of backward and of step, for each step.
        options: Of ParallelMuon.
    """
    with world(size, races=races) as simulation, contextlib.ExitStack() as modes:
        if device == "cuda":
            modes.enter_context(Tracker())
        found = weights(shapes, mesh_of(size, replicas), device=device, dtype=dtype)
        groups, fused = groups_of(found)
        if lr_on_device:
            options["lr"] = torch.zeros((), device=device)
        optimizer = ParallelMuon(groups, fused=fused, **options)
        backward = Backward(found)
        for step in range(steps):
            simulation.begin_step(on=watch and step >= _WARM_UP)
            start = time.perf_counter()
            backward.run(device)
            half = time.perf_counter()
            if clip:
                clip_norm_([tensor for _, tensor in found], 1.0)
            optimizer.step()
            if timing is not None:
                timing.append((half - start, time.perf_counter() - half))
            optimizer.zero_grad()
        return simulation, optimizer


def run_flexdemo(
    shapes: Sequence[ParameterShape],
    size: int,
    *,
    replicas: int = 2,
    steps: int = 3,
    completed: bool = True,
    races: bool = True,
    **options: Any,
) -> tuple[Simulation, FlexDeMo]:
    """As :func:`run_fsdp`, of FlexDeMo on ``replicas`` nodes; ``completed`` is what handles say of messages."""
    with world(size, races=races) as simulation, Tracker():
        simulation.completed = completed
        mesh = mesh_of(size, replicas, always2d=True)
        found = weights(shapes, mesh["shard"])
        groups, fused = groups_of(found)
        if options.get("base") != "muon":
            groups = [{"params": group["params"]} for group in groups]
        optimizer = FlexDeMo(groups, mesh=mesh, fused=fused, check_every=0, **options)
        backward = Backward(found)
        for step in range(steps):
            simulation.begin_step(on=step >= _WARM_UP)
            backward.run()
            optimizer.step()
            optimizer.zero_grad()
        return simulation, optimizer


class _Net(nn.Module):
    """Modules that hold replicated parameters of these shapes."""

    def __init__(self, shapes: Sequence[ParameterShape]) -> None:
        super().__init__()
        self.found: list[tuple[ParameterShape, nn.Parameter]] = []
        for shape in shapes:
            owner: nn.Module = self
            *path, last = shape.name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            tensor = nn.Parameter(torch.empty(shape.shape, device="cuda"))
            owner.register_parameter(last, tensor)
            self.found.append((shape, tensor))


def run_zero2(
    shapes: Sequence[ParameterShape],
    size: int,
    *,
    replicas: int = 1,
    steps: int = 3,
    clip: bool = False,
    races: bool = True,
    sharding: str = "zero2",
    **options: Any,
) -> tuple[Simulation, ParallelMuon]:
    """As :func:`run_fsdp`, of replicated parameters under ``sharding="zero2"`` or ``"ddp"``."""
    with (
        world(size, races=races) as simulation,
        Tracker(),
        mock.patch("lightning_muon.sharding.modes.ReplicatedWeights.prepare"),
    ):
        net = _Net(shapes)
        mode = make_mode(sharding, mesh_of(size, replicas), ModeOptions())
        mode.prepare(net)
        optimizer = ParallelMuon(groups_of(net.found)[0], **options)
        mode.attach(net, [optimizer])
        for step in range(steps):
            simulation.begin_step(on=step >= _WARM_UP)
            optimizer.zero_grad()
            for _, tensor in reversed(net.found):
                with torch.no_grad():
                    tensor.grad = torch.zeros_like(tensor)
                _call_hooks(tensor)
            mode.finish_gradients()
            if clip:
                mode.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            mode.end_step()
        mode.finish_parameters()
        return simulation, optimizer
