"""Sums of gradients over the ranks that start while backward still runs.

Hooks count the gradients that have been accumulated. A bucket is launched when all of its gradients are there and all
buckets before it have been launched, so that the order is the same on all ranks. :meth:`GradientReducer.finish` does
the rest: the ranks tell each other what they have launched and which gradients they have, and all send what any rank
has. So gradients are exact for parameters that only some ranks use, that are used again after their bucket was sent, or
that are frozen between two steps.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import compress
from threading import RLock
from typing import TypeVar

import torch
from torch import Tensor

from lightning_muon.comm.agreement import Message, maxima_over, require_equal
from lightning_muon.comm.groups import AxisGroup, host_group
from lightning_muon.compat.torch import profiled
from lightning_muon.grad_sync.transports import Pending, Transport

# As in torch's DistributedDataParallel (bucket_cap_mb=25).
BUCKET_BYTES = 25 * 2**20

Bucket = tuple[Tensor, ...]


def make_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Buckets of one dtype and device, at most ``bucket_bytes`` or one parameter large, in the order of backward.

    The order of backward is the reverse of the given order, which is that of the modules.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    current: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    groups: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        key, size = (parameters[index].dtype, parameters[index].device), parameters[index].nbytes
        if key not in current or sizes[key] + size > bucket_bytes:
            current[key], sizes[key] = [], 0
            groups.append(current[key])
        current[key].append(index)
        sizes[key] += size
    groups.sort(key=lambda group: -group[-1])
    return [tuple(parameters[index] for index in group) for group in groups]


Owner = TypeVar("Owner")


class Arrivals:
    """Counts how often the hook of each parameter is called in a step, and compares with the step before."""

    def __init__(self) -> None:
        self._before, self._seen = Counter[Tensor](), Counter[Tensor]()

    def add(self, parameter: Tensor) -> bool:
        """Count a call; return whether it is the last one expected in this step."""
        self._seen[parameter] += 1
        return self._seen[parameter] == max(1, self._before[parameter])

    def begin_step(self) -> None:
        """Expect as many calls in the next step as there were in this one."""
        self._before, self._seen = self._seen, Counter()


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

    Collective over ``group`` to construct; every rank must do so. Parameters are plain tensors in the order of the
    modules, frozen ones too; ``transport`` is used by this reducer only.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        transport: Transport,
        group: AxisGroup,
        *,
        names: Mapping[Tensor, str],
        bucket_bytes: int,
    ) -> None:
        self._parameters = [p for p in dict.fromkeys(parameters) if p.is_floating_point() or p.is_complex()]
        self._transport, self._group = transport, group
        host = host_group(group)
        self._host = host
        _check(self._parameters, names, host)
        self.buckets = make_buckets(self._parameters, bucket_bytes)  # In the order of launches.
        self._bucket_of = {parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket}
        self._arrivals = Arrivals()
        self._divisor = float(group.size)
        self._is_syncing = True
        # Parameters that were sent together before, so that the connections for them are open.
        self._known: set[tuple[Tensor, ...]] = set()
        # The parameters that hooks wait for and send: those with a gradient on any rank in the last step.
        trainable = maxima_over(host, [parameter.requires_grad for parameter in self._parameters])
        self._expected = {p for p, is_trainable in zip(self._parameters, trainable, strict=True) if is_trainable}
        # Backward runs one thread for each device.
        self._lock = RLock()
        self._begin_step()
        self.close = watch_gradients(self, self._parameters, GradientReducer._arrived)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward adds to ``p.grad`` and nothing is sent; local."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def set_divisor(self, divisor: float) -> None:
        """Divide sums by ``divisor``, equal on all ranks, from the next :meth:`finish` on; at first by group size."""
        if not (math.isfinite(divisor) and divisor > 0):
            raise ValueError(f"the divisor of the gradients must be a positive number, got {divisor}")
        self._divisor = float(divisor)

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """Launch the buckets that are complete after this gradient was accumulated, in their order."""
        if not self._is_syncing:
            return
        with self._lock:
            missing = self._missing[self._bucket_of[parameter]]
            self._advance()
            if not self._arrivals.add(parameter) or parameter not in missing:
                return
            missing.remove(parameter)
            while self._num_launched < len(self.buckets) and not self._missing[self._num_launched]:
                # NCCL opens connections when a message of that kind and size is sent for the first time, and then keeps
                # the host waiting for all ranks, of which one may lack a gradient: so the first time is in finish().
                members = tuple(p for p in self.buckets[self._num_launched] if p in self._expected)
                if members and members not in self._known:
                    return
                self._launch(self._num_launched, self._expected)
                self._num_launched += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Send what the hooks have not sent, so that each rank has the gradients that any rank has.

        Collective over the group and the groups of the transport after the last backward pass of a step, also one that
        had none. Calling it again changes nothing.
        """
        agreed = self._agree()
        # The mean over the ranks of a gradient that is equal on all ranks is the same; other factors would change it.
        if agreed.resends and self._divisor != self._group.size:
            raise ValueError(
                f"gradients that are sums over {self._group.size} ranks would be summed and divided by {self._divisor} "
                "once more, with what another backward pass has added. Call zero_grad(set_to_none=True) between two "
                "synchronizing passes, or run all but the last pass inside no_sync()."
            )
        computed, left_over = (set(compress(self._parameters, own)) for own in (agreed.computed, agreed.left_over))
        for index in range(self._num_launched, len(self.buckets)):
            self._launch(index, self._expected if index < agreed.num_launched else computed)
        for index in range(agreed.num_launched):
            self._launch(index, left_over)
        self._finish_pending(computed)
        self._expected = computed or self._expected
        self._begin_step()

    def _finish_pending(self, present: Collection[Tensor]) -> None:
        """Make the sums of ``present`` available, drop the others; collective over the transport's groups."""
        for pending in self._pending:
            pending.advance(wait=True)
        for pending in self._pending:
            pending.finish(self._divisor, present)

    def _begin_step(self) -> None:
        self._pending: list[Pending] = []
        self._num_advanced = 0
        self._sent: set[Tensor] = set()
        self._num_launched = 0
        self._resends = False
        self._missing = [self._expected.intersection(bucket) for bucket in self.buckets]
        self._arrivals.begin_step()

    def _launch(self, index: int, parameters: Collection[Tensor]) -> None:
        """Send the gradients of a bucket's parameters that are in ``parameters``; the same on all ranks."""
        gradients: dict[Tensor, Tensor | None] = {}
        for parameter in self.buckets[index]:
            if parameter in parameters:
                gradients[parameter] = parameter.grad
                self._resends |= self._transport.results.holds(parameter)
                # The transport holds it; what backward adds later must be kept apart from it.
                parameter.grad = None
        if not gradients:
            return
        self._sent.update(parameter for parameter, gradient in gradients.items() if gradient is not None)
        with profiled(self._transport.kind, f"parameters.{index}"):
            self._pending.append(self._transport.start(gradients))
        self._known.add(tuple(gradients))
        self._advance()

    def _advance(self) -> None:
        """Continue sums that have arrived, so that their buffers are free again."""
        while self._num_advanced < len(self._pending) and self._pending[self._num_advanced].advance():
            # In order: the communications that follow must have the same order on all ranks, too.
            self._num_advanced += 1

    def _agree(self) -> _Facts:
        """Tell all ranks what this rank has launched and which gradients it has; collective over the group."""
        results = self._transport.results
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


def _check(parameters: Sequence[Tensor], names: Mapping[Tensor, str], host: AxisGroup) -> None:
    """Raise on all ranks for parameters that differ or cannot be reduced; collective over ``host``."""
    lines = [(names[p], f"{tuple(p.shape)} {p.dtype} {type(p).__name__}") for p in parameters]
    require_equal(lines, host, "the list of replicated parameters")
    for parameter in parameters:
        if parameter.is_complex():
            raise TypeError(
                f"{names[parameter]} {tuple(parameter.shape)} is {parameter.dtype}: complex gradients are not reduced. "
                "Hold it as a real tensor (torch.view_as_real)."
            )
