"""Private names of torch 2.11 to 2.14 that the package uses, and a defect of gloo; tests/unit/compat watches them."""

from __future__ import annotations

import atexit
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import cache
from itertools import compress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _composable_state
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _metadata_fn
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy, cls_to_fsdp_cls
from torch.distributed.tensor import DTensor, Placement, _utils
from torch.profiler import record_function


def cpu_multiplies_bfloat16_fast() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def default_store() -> dist.Store:
    """Key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def world_timeout() -> timedelta:
    """How long the collectives of the default group wait, which torch tells no other group."""
    world: Any = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give ``group`` the timeout of the default group; local."""
    set_timeout = (
        getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    )  # Public since torch 2.14.
    set_timeout(world_timeout(), group)


def new_group(ranks: Sequence[int], name: str, *, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of the sorted global ``ranks`` with this ``name``, which must be new in the default group.

    Collective over ``ranks``; nobody else may call it.

    ``dist.new_group`` would do either of two things that hang. With ``use_local_synchronization`` its name counts the
    groups that this process belongs to; without, the groups that it has heard of. So ranks that belong to different
    numbers of groups wait for each other under different names. And where the default group is bound to a device
    (``device_id``), it splits the communicator of the world, in which all ranks of the world must take part, however
    few there are in the group. So the default group looks unbound while this runs: NCCL makes a communicator of the
    members alone, at once if the default group is bound.
    """
    c10d, world = dist.distributed_c10d, dist.group.WORLD
    assert world is not None
    _, store = c10d._world.pg_map[world]
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            name,
            timeout=timeout,
            device_id=None if backend == "gloo" else device,
            group_desc=name,
        )
    finally:
        world.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process belongs to."""
    return list(dist.distributed_c10d._world.pg_map)


def group_awaited_in(frame: FrameType) -> dist.ProcessGroup | None:
    """The process group in which a function of torch waits, by its variables; ``None`` if they have none. Local."""
    known = frame.f_locals
    group: Any = None
    if "group" in known or "pg" in known:
        group = known.get("group") or known.get("pg") or dist.group.WORLD
    elif isinstance(mesh := known.get("device_mesh"), DeviceMesh) and isinstance(axis := known.get("i"), int):
        group = mesh.get_group(axis)  # A DTensor is redistributed.
    return group if isinstance(group, dist.ProcessGroup) else None


def abort_device_groups() -> None:
    """Abort the communication on devices, so that nothing waits for it; gloo knows no such thing. Local."""
    for group in process_groups():
        if dist.get_backend(group) != "gloo":
            with suppress(RuntimeError):  # Some backends have no abort.
                group.abort()


def collective_counts() -> dict[str, int]:
    """Name of each process group of this process that counts -> how many collectives it has launched there."""
    counts: dict[str, int] = {}
    for group in process_groups():
        try:
            counted: Any = group
            counts[group.group_name] = int(counted._get_sequence_number_for_group())
        except RuntimeError:
            continue
    return counts


@cache
def let_gloo_finish_at_exit() -> None:
    """Give gloo's threads the interpreter lock once more before it goes; call it before the first collective.

    A thread that has finished a collective drops its handle a moment after the waiting rank is told. If that is the
    last reference it must take the interpreter lock, and while the interpreter exits that ends the process by SIGABRT
    (seen in one exit of two with torch 2.13, four ranks on two cores; in none of 16 with this).
    """
    atexit.register(time.sleep, 0.1)


_NO_RANGE = nullcontext()


def profiled(kind: str, key: object) -> AbstractContextManager[object]:
    """Context that is the range ``lightning_muon::kind[key]`` in the traces of a profiler of torch, if one runs.

    Without one it takes 0.2 us, where ``record_function`` takes 8 us.
    """
    is_profiling = torch.autograd.profiler._is_profiler_enabled
    return record_function(f"lightning_muon::{kind}[{key}]") if is_profiling else _NO_RANGE


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, as hooks and recomputed forward passes do."""
    return torch._C._current_graph_task_id() != -1


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` has made this module."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def version(tensor: torch.Tensor) -> int:
    """Number of changes in place of a tensor and of all that share its memory through views."""
    return tensor._version


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of whose memory autograd knows this one to be a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def local_shape_and_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of the shard at any mesh ``coordinate``, not only at the calling rank's."""
    # torch computes with tensors on the default device.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        local_shape, offset = _utils._compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh_shape), list(coordinate), tuple(placements)
        )
    return tuple(local_shape), tuple(offset)


# FSDP2. A unit is a module with a state, whose parameters are in groups.


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    return _groups_of(unit._get_fsdp_state())


def make_shardable(cls: type[torch.nn.Module]) -> None:
    """Make the class that FSDP2 gives to modules of a ``Generic`` class, of which torch's may have another layout."""
    if Generic not in cls.__mro__ or issubclass(cls, FSDPModule) or cls in cls_to_fsdp_cls:
        return

    class Meta(type(cls)):
        def mro(self) -> list[type]:
            return [self, FSDPModule, *(base for base in super().mro() if base not in (self, FSDPModule))]

    cls_to_fsdp_cls[cls] = Meta(f"FSDP{cls.__name__}", (cls, FSDPModule), {"__deepcopy__": _unimplemented_deepcopy})


def init_fsdp_root(root: FSDPModule) -> None:
    """Make ``root`` the root of the FSDP2 units inside it, as its first forward would; a no-op if it is one."""
    root._get_fsdp_state()._lazy_init()


def forward_resharding(unit: FSDPModule) -> list[Any]:
    """Over which meshes the weights of an FSDP2 unit are resharded after its forward, ``None`` for those kept whole."""
    return [group.post_forward_mesh_info for group in _parameter_groups(unit)]


def set_forward_resharding(unit: FSDPModule, meshes: Sequence[Any]) -> None:
    """Set what :func:`forward_resharding` has returned; ``set_reshard_after_forward`` forgets over how many ranks."""
    for group, mesh in zip(_parameter_groups(unit), meshes, strict=True):
        group.post_forward_mesh_info = mesh


def shards_over_one_rank(unit: FSDPModule) -> bool:
    """Whether the weights of an FSDP2 unit are cut over an axis of size 1, so that nothing is gathered."""
    return any(getattr(group.mesh_info, "shard_mesh_size", 1) == 1 for group in _parameter_groups(unit))


@torch.no_grad()
def overwritten_weights(unit: FSDPModule) -> list[str]:
    """Names of the gathered weights of an FSDP2 unit that differ from the shard of this rank, their origin; local."""
    names: list[str] = []
    differ: list[torch.Tensor] = []
    for group in _parameter_groups(unit):
        size, rank = getattr(group.mesh_info, "shard_mesh_size", 1), getattr(group.mesh_info, "shard_mesh_rank", 0)
        for held in group.fsdp_params:
            if held.sharded_state.name != "UNSHARDED":
                continue
            whole, shard = (
                each.to_local() if isinstance(each, DTensor) else each
                for each in (held._unsharded_param, held.sharded_param)
            )
            parts = whole.chunk(size, held.fsdp_placement.dim)
            if rank < len(parts) and shard.numel():
                part, origin = parts[rank], shard.to(whole.device, whole.dtype)
                names.append(held._param_fqn or held._module_info.param_name)
                differ.append(((part != origin) & ((part == part) | (origin == origin))).any())  # NaN is equal to none.
    return list(compress(names, torch.stack(differ).tolist())) if differ else []


@torch.no_grad()
def drop_unreduced_gradients(unit: FSDPModule, parameters: Collection[torch.Tensor] | None = None) -> None:
    """Drop what backward passes without reduction have left for those of ``parameters``, or all, of an FSDP2 unit."""
    wanted = None if parameters is None else set(parameters)
    for group in _parameter_groups(unit):
        dropped = [held for held in group.fsdp_params if wanted is None or held.sharded_param in wanted]
        trained = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        stays = [held for held in trained if held not in dropped]
        for held in dropped:
            if hasattr(held, "_unsharded_param"):  # Made by the first all-gather.
                held._unsharded_param.grad = None
            # All sums of a unit must have the dtype of the reduction, which zeros keep beside others that stay.
            if not stays:
                held.unsharded_accumulated_grad = None
            elif held.unsharded_accumulated_grad is not None:
                held.unsharded_accumulated_grad.zero_()
        if not stays:
            group._partial_reduce_output = None
        elif dropped and group._partial_reduce_output is not None:
            if group._post_reduce_event is not None:
                group.device_handle.current_stream().wait_event(group._post_reduce_event)
            sizes = [held.padded_sharded_param_size.numel() for held in trained]
            for held, part in zip(trained, group._partial_reduce_output.split(sizes), strict=True):
                if held in dropped:
                    part.zero_()


def rounds_sums_of_shards(unit: FSDPModule) -> bool:
    """Whether an FSDP2 unit would add up micro-batches in a dtype with fewer digits than that of the reduction; local.

    With replicas it keeps that of the reduction until their sum.
    """
    groups = [group for group in _parameter_groups(unit) if not hasattr(group.mesh_info, "replicate_mesh_size")]
    dtypes = [(group._reduce_dtype, group._orig_dtype) for group in groups if group._reduce_dtype and group._orig_dtype]
    return any(torch.finfo(reduced).eps < torch.finfo(own).eps for reduced, own in dtypes)


def complete_accumulated(unit: FSDPModule) -> None:
    """Give zeros to weights that micro-batches have not used, beside others with accumulated gradients; local.

    FSDP2 reduces gradients of one dtype together, and a first gradient, or its zeros, have that of the weights.
    """
    for group in _parameter_groups(unit):
        trained = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        sums = [held.unsharded_accumulated_grad for held in trained]
        dtype = next((each.dtype for each in sums if each is not None), None)
        for held, accumulated in zip(trained, sums, strict=True):
            if dtype is not None and accumulated is None and held._unsharded_param.dtype != dtype:
                held.unsharded_accumulated_grad = torch.zeros_like(held._unsharded_param, dtype=dtype)


def has_partial_sums(unit: FSDPModule) -> bool:
    """Whether an FSDP2 unit has gradients that are summed over the shard axis, and not over the replicas; local."""
    return any(group._partial_reduce_output is not None for group in _parameter_groups(unit))


def drop_unreduced_gradients_of(parameters: Collection[torch.Tensor]) -> None:
    """:func:`drop_unreduced_gradients` of every FSDP2 unit."""
    for module in list(_composable_state._module_state_mapping):
        if isinstance(module, FSDPModule):
            drop_unreduced_gradients(module, parameters)


def free_unsharded(module: torch.nn.Module) -> None:
    """Free whole weights that FSDP2 keeps after a forward for a backward pass that never comes; local."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def fsdp_units_of(parameters: Collection[torch.Tensor]) -> list[FSDPModule]:
    """One FSDP2 unit of each model that holds any of ``parameters``, whoever has sharded it; local."""
    wanted, found = set(parameters), {}
    for module in list(_composable_state._module_state_mapping):
        if isinstance(module, FSDPModule) and any(
            held.sharded_param in wanted for group in _parameter_groups(module) for held in group.fsdp_params
        ):
            found.setdefault(id(module._get_fsdp_state()._state_ctx), module)
    return list(found.values())


def has_unfinished_forward(unit: FSDPModule) -> bool:
    """Whether the outermost FSDP2 forward pass that runs, or that an exception has ended, is that of this unit."""
    state = unit._get_fsdp_state()
    return state._state_ctx.iter_forward_root is state


def forget_forward(unit: FSDPModule) -> None:
    """End a pass that :func:`has_unfinished_forward`; FSDP2 would take the next one for a part of it. Local."""
    unit._get_fsdp_state()._state_ctx.iter_forward_root = None


def has_unfinished_backward(unit: FSDPModule) -> bool:
    """Whether a backward pass through the root of an FSDP2 unit has begun and not ended; FSDP2 then begins no other."""
    return unit._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def reset_fsdp(root: FSDPModule) -> None:
    """Bring FSDP2 back to where it is between two steps, after an exception in a pass; gradients stay. Local."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        reset_fsdp_by_hand(root)


def reset_fsdp_by_hand(root: FSDPModule) -> None:
    """See :func:`reset_fsdp`; for torch before 2.13."""
    state = root._get_fsdp_state()
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)
    context = state._state_ctx
    communication: Any = state._comm_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for each in context.all_states:
        each._training_state = type(each._training_state).IDLE
        each._modules_to_run_forward.clear()
    for group in [group for each in context.all_states for group in _groups_of(each)]:
        result = group._all_gather_result
        if result is not None and isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def forget_workers(loader: Any) -> None:
    """Let the next pass of a loader start its workers anew, if they are persistent, with data that know of no state."""
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None


# What the index of a checkpoint is made of, beside dtypes.
_IN_INDEX = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), (FileSystemReader.__module__, "_StorageInfo")),
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if (module, name) not in _IN_INDEX:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no index of torch and may run code")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """Reads shards, but unpickles nothing that could run code; of other values ``weights_only=False`` allows it."""

    def __init__(self, path: Path, *, weights_only: bool | None = None) -> None:
        super().__init__(path)
        self._is_trusted = weights_only is False

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The index of the directory; local."""
        path = Path(self.path, _metadata_fn)
        with path.open("rb") as file:
            try:
                index = _IndexUnpickler(file).load()
            except Exception as problem:  # Of any kind, where bytes have changed.
                raise pickle.UnpicklingError(f"{path} is not read: {problem}") from None
        index.storage_meta = index.storage_meta or metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read what this rank needs; local."""
        return super().read_data(plan, planner if self._is_trusted else _PlainValues(planner))  # type: ignore[arg-type]


class _PlainValues:
    """A planner that refuses values that ``torch.load(weights_only=True)`` refuses: torch's unpickles all of them."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: Any, value: Any) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            value.seek(0)
            names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(value))
            raise pickle.UnpicklingError(
                f"{item.storage_index.fqn} has objects ({names}) that torch.load(weights_only=True) refuses; if you "
                "trust whoever wrote it, load it with weights_only=False (convert: --trust-pickle), or allow them with "
                "torch.serialization.add_safe_globals"
            ) from None
        value.seek(0)
        self._planner.load_bytes(item, value)


def load_whole(directory: Path, *, with_optimizers: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
    """What the shards in a checkpoint directory hold, with whole tensors on the CPU, in one process. Local."""
    reader, state = CheckpointReader(directory, weights_only=weights_only), dict[str, Any]()
    places = [place[:2] for place in (reader.read_metadata().planner_data or {}).values()]
    optimizers = {first for first, *second in places if second == ["param_groups"]}
    keys = {first for first, *_ in places if with_optimizers or first not in optimizers}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(keys=keys), no_dist=True)
    return state


def _gathered(root: FSDPModule) -> Iterator[tuple[Any, Tensor]]:
    """FSDP2's record of each weight of a root that was gathered before, and the whole weight."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(state):
            for held in group.fsdp_params:
                whole = getattr(held, "_unsharded_param", None)  # Made by the first all-gather.
                if whole is None:
                    continue
                # Zeros of torch 2.11 are one element, expanded, which cannot be changed in place.
                if whole.grad is not None:
                    whole.grad = whole.grad.contiguous()
                if held.unsharded_accumulated_grad is not None:
                    held.unsharded_accumulated_grad = held.unsharded_accumulated_grad.contiguous()
                yield held, whole


def unreduced_gradients(root: FSDPModule) -> list[Tensor]:
    """Gradients that backward passes without reduction have left for the whole weights of an FSDP2 root."""
    both = [(held.unsharded_accumulated_grad, whole.grad) for held, whole in _gathered(root)]
    return [gradient for pair in both for gradient in pair if gradient is not None]


@torch.no_grad()
def accumulate_gradients(root: FSDPModule) -> None:
    """Add the gradients of whole weights to sums in the dtype in which they are reduced; local.

    FSDP2 does so behind a backward pass that reaches the inputs of its modules: not behind that of the weights alone.
    """
    for held, _ in _gathered(root):
        held.accumulate_unsharded_grad_if_needed()
        held.to_accumulated_grad_if_needed()


@torch.no_grad()
def start_reducing(root: FSDPModule) -> None:
    """Begin to reduce what backward passes without reduction have summed in an FSDP2 root; free its whole weights.

    Collective over its mesh. After a backward in two parts nothing else would do it: FSDP2 reduces in hooks of the
    inputs' gradients, before there are gradients of the weights.
    """
    root.set_is_last_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_reshard_after_backward(True)
    for each in root._get_fsdp_state()._state_ctx.all_states:
        for group in _groups_of(each):
            group.post_backward()


def finish_reducing(root: FSDPModule) -> None:
    """Let the current stream wait for it, and whoever is given the gradients with it; local."""
    root._get_fsdp_state()._root_post_backward_final_callback()


Owner = TypeVar("Owner")
WhenCompiled = Literal["trace", "call", "nothing"]


class ModuleHook:
    """Calls ``action`` with the arguments of a module's hook; does nothing in a copied model.

    ``when_compiled`` says what a compiled forward does: trace ``action`` like the rest (``"trace"``), call it outside
    of the graph (``"call"``), or leave it out (``"nothing"``).
    """

    def __init__(self, action: Callable[..., object] | None = None, when_compiled: WhenCompiled = "trace") -> None:
        self._action, self._when_compiled = action, when_compiled

    def __call__(self, *args: Any) -> None:  # noqa: D102
        if self._action is None:
            return
        if self._when_compiled == "trace" or not torch.compiler.is_compiling():
            self._action(*args)
        elif self._when_compiled == "call":
            _outside_of_graph(self._action, *args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


@torch.compiler.disable
def _outside_of_graph(action: Callable[..., object], *args: Any) -> None:
    action(*args)


def watch_gradients(
    owner: Owner, parameters: Iterable[Tensor], arrived: Callable[[Owner, Tensor], None]
) -> Callable[[], object]:
    """Call ``arrived(owner, parameter)`` whenever backward has added to ``parameter.grad``; return what stops it.

    Local. The hooks are removed when their owner is garbage-collected. Frozen parameters are watched, too.
    """
    # Python's garbage collector does not look into the hooks of tensors.
    reference = weakref.ref(owner)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            arrived(alive, parameter)

    hooks = ExitStack()
    for parameter in parameters:
        # Torch refuses hooks on frozen parameters.
        is_trainable = parameter.requires_grad
        hooks.enter_context(parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook))
        parameter.requires_grad_(is_trainable)
    return weakref.finalize(owner, hooks.close)
