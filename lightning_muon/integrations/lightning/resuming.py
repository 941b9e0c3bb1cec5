"""A resumed run goes on with the batches of its epoch that are still to come, and with the random states of all ranks.

Lightning begins the epoch of a checkpoint anew, unless its loaders have a ``state_dict``: batches before the checkpoint
would be seen twice, and as many others never.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_muon.compat.torch import INDEX_SAMPLER

KEY = "lightning_muon"  # In a checkpoint of a Trainer, for what Lightning does not save.


class TrainingData:
    """Where a run is in its training data, and the state of its random generators; one for each strategy."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []
        self._epoch = -1  # In which the loaders came.
        self._resumed: _Resumed | None = None

    def state(self, num_data_ranks: int) -> dict[str, Any]:
        """What a checkpoint needs, on rank 0. Collective over all ranks; every rank must call it."""
        own = {"now": random_state(), "loaders": [order.state() for order in self._orders]}
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, states if dist.get_rank() == 0 else None)
        return {"num_data_ranks": num_data_ranks, "random": states}

    def resume(self, checkpoint: Mapping[str, Any], num_data_ranks: int) -> None:
        """Go on where a checkpoint was saved, whose progress is made that of so many ranks; local, alike on all.

        With as many ranks as then each takes its random states, too. Older checkpoints and those of other strategies
        begin the epoch anew.
        """
        saved, loops = checkpoint.get(KEY), checkpoint.get("loops", {}).get("fit_loop")
        if saved is None or loops is None:
            return
        progress, num_skipped = loops["epoch_loop.batch_progress"], 0
        if not progress["is_last_batch"]:
            current, before = progress["current"], saved["num_data_ranks"]
            num_read, is_ending = current["processed"], current["processed"] - current["completed"]
            num_skipped, num_again = divmod(num_read * before, num_data_ranks)
            if num_again and dist.get_rank() == 0:
                warnings.warn(
                    f"{before} ranks had read {num_read} batches each of this epoch, which {num_data_ranks} ranks "
                    f"cannot share equally: {num_again} batches are read again",
                    stacklevel=2,
                )
            current |= dict.fromkeys(("ready", "started", "processed"), num_skipped)
            current["completed"] = num_skipped - is_ending
        is_as_before = len(saved["random"]) == dist.get_world_size()
        self._resumed = _Resumed(num_skipped, saved["random"][dist.get_rank()] if is_as_before else None)

    def follow(self, loader: Any, epoch: int) -> Any:
        """A loader for training; its first pass is the rest of the one in which the checkpoint was saved."""
        if not isinstance(loader, DataLoader):
            return loader
        if epoch != self._epoch and self._orders:  # Trainer(reload_dataloaders_every_n_epochs=...)
            self._orders, self._resumed = [], None
        self._epoch = epoch
        is_new = not hasattr(loader, "order")  # A second run may have the same loader.
        order = _Order(loader, getattr(loader, INDEX_SAMPLER) if is_new else loader.order.indices)
        if is_new:
            loader.__class__ = _followed(type(loader))
        loader.order, loader.resumed = order, self._resumed
        if self._resumed is not None:
            self._resumed.prepare(order, len(self._orders))
        self._orders.append(order)
        return loader


class _Resumed:
    """The first pass after a resume."""

    def __init__(self, num_skipped: int, own: Mapping[str, Any] | None) -> None:
        self._num_skipped = num_skipped
        self._state, self._loaders = (own["now"], own["loaders"]) if own else (None, [])

    def prepare(self, order: _Order, number: int) -> None:
        """Tell a loader where its order begins; ``number`` is its place among those for training."""
        saved = self._loaders[number] if number < len(self._loaders) else {}
        order.num_skipped = self._num_skipped % max(1, len(order)) if order.is_sized else 0
        order.saved_start = saved.get("start") if order.num_skipped else None
        if order.generator is not None and saved.get("generator") is not None:
            order.generator.set_state(saved["generator"])

    def iterate(self, loader: Any, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass now; its first batch is the next one, and finds the random states that were saved."""
        is_sized = loader.order.is_sized
        is_new = not (loader.order.num_skipped if is_sized else self._num_skipped)
        if is_new and self._state is not None:
            set_random_state(self._state)
        iterator = iterate()
        if is_new and self._state is not None:
            self._state = random_state()

        def batches() -> Iterator[Any]:
            for _ in range(0 if is_sized else self._num_skipped):
                next(iterator)
            if self._state is not None:
                set_random_state(self._state)
                self._state = None
            yield from iterator

        return batches()


class _Order:
    """The indices that a loader draws, and the states of the generators from which it drew them."""

    num_skipped = 0  # Of the next pass.
    saved_start: list[Tensor] | None = None  # States for the next pass.

    def __init__(self, loader: DataLoader[Any], indices: Any) -> None:
        self.indices = indices
        self.is_sized = not isinstance(loader.dataset, IterableDataset)
        self.generator: torch.Generator | None = getattr(loader.sampler, "generator", None) or loader.generator
        self._start = self._states()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.indices, name)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is drawn before the first index is asked for.
        before, saved, num_skipped = torch.get_rng_state(), self.saved_start, self.num_skipped
        self.saved_start, self.num_skipped = None, 0
        if saved is not None:
            torch.set_rng_state(saved[0])
            if self.generator is not None and len(saved) > 1:
                self.generator.set_state(saved[1])
        self._start = self._states()
        indices = iter(self.indices)
        for _ in range(num_skipped):
            next(indices)
        if saved is not None:
            torch.set_rng_state(before)
        yield from indices

    def state(self) -> dict[str, Any]:
        """How the present pass began, and the state of a generator of the loader's own; local."""
        return {"start": self._start, "generator": None if self.generator is None else self.generator.get_state()}

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([] if self.generator is None else [self.generator.get_state()])]


@cache
def _followed(kind: type[Any]) -> type[Any]:
    """The class of a loader that a run follows."""

    def iterate(self: Any) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        begin = partial(kind.__iter__, self)
        return begin() if resumed is None else resumed.iterate(self, begin)

    body = {"__iter__": iterate, INDEX_SAMPLER: property(lambda self: self.order), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def random_state() -> dict[str, Any]:
    """The states of all generators that a step may draw from, as types that ``weights_only`` allows; local."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(numbers), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, numbers, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.from_numpy(numbers.astype("int64")), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undo :func:`random_state`; local."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, numbers, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, numbers.numpy().astype("uint32"), *rest))
