"""Steps of the optimizers on fake CUDA devices: weights as ``fully_shard`` leaves them, backward as FSDP2 runs it.

Syncs and races are those of all steps but the first two.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon import FlexDeMo, ModeOptions, ParallelMuon, make_mode
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.sharding.clipping import clip_norm_
from tests.support.fake_cuda import Tracker, world
from tests.support.fake_device import Simulation

Found = Mapping[str, nn.Parameter]
# Steps before the one that is watched: the first makes the plan and the buffers.
_WARM_UP = 2


_LAYER = {"q": (64, 64), "up": (192, 64), "down": (64, 192), "norm": (64,)}
# Parameters of the model, by name.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (256, 64),
    **{f"layers.{index}.{part}.weight": shape for index in range(3) for part, shape in _LAYER.items()},
    "head.weight": (256, 64),
}


def sharded(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], *, dtype: torch.dtype, device: str
) -> DTensor:
    """The part of the first rank; on "meta" without memory."""
    local_shape, _ = local_shape_and_offset(shape, tuple(mesh.shape), [0] * mesh.ndim, placements)
    local, stride = torch.empty(local_shape, dtype=dtype, device=device), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _mesh_of(size: int, replicas: int) -> DeviceMesh:
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    return init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _weights(mesh: DeviceMesh, *, dtype: torch.dtype = torch.float32) -> Found:
    """The parameters, their rows sharded over the last axis of the mesh."""
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    made = {name: sharded(shape, mesh, placements, dtype=dtype, device="cuda") for name, shape in SHAPES.items()}
    return {name: nn.Parameter(each) for name, each in made.items()}


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


def _watch(
    simulation: Simulation, optimizer: Any, backward: Callable[[], None], *, clip: Any = None, steps: int = 3
) -> Simulation:
    """Steps, of which all but the first two are watched."""
    for step in range(steps):
        simulation.begin_step(on=step >= _WARM_UP)
        optimizer.zero_grad()
        backward()
        if clip is not None:
            clip()
        optimizer.step()
    return simulation


def run_fsdp(
    size: int, *, replicas: int = 1, clip: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> Simulation:
    """Steps of ParallelMuon on FSDP2 parameters of ``size`` ranks."""
    with world(size) as simulation, Tracker():
        found = _weights(_mesh_of(size, replicas), dtype=dtype)
        optimizer = ParallelMuon(_groups_of(found), **options)
        clipping = partial(clip_norm_, list(found.values()), 1.0) if clip else None
        return _watch(simulation, optimizer, _Backward(found).run, clip=clipping)


def run_flexdemo(size: int, *, replicas: int = 2, steps: int = 3, **options: Any) -> Simulation:
    """As :func:`run_fsdp`, of FlexDeMo on ``replicas`` nodes."""
    with world(size) as simulation, Tracker():
        mesh = _mesh_of(size, replicas)
        found = _weights(mesh["shard"])
        groups = _groups_of(found)
        if options.get("base", "muon") != "muon":
            groups = [{"params": group["params"]} for group in groups]
        optimizer = FlexDeMo(groups, mesh=mesh, check_every=0, **options)
        return _watch(simulation, optimizer, _Backward(found).run, steps=steps)


def run_zero2(size: int, *, replicas: int, sharding: str) -> Simulation:
    """As :func:`run_fsdp`, of replicated parameters under ``sharding="zero2"`` or ``"ddp"``, clipped."""
    with world(size) as simulation, Tracker(), mock.patch("lightning_muon.sharding.ddp.Ddp.prepare"):
        net = nn.Module()
        found = {name: nn.Parameter(torch.empty(shape, device="cuda")) for name, shape in SHAPES.items()}
        for name, parameter in found.items():
            net.register_parameter(name.replace(".", "_"), parameter)
        mode = make_mode(sharding, _mesh_of(size, replicas), ModeOptions())
        mode.prepare(net)
        optimizer = ParallelMuon(_groups_of(found))
        mode.attach(net, [optimizer])

        def backward() -> None:
            for tensor in reversed(found.values()):
                with torch.no_grad():
                    tensor.grad = torch.zeros_like(tensor)
                _call_hooks(tensor)
            mode.finish_gradients()

        _watch(simulation, optimizer, backward, clip=partial(mode.clip_grad_norm_, optimizer, 1.0))
        mode.finish_parameters()
        return simulation
