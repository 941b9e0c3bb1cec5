"""Steps of the optimizers on fake CUDA devices: weights as ``fully_shard`` leaves them, backward as FSDP2 runs it.

Counts of a simulation are of the last step, syncs and races of all but the first two.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_muon import FlexDeMo, ModeOptions, ParallelMuon, make_mode
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.sharding.clipping import clip_norm_
from tests.support.fake_cuda import Tracker, world
from tests.support.fake_device import Simulation

Shapes = Mapping[str, tuple[int, ...]]
Found = Mapping[str, nn.Parameter]
# Steps before the one that is watched: the first makes the plan and the buffers.
_WARM_UP = 2


def shapes_of(name: str) -> Shapes:
    """Parameters of the model ``"small"``, by name."""
    assert name == "small"
    layer = {"q": (64, 64), "up": (192, 64), "down": (64, 192), "norm": (64,)}
    shapes = {f"layers.{index}.{part}.weight": shape for index in range(3) for part, shape in layer.items()}
    return {"embed.weight": (256, 64), **shapes, "head.weight": (256, 64)}


def _mesh_of(size: int, replicas: int) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh("cuda", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cuda", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def _weights(shapes: Shapes, mesh: DeviceMesh, *, dtype: torch.dtype = torch.float32) -> Found:
    """The parameters, their rows sharded over the last axis of the mesh."""
    found, coordinate = dict[str, nn.Parameter](), mesh.get_coordinate()
    assert coordinate is not None
    for name, shape in shapes.items():
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))
        local_shape, _ = local_shape_and_offset(shape, tuple(mesh.shape), coordinate, placements)
        local = torch.empty(local_shape, dtype=dtype, device="cuda")
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        found[name] = nn.Parameter(whole)
    return found


def _groups_of(found: Found) -> list[dict[str, Any]]:
    """Param groups for Muon and AdamW."""
    muon = [(name, each) for name, each in found.items() if name.startswith("layers.") and each.ndim == 2]
    adamw = [(name, each) for name, each in found.items() if name not in dict(muon)]
    return [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]


class _Backward:
    """What FSDP2 does in backward: the reduce-scatter of each unit on a stream of its own, then .grad and hooks there.

    Read in ``foreach_reduce`` of torch 2.13.
    """

    def __init__(self, found: Found) -> None:
        self._stream: Any = torch.cuda.Stream()
        self._stream.id = "reduce_scatter"
        self._units: dict[str, list[nn.Parameter]] = {}
        for name, tensor in found.items():  # A block is a unit, or the module that holds the parameter.
            self._units.setdefault(".".join(name.split(".")[:2]), []).append(tensor)

    def run(self) -> None:
        """One backward pass; all gradients are zero."""
        default = torch.cuda.current_stream()
        for tensors in reversed(self._units.values()):
            self._stream.wait_stream(default)
            with torch.no_grad(), torch.cuda.stream(self._stream):
                _reduce(tensors)
                reduced = self._stream.record_event()
        default.wait_event(reduced)


def _reduce(tensors: list[Any]) -> None:
    sizes = [tensor.to_local().numel() for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device="cuda")
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        local = part.view(tensor.to_local().shape)
        tensor.grad = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        _call_hooks(tensor)


def _call_hooks(tensor: nn.Parameter) -> None:
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(tensor)


def run_fsdp(
    shapes: Shapes,
    size: int,
    *,
    replicas: int = 1,
    clip: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Simulation, ParallelMuon]:
    """Steps of ParallelMuon on FSDP2 parameters of ``size`` ranks."""
    with world(size) as simulation, Tracker():
        found = _weights(shapes, _mesh_of(size, replicas), dtype=dtype)
        groups = _groups_of(found)
        optimizer = ParallelMuon(groups, **options)
        backward = _Backward(found)
        for step in range(3):
            simulation.begin_step(on=step >= _WARM_UP)
            backward.run()
            if clip:
                clip_norm_(list(found.values()), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return simulation, optimizer


def run_flexdemo(
    shapes: Shapes,
    size: int,
    *,
    replicas: int = 2,
    steps: int = 3,
    completed: bool = True,
    **options: Any,
) -> tuple[Simulation, FlexDeMo]:
    """As :func:`run_fsdp`, of FlexDeMo on ``replicas`` nodes; ``completed`` is what handles say of messages."""
    with world(size) as simulation, Tracker():
        simulation.completed = completed
        mesh = _mesh_of(size, replicas)
        found = _weights(shapes, mesh["shard"])
        groups = _groups_of(found)
        if options.get("base", "muon") != "muon":
            groups = [{"params": group["params"]} for group in groups]
        optimizer = FlexDeMo(groups, mesh=mesh, check_every=0, **options)
        backward = _Backward(found)
        for step in range(steps):
            simulation.begin_step(on=step >= _WARM_UP)
            backward.run()
            optimizer.step()
            optimizer.zero_grad()
        return simulation, optimizer


class _Net(nn.Module):
    """Modules that hold replicated parameters of these shapes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.found: dict[str, nn.Parameter] = {}
        for name, shape in shapes.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            self.found[name] = nn.Parameter(torch.empty(shape, device="cuda"))
            owner.register_parameter(last, self.found[name])


def run_zero2(
    shapes: Shapes, size: int, *, replicas: int = 1, clip: bool = False, sharding: str = "zero2"
) -> tuple[Simulation, ParallelMuon]:
    """As :func:`run_fsdp`, of replicated parameters under ``sharding="zero2"`` or ``"ddp"``."""
    with world(size) as simulation, Tracker(), mock.patch("lightning_muon.sharding.ddp.Ddp.prepare"):
        net = _Net(shapes)
        mode = make_mode(sharding, _mesh_of(size, replicas), ModeOptions())
        mode.prepare(net)
        optimizer = ParallelMuon(_groups_of(net.found))
        mode.attach(net, [optimizer])
        for step in range(3):
            simulation.begin_step(on=step >= _WARM_UP)
            optimizer.zero_grad()
            for tensor in reversed(net.found.values()):
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
