"""CUDA devices and NCCL for one process without a card: fake tensors, and vector clocks as streams and communicators.

Real is all code of the package, DTensor, and the order in which the host queues work. Fake are tensors (FakeTensorMode
on "cuda:0"), ``torch.cuda`` (a stream is a vector clock, an event a copy of one) and ``torch.distributed`` (a clock for
each group, as NCCL has a stream for each communicator). While ``Simulation.on``, it notes

- ``syncs``: the host waits for the device, by what and where;
- ``found``: ``RACE``, two streams touch the same bytes, one of them writes, and no event orders them; ``FREE``, memory
  goes back to the allocator of a stream while another one may still use it.

Numbers that the host reads from the device are zero, a single truth value is True.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, debug
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_muon.compat.torch import new_group
from tests.support.fake_device import Event, Simulation, Stream, active, simulated, site, use

_SOURCE = Path(__file__).with_name("noop_guard.cpp")
_CACHE = Path(__file__).parents[2] / ".cache"


def why_not() -> str:
    """Why fake CUDA tensors cannot be had here; empty if they can."""
    needs_compiler = torch.version.cuda is None and shutil.which("g++") is None
    return "a CPU wheel of torch needs g++ to build a device guard for fake CUDA tensors" if needs_compiler else ""


def allow_fake_cuda() -> None:
    """Load a device guard for CUDA that does nothing. CUDA wheels have a guard; for CPU wheels one is compiled."""
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is not None:
        return
    root = Path(torch.__file__).parent
    library = _CACHE / f"noop_guard-{torch.__version__}.so"
    if not library.exists():
        _CACHE.mkdir(exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(["g++", str(_SOURCE), "-o", str(draft), *options], check=True)
        draft.replace(library)
    ctypes.CDLL(str(library))


# Ops that launch nothing.
_NO_KERNEL = frozenset(
    "view reshape _unsafe_view split split_with_sizes slice t transpose unbind select as_strided detach alias "
    "unsqueeze squeeze expand permute lift_fresh device view_as unflatten tensor_split bucket is_same_size is_pinned "
    "empty empty_strided new_empty empty_like new_empty_strided _local_scalar_dense".split()
)


class Tracker(TorchDispatchMode):
    """Ops on "cuda" run on fake tensors and are watched; tensors of the host (meshes, flags) stay real."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @override
    def __enter__(self) -> Any:
        self._lifts_only_cpu = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifts_only_cpu)
        super().__exit__(*error)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        inputs = list(_tensors((*args, *kwargs.values())))
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if not to_device and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return _on_host(func, args, kwargs)
        is_read, result = _read(func, args, kwargs)
        if not is_read:
            with self._fake:
                result = func(*args, **kwargs)
        self._note(func, args, kwargs, inputs, list(_tensors([result])))
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        simulation, stream = active(), active().current
        name = func._schema.name.split("::")[1].rstrip("_")
        is_kernel = not func._schema.name.startswith("prim") and name not in _NO_KERNEL
        if not is_kernel and "empty" not in name:
            return
        stream.tick()
        label = f"{name} ({site()})"
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        writes = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        written = {id(tensor) for each in writes for tensor in _tensors([named.get(each.name)])}
        for tensor in inputs if is_kernel else ():
            simulation.access(tensor, stream, label, is_write=id(tensor) in written)
        known = set(map(id, inputs))
        for tensor in outputs:
            if id(tensor) not in known:
                simulation.access(tensor, stream, label, is_write=is_kernel)
        simulation.look_for_freed()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """An op that no device knows of; memory is pinned in name only."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    tensor = func(*args, **kwargs | {"pin_memory": False})
    storage = tensor.untyped_storage()
    active().pinned[storage._cdata] = StorageWeakRef(storage)
    return tensor


def _read(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Note where the host waits for the device; what it reads there, if the op is one that reads."""
    name = func._schema.name.split("::")[1].rstrip("_")
    first, second = args[0] if args else None, args[1] if len(args) > 1 else None
    does_not_wait = kwargs.get("non_blocking", False) or (name == "copy" and args[2:] == (True,))
    if name == "_local_scalar_dense":
        active().sync("item")
        return True, True if first.dtype == torch.bool else torch.zeros((), dtype=first.dtype).item()
    if name == "equal":
        active().sync("torch.equal")
        return True, True
    if name == "_to_copy" and kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
        if target.type == "cpu" and first.device.type == "cuda":
            if not does_not_wait:
                active().sync("copy to the host")
            return True, torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        if first.device.type == "cpu" and not (does_not_wait and active().is_pinned(first)):
            active().sync("copy to the device")
    if name == "copy" and first.device != second.device:
        host = first if first.device.type == "cpu" else second
        if not (does_not_wait and active().is_pinned(host)):
            active().sync("copy between host and device")
        return (True, first.zero_()) if host is first else (False, None)
    if name in ("index", "index_put"):
        indices = list(_tensors([args[1]]))
        if any(index.device.type == "cpu" for index in indices):
            active().sync("index of the host")
        if any(index.dtype == torch.bool for index in indices) and not (name == "index_put" and args[2].numel() == 1):
            active().sync("index by truth values")
    return False, None


class _Work:
    """Handle of a communication; NCCL's keeps the tensors until somebody waits for it."""

    def __init__(self, communicator: Stream, tensors: Sequence[Tensor]) -> None:
        self._ended, self._tensors = communicator.record_event(), list(tensors)

    def wait(self, *_: Any) -> bool:
        active().current.wait_event(self._ended)
        self._tensors.clear()
        return True


def _communicate(kind: str, group: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Work:
    simulation = active()
    assert all(tensor.device.type != "cpu" for tensor in (*reads, *writes)), "a tensor of the host on an NCCL group"
    assert all(tensor.is_contiguous() for tensor in (*reads, *writes))
    communicator = simulation.communicator(group)
    communicator.wait_stream(simulation.current)
    communicator.tick()
    label = f"{kind} ({site()})"
    for tensor in reads:
        simulation.access(tensor, communicator, label, is_write=False)
    for tensor in writes:
        simulation.access(tensor, communicator, label, is_write=True)
    return _Work(communicator, [*reads, *writes])


def _all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    *,
    group: Any = None,
    async_op: bool = False,
) -> _Work | None:
    assert (sum(output_split_sizes), sum(input_split_sizes)) == (output.numel(), input.numel())
    return _asynchronous(_communicate("all_to_all", group, [input], [output]), async_op)


def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    if tensor.device.type != "cpu":
        return _asynchronous(_communicate("all_reduce", group, [tensor], [tensor]), async_op)
    # A gloo group: all ranks bring the same.
    if op == dist.ReduceOp.SUM:
        tensor.mul_(dist.get_world_size(group))
    return mock.Mock()


def _asynchronous(work: _Work, async_op: bool) -> _Work | None:
    if not async_op:
        work.wait()
    return work if async_op else None


def _all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
    """All ranks have the same."""
    del group
    found[:] = [value] * len(found)


def _batch_isend_irecv(messages: Sequence[mock.Mock]) -> list[_Work]:
    reads = [message.tensor for message in messages if message.op is dist.isend]
    writes = [message.tensor for message in messages if message.op is dist.irecv]
    return [_communicate("p2p batch", messages[0].group, reads, writes)]


def _message(op: Any, tensor: Tensor, *, group: Any = None, group_peer: int | None = None) -> mock.Mock:
    return mock.Mock(op=op, tensor=tensor, group=group, group_peer=group_peer)


@contextlib.contextmanager
def rank_of(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``, without communication; all others are taken to answer the same.

    What remains is what the host of a rank has to do; all ranks have the same share of it.
    """
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "all_gather_object", _all_gather_object),
            mock.patch("lightning_muon.comm.collectives.world_timeout", timedelta),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def world(size: int) -> Iterator[Simulation]:
    """A default group of ``size`` ranks, as :func:`rank_of`, on fake devices."""
    if dist.is_initialized():
        dist.destroy_process_group()
    debug._clear_sharding_prop_cache()  # Results of operations have meshes of worlds from before.

    def fake_group(ranks: Sequence[int], name: str, **_: Any) -> Any:
        return new_group(ranks, name, backend="fake", timeout=timedelta(seconds=1))

    distributed: Mapping[str, Any] = {
        "all_to_all_single": _all_to_all_single,
        "all_reduce": _all_reduce,
        "batch_isend_irecv": _batch_isend_irecv,
        "P2POp": _message,
    }
    with (
        rank_of(size),
        simulated() as simulation,
        mock.patch.multiple(dist, **distributed),
        mock.patch.multiple(torch.cuda, **_cuda(simulation)),
        mock.patch.multiple(FakeTensor, create=True, record_stream=_record_stream, tolist=_tolist, data_ptr=_data_ptr),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _storage_pointer),
        mock.patch("lightning_muon.comm.collectives.new_group", fake_group),
        # What a graph would launch, one by one.
        mock.patch("lightning_muon.optim.matrix_step.can_record", return_value=False),
    ):
        yield simulation


def _tolist(tensor: Tensor) -> Any:
    active().sync("tolist")
    return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


_pointer_of = torch.UntypedStorage.data_ptr


def _storage_pointer(storage: torch.UntypedStorage) -> int:
    """Tells storages apart that have no memory."""
    return storage._cdata if storage.device.type in ("cuda", "meta") else _pointer_of(storage)


def _data_ptr(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    active().record_stream(tensor, stream)


def _cuda(simulation: Simulation) -> dict[str, Any]:
    """What takes the place of functions and classes of ``torch.cuda``."""
    return {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": Event,
        "stream": use,
        "current_stream": lambda device=None: simulation.current,
        "synchronize": lambda device=None: simulation.sync("torch.cuda.synchronize"),
        "is_bf16_supported": lambda **_: True,
    }
