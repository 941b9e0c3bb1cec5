"""Sends tensors between two ranks of a pipeline; their sizes are sent once for each size of a micro-batch."""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.groups import AxisGroup

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
