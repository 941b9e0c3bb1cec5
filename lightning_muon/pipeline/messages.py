"""Sends tensors between two ranks of a pipeline; their sizes are sent once for each size of a micro-batch.

Before the first message the ranks check that they have the same batch.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.agreement import fail_together, gather
from lightning_muon.comm.collectives import AxisGroup, host_group, start_reading
from lightning_muon.compat.torch import profiled
from lightning_muon.math.checksum import checksum
from lightning_muon.sharding.units import tensors_in

_SIZES_BYTES = 4096  # Size of the message with sizes: enough for some 100 tensors.


class Size(NamedTuple):
    """The facts that a receiver must know about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Link:
    """Messages to and from ``peer``, another rank by its number in the group, in the order in which both list them."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._known: dict[Hashable, list[Size]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []  # Keeps tensors alive until they are sent.

    def send(self, tensors: Sequence[Tensor], key: Hashable) -> None:
        """Send tensors; for a new ``key``, which the receiver must use too, send their sizes first. Local."""
        sizes = [Size(tuple(each.shape), each.dtype, each.requires_grad) for each in tensors]
        if key not in self._known:
            self._known[key] = sizes
            self.send_known([_encode(sizes).to(self._device)])
        elif sizes != self._known[key]:
            raise RuntimeError(
                f"a stage returns {sizes}, and for a micro-batch of the same shape it was {self._known[key]}; sizes, "
                "and what requires gradients, must follow from the shapes of a batch and from what is frozen"
            )
        self.send_known(tensors)

    def send_known(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors whose sizes the receiver knows; local."""
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for tensor in tensors:
            content = tensor.detach().contiguous()
            work = dist.isend(content, group=self._group, group_dst=self._peer)
            assert work is not None
            self._sent.append((work, content))

    def receive(self, key: Hashable) -> Arriving:
        """Begin to receive what the other rank sends with this key; waits only for sizes of a new key."""
        if key not in self._known:
            octets = torch.empty(_SIZES_BYTES, dtype=torch.uint8, device=self._device)
            self.receive_known([octets]).wait()
            self._known[key] = pickle.loads(bytes(octets.tolist()))
        sizes = self._known[key]
        empty = [torch.empty(size.shape, dtype=size.dtype, device=self._device) for size in sizes]
        return self.receive_known(empty, [size.requires_grad for size in sizes])

    def receive_known(self, into: Sequence[Tensor], requires_grad: Sequence[bool] | None = None) -> Arriving:
        """Begin to receive tensors of known sizes; local."""
        works = [dist.irecv(tensor, group=self._group, group_src=self._peer) for tensor in into]
        return Arriving([work for work in works if work is not None], into, requires_grad or [False] * len(into))

    def finish(self) -> None:
        """Wait until everything is sent; local."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


class Links:
    """The links of this rank to the others of a pipeline."""

    def __init__(self, group: AxisGroup, device: torch.device) -> None:
        self._group, self._device = group.group, device
        self._links: dict[int, Link] = {}
        self._is_used = False  # Whether messages may be on their way.

    def to(self, peer: int) -> Link:
        """The link to another rank, by its number in the group; local."""
        assert self._group is not None
        self._is_used = True
        return self._links.setdefault(peer, Link(self._group, peer, self._device))

    def finish(self) -> None:
        """Wait until everything is sent, at the end of a batch that has received all its messages; local."""
        for link in self._links.values():
            link.finish()
        self._is_used = False

    def require_finished(self) -> None:
        """Raise if an exception has ended the last batch before :meth:`finish`; local."""
        if self._is_used:
            raise RuntimeError(
                "an exception has ended an earlier batch of this pipeline, whose messages are still on their way and "
                "would be taken for those of this one; start the processes again, from a checkpoint"
            )

    def forget_sizes(self) -> None:
        """Let the sizes of all messages be sent again; local, on all ranks."""
        self._links.clear()


class Arriving(NamedTuple):
    """Tensors on their way to this rank."""

    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]
    requires_grad: Sequence[bool]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors, and return them as leaves of a new graph."""
        for work in self.works:
            work.wait()
        pairs = zip(self.tensors, self.requires_grad, strict=True)
        return [tensor.requires_grad_(needs_gradient) for tensor, needs_gradient in pairs]


def _encode(sizes: Sequence[Size]) -> Tensor:
    content = pickle.dumps(list(sizes))
    if len(content) > _SIZES_BYTES:
        raise ValueError(f"a stage returns {len(sizes)} tensors of {sizes}, too many for one message; pack them")
    return torch.frombuffer(bytearray(content.ljust(_SIZES_BYTES, b"\0")), dtype=torch.uint8)


_Result = TypeVar("_Result")
_NUM_COMPARED = 3  # Numbers that are compared: whether there is an error, hash of shapes, hash of contents.
_LEVEL = 8  # Other weights than within tensors, so that elements that swap places between tensors change the hash.


class BatchComparison:
    """Compares the batches of a pipeline in one small message in host memory, sent beside the first forward.

    Shapes, and contents in host memory, are compared before the ranks send each other anything. A comparison of
    contents on another device would make the host wait for it; they are compared with the next batch, and those of the
    last one by :meth:`compare_last`.
    ``check`` raises if the facts of a batch, combined over all ranks, are wrong. Collective over ``group``, the ranks
    of the pipeline, to construct.
    """

    def __init__(self, group: AxisGroup, check: Callable[[Sequence[bool]], None] = lambda facts: None) -> None:
        self._host, self._check = host_group(group), check
        self._unread: Callable[[], list[list[int]]] | None = None  # Fingerprint of the last batch, on a device.
        self._error: Exception | None = None
        self._tensors: list[Tensor] = []
        self._begun: tuple[dist.Work, Tensor] | None = None

    def begin(self, cut: Callable[[], tuple[Any, _Result]], facts: Sequence[bool] = ()) -> _Result:
        """Begin to compare the first result of ``cut``, and return the second; ``facts`` are for the ``check``.

        An error of ``cut`` is raised on all ranks: here, and by :meth:`finish` on ranks without it. Collective over the
        pipeline, and :meth:`finish` before it communicates with others of the pipeline.
        """
        self._error, self._tensors, results = None, [], []
        try:
            batch, result = cut()
            results.append(result)
            self._tensors = list(tensors_in(batch))
        except Exception as problem:  # Of the user's pipeline_step, for example.
            self._error = problem
        self._send(facts)
        if not results:
            self.finish()
        return results[0]

    def finish(self) -> None:
        """Raise on all ranks of the pipeline if they have different batches; the first call waits for all of them."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        work, words = begun
        with profiled("wait", "batch"):
            work.wait()
        largest, inverted, facts = words.tensor_split([_NUM_COMPARED, 2 * _NUM_COMPARED])
        if not largest[0] and torch.equal(largest, inverted.bitwise_not()):
            self._tensors = []  # A batch must not outlive its step.
            self._check([bool(fact) for fact in facts])
            return
        fail_together(self._error, self._host)
        found = gather([f"{each.dtype} {tuple(each.shape)}" for each in self._tensors], self._host)
        shown = "; ".join(f"rank {rank}: {', '.join(tensors)}" for rank, tensors in enumerate(found))
        what = "of the same shapes with other contents" if len({tuple(each) for each in found}) == 1 else shown
        raise ValueError(
            f"the ranks of a pipeline have different batches ({what}): the first stage takes the inputs of its batch, "
            "the last one the targets. Let data loaders and random transformations depend on the data rank only "
            "(seed_everything with one seed, no seed of the rank)"
        )

    def compare_last(self) -> None:
        """Compare device contents of the last batch. Collective over the pipeline."""
        if self._unread is not None:
            self.begin(lambda: ((), None))
            self.finish()

    def forget(self) -> None:
        """Reset for another run; local, on all ranks."""
        self._unread = self._begun = self._error = None
        self._tensors = []

    def _send(self, facts: Sequence[bool]) -> None:
        if self._host.group is None:
            if self._error is not None:
                raise self._error
            return
        shapes = repr([(tuple(each.shape), each.dtype) for each in self._tensors])
        contents = start_reading([_fingerprint(self._tensors)]) if self._tensors else None
        if all(each.device.type == "cpu" for each in self._tensors):
            known, self._unread = contents or self._unread, None
        else:
            known, self._unread = self._unread, contents
        (content,) = known()[0] if known is not None else (0,)
        digest = hashlib.sha256(shapes.encode()).digest()[:8]
        own = torch.tensor([self._error is not None, int.from_bytes(digest, signed=True), content], device="cpu")
        words = torch.cat([own, own.bitwise_not(), torch.tensor(facts, dtype=own.dtype, device="cpu")])
        work = dist.all_reduce(words, dist.ReduceOp.MAX, group=self._host.group, async_op=True)
        assert work is not None
        self._begun = work, words


def _fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """A hash, int64 on their device, that is equal for different contents in about one case in 2^60 only."""
    device = next((each.device for each in tensors if each.device.type != "cpu"), tensors[0].device)
    return checksum(torch.stack([checksum(each).to(device) for each in tensors]), level=_LEVEL)
