"""Checks that the ranks of a pipeline have the same batch, before their first message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.agreement import fail_together, gather
from lightning_muon.comm.collectives import start_reading
from lightning_muon.comm.groups import AxisGroup, host_group
from lightning_muon.compat.torch import profiled
from lightning_muon.math.checksum import checksum
from lightning_muon.sharding.outputs import tensors_in

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
