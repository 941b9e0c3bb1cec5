"""``sharding="ddp"``: whole weights on every rank, and sums of gradients that start while backward still runs.

Hooks count the gradients that have been accumulated. A bucket is launched when all of its gradients are there and all
buckets before it have been launched, so that the order is the same on all ranks. :meth:`GradientReducer.finish` does
the rest: the ranks tell each other what they have launched and which gradients they have, and all send what any rank
has. So gradients are exact for parameters that only some ranks use, that are used again after their bucket was sent, or
that are frozen between two steps.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from threading import RLock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.agreement import Message, maxima_over
from lightning_muon.comm.collectives import (
    AxisGroup,
    axis_group,
    host_group,
    make_buckets,
    own_group,
    start_all_reduce_sum,
)
from lightning_muon.compat.torch import profiled, version, watch_gradients
from lightning_muon.params.layout import Layout
from lightning_muon.sharding.base import ShardingMode, attach_optimizers, broadcast_initial_state, names_of
from lightning_muon.sharding.shard_model import agree_on_units

# As in torch's DistributedDataParallel (bucket_cap_mb=25).
BUCKET_BYTES = 25 * 2**20

Parameters = tuple[Tensor, ...]


class GradientBucket(ABC):
    """Parameters of one dtype and device whose gradients are summed over the ranks together; used again in each step.

    The order of calls is :meth:`reduce`, :meth:`advance` until it returns ``True``, and :meth:`gradients`.
    """

    kind: ClassVar[str]  # What profilers show.

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    @abstractmethod
    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        """Begin the sum of one gradient for each parameter; ``None`` counts as zeros. Keeps no reference to them.

        Collective over the ranks of the bucket, in the same order.
        """

    def advance(self, *, wait: bool = False) -> bool:
        """Start what follows once a first communication has arrived (with ``wait``, wait); return whether all is on.

        Collective as :meth:`reduce` is.
        """
        del wait
        return True

    @abstractmethod
    def gradients(self, divisor: float) -> list[Tensor]:
        """The sums divided by ``divisor``, or the calling rank's parts of them. Local; on CUDA the stream waits."""


def flat_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """The flattened gradient, dense and in the dtype of the parameter; ``None`` stands for zeros."""
    if gradient is None:
        return torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.numel())
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return dense.detach().to(parameter.dtype).reshape(-1)


class AllReducedBucket(GradientBucket):
    """One all-reduce over ``group``; the sums are views of its buffer."""

    kind = "all_reduce"

    def __init__(self, parameters: Parameters, group: AxisGroup) -> None:
        super().__init__(parameters)
        self._group = group

    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """What travels of the gradients, one flat tensor. Local."""
        return torch.cat(list(map(flat_gradient, self.parameters, gradients)))

    @override
    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        self._buffer = self.pack(gradients)
        self._work = None if self._group.group is None else start_all_reduce_sum(self._buffer, self._group)

    @override
    def gradients(self, divisor: float) -> list[Tensor]:
        if self._work is not None:
            self._work.wait()
        if divisor != 1:
            self._buffer.div_(divisor)
        parts = self._buffer.split([parameter.numel() for parameter in self.parameters])
        del self._buffer, self._work  # The memory is freed with the gradients.
        return [part.view(parameter.shape) for parameter, part in zip(self.parameters, parts, strict=True)]


class Results:
    """Tracks which ``p.grad`` are reduced gradients, to which backward adds in place. Local."""

    def __init__(self) -> None:
        # Weak, so that zero_grad frees the memory.
        self._kept: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """Make ``gradient``, a result, that of the parameter."""
        parameter.grad = gradient
        self._kept[parameter] = weakref.ref(gradient), version(gradient)

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, to which backward may have added."""
        kept = self._kept.get(parameter)
        return kept is not None and parameter.grad is not None and kept[0]() is parameter.grad

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a result, with nothing added or changed since."""
        gradient = parameter.grad
        return gradient is not None and self.holds(parameter) and self._kept[parameter][1] == version(gradient)


@dataclass(kw_only=True)
class _Facts(Message):
    """What a rank knows at the end of a step; the maxima over the ranks are what any of them knows."""

    num_launched: int  # Buckets that were launched.
    resends: int  # Whether a sum over the ranks is sent again.
    # For each parameter whether there is:
    computed: list[int]  # A gradient, sent or not.
    left_over: list[int]  # A gradient that hooks do not send with its bucket: it came later, or was not expected.


class GradientReducer:
    """Sums the gradients of replicated parameters over ``group``, all data-parallel ranks.

    Parameters are plain tensors in the order of the modules, frozen ones too; ``make_bucket`` says how some of them are
    summed; ``results`` are the sums that are in ``p.grad``. Collective over ``group`` to construct.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        make_bucket: Callable[[Parameters], GradientBucket],
        group: AxisGroup,
        *,
        results: Results,
        bucket_bytes: int,
    ) -> None:
        self._parameters = [p for p in dict.fromkeys(parameters) if p.is_floating_point() or p.is_complex()]
        self._make_bucket, self._group, self._results = make_bucket, group, results
        self._host = host_group(group)
        # In the order of launches, which is that of backward: the reverse of that of the modules.
        self.buckets = make_buckets(self._parameters, bucket_bytes)
        self._bucket_of = {parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket}
        # What was sent together before, so that the connections for it are open.
        self._known: dict[Parameters, GradientBucket] = {}
        # How often backward adds to each gradient: in the last step, and in this one so far.
        self._calls_before, self._calls = Counter[Tensor](), Counter[Tensor]()
        self._is_syncing = True
        # The parameters that hooks wait for and send: those with a gradient on any rank in the last step.
        trainable = maxima_over(self._host, [parameter.requires_grad for parameter in self._parameters])
        self._expected = {p for p, is_trainable in zip(self._parameters, trainable, strict=True) if is_trainable}
        # Backward runs one thread for each device.
        self._lock = RLock()
        self._begin_step()
        self.close = watch_gradients(self, self._parameters, GradientReducer._arrived)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward adds to ``p.grad`` and nothing is sent. Local."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Launch the buckets that are complete after this gradient was accumulated, in their order."""
        self.is_unfinished = True
        if not self._is_syncing:
            return
        with self._lock:
            self._advance()
            self._calls[parameter] += 1
            missing = self._missing[self._bucket_of[parameter]]
            if self._calls[parameter] != max(1, self._calls_before[parameter]) or parameter not in missing:
                return
            missing.remove(parameter)
            while self._num_launched < len(self.buckets) and not self._missing[self._num_launched]:
                # NCCL opens connections when a message of that kind and size is sent for the first time, and then keeps
                # the host waiting for all ranks, of which one may lack a gradient: so the first time is in finish().
                members = self._members(self._num_launched, self._expected)
                if members and members not in self._known:
                    return
                self._launch(self._num_launched, self._expected)
                self._num_launched += 1

    @torch.no_grad()
    def finish(self, divisor: float) -> dict[Tensor, Tensor]:
        """Send what hooks have not sent; return the sum / ``divisor``, or this rank's part, of what any rank has.

        Collective over the group and those of the buckets after the last backward pass of a step, also one that had
        none. Calling it again changes nothing.
        """
        agreed = self._agree()
        # The mean over the ranks of a gradient that is equal on all ranks is the same; other factors would change it.
        if agreed.resends and divisor != self._group.size:
            raise ValueError(
                f"gradients that are sums over {self._group.size} ranks would be summed and divided by {divisor} "
                "once more, with what another backward pass has added. Call zero_grad(set_to_none=True) between two "
                "synchronizing passes, or run all but the last pass inside no_sync()."
            )
        computed, left_over = (set(compress(self._parameters, own)) for own in (agreed.computed, agreed.left_over))
        for index in range(self._num_launched, len(self.buckets)):
            self._launch(index, self._expected if index < agreed.num_launched else computed)
        for index in range(agreed.num_launched):
            self._launch(index, left_over, is_left_over=True)
        sums = self._sums_of(computed, divisor)
        self._expected = computed or self._expected
        self._begin_step()
        return sums

    def _sums_of(self, present: Collection[Tensor], divisor: float) -> dict[Tensor, Tensor]:
        """The divided sums of what was launched of ``present``. Collective over the groups of the buckets."""
        for bucket in self._launched:
            bucket.advance(wait=True)
        sums: dict[Tensor, Tensor] = {}
        for bucket in self._launched:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients(divisor), strict=True):
                if parameter in present:
                    sums[parameter] = sums[parameter].add_(gradient) if parameter in sums else gradient
        return sums

    def _begin_step(self) -> None:
        self._launched: list[GradientBucket] = []
        self._num_advanced = 0
        self._sent: set[Tensor] = set()
        self._num_launched = 0
        self._resends = False
        self.is_unfinished = False  # Whether backward has added to gradients since.
        self._missing = [self._expected.intersection(bucket) for bucket in self.buckets]
        self._calls_before, self._calls = self._calls, Counter()

    def _members(self, index: int, chosen: Collection[Tensor]) -> Parameters:
        return tuple(parameter for parameter in self.buckets[index] if parameter in chosen)

    def _launch(self, index: int, chosen: Collection[Tensor], *, is_left_over: bool = False) -> None:
        """Send the gradients of a bucket's parameters that are in ``chosen``; the same on all ranks."""
        members = self._members(index, chosen)
        if not members:
            return
        gradients = [parameter.grad for parameter in members]
        for parameter, gradient in zip(members, gradients, strict=True):
            self._resends |= self._results.holds(parameter)
            # What backward adds later must be kept apart from what is sent.
            parameter.grad = None
            if gradient is not None:
                self._sent.add(parameter)
        # The same parameters may be on their way already: what is left over has a bucket of its own.
        bucket = self._make_bucket(members) if is_left_over or members not in self._known else self._known[members]
        if not is_left_over:
            self._known[members] = bucket
        with profiled(bucket.kind, f"parameters.{index}"):
            bucket.reduce(gradients)
        self._launched.append(bucket)
        self._advance()

    def _advance(self) -> None:
        """Continue sums that have arrived, so that their buffers are free again."""
        while self._num_advanced < len(self._launched) and self._launched[self._num_advanced].advance():
            # In order: the communications that follow must have the same order on all ranks, too.
            self._num_advanced += 1

    def _agree(self) -> _Facts:
        """Tell all ranks what this rank has launched and which gradients it has. Collective over the group."""
        results = self._results
        has = {
            parameter
            for parameter in self._parameters
            if parameter.grad is not None and parameter.requires_grad and not results.is_untouched(parameter)
        }
        own = _Facts(
            num_launched=self._num_launched,
            resends=self._resends or any(map(results.holds, has)),
            computed=[parameter in has or parameter in self._sent for parameter in self._parameters],
            left_over=[
                parameter in has
                and (self._bucket_of[parameter] < self._num_launched or parameter not in self._expected)
                for parameter in self._parameters
            ],
        )
        with profiled("agree", "parameters"):
            return own.unpack(maxima_over(self._host, own.pack()))


class Ddp(ShardingMode):
    """Whole weights on every rank; a reducer sums gradients while backward runs."""

    name = "ddp"
    shards_weights = False
    takes = frozenset({"bucket_bytes"})
    bucket: ClassVar[type[AllReducedBucket]] = AllReducedBucket
    _reducer: GradientReducer | None = None

    @cached_property
    def _everyone(self) -> AxisGroup:
        return axis_group(self.mesh, tuple(range(self.mesh.ndim)))

    @override
    def prepare(self, module: nn.Module) -> None:
        def check() -> list[nn.Module]:
            for name, parameter in names_of(module).items():
                if isinstance(parameter, DTensor):
                    raise ValueError(
                        f"{name} {tuple(parameter.shape)} is a DTensor already, but sharding={self.name!r} keeps whole "
                        "plain weights on every rank. If an earlier fit has sharded this module, make it anew, or load "
                        "full_state_dict into a new one; else remove fully_shard and parallelize_module from "
                        "configure_model, or use sharding='fsdp'"
                    )
                if parameter.is_meta:
                    raise ValueError(f"{name} {tuple(parameter.shape)} is on the meta device; materialize it first")
            return []

        agree_on_units(module, check, [self._everyone])
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        broadcast_initial_state(module, self.mesh)

    def reduce_by(self, make_bucket: Callable[[Parameters], GradientBucket], module: nn.Module) -> GradientReducer:
        """Reduce the gradients of the module's parameters in such buckets from now on. Collective over the mesh."""
        chosen = self.options.bucket_bytes
        bucket_bytes = BUCKET_BYTES if chosen == "auto" else chosen
        parameters, self._results = list(names_of(module).values()), Results()
        self._reducer = GradientReducer(
            parameters, make_bucket, self._everyone, results=self._results, bucket_bytes=bucket_bytes
        )
        return self._reducer

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        group = own_group(self._everyone)
        self.reduce_by(lambda parameters: self.bucket(parameters, group), module)
        self.layout = Layout(self.mesh)
        self.layout.has_sums = self.has_sums
        attach_optimizers(module, optimizers, self.layout)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        return self.attached(self._reducer).no_sync()

    @override
    def finish_gradients(self) -> None:
        reducer = self.attached(self._reducer)
        self.require_no_failure()
        self.keep(reducer.finish(self._divisor or self.mesh.size()))

    def has_sums(self) -> bool:
        """Whether all gradients are sums over the ranks; local."""
        return self._reducer is None or not self._reducer.is_unfinished

    def keep(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Make sums of gradients available to clipping and optimizers. Local."""
        for parameter, gradient in sums.items():
            self._results.keep(parameter, gradient)

    @override
    def close(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
