"""A resumed run goes on with the batches of its epoch that are still to come, and with the random states of all ranks.

Lightning begins the epoch of a checkpoint anew, unless its loaders have a ``state_dict`` (torchdata's
StatefulDataLoader). A ``DataLoader`` of a map-style dataset has an order of indices, of which the rest is read here.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_muon.comm.agreement import warn_on_first_rank
from lightning_muon.compat.lightning import begin_in_epoch, num_accumulated, set_batches_read
from lightning_muon.compat.torch import forget_workers

KEY = "lightning_muon"  # In a checkpoint of a Trainer, for what Lightning does not save.


class TrainingData:
    """The place of a run in its training data, and the states of its random generators; one for each run."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []
        self.saved: dict[str, Any] = {}  # States of this rank in the checkpoint, until the first batch.
        # The checkpoint, and the number of ranks of now, until the first batch of a run that goes on in mid-epoch.
        self._rest: tuple[Mapping[str, Any], int] | None = None
        self.num_read: int | None = None  # Batches that the first pass of the loaders leaves out then.
        # The random states before the first micro-batch since the last step, where batches are accumulated.
        self.window: dict[str, Any] | None = None
        self._trainer: Any = None
        # In which epoch the loaders came, and the first batch and the last one of this run.
        self._epoch, self._resumed_epoch, self._epoch_of_batch = -1, -1, -1

    def epoch_to_come(self, trainer: Any) -> int:
        """The epoch that a loader begins now; local."""
        if self._epoch_of_batch >= 0:
            return trainer.current_epoch
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        begun = epochs.ready if batches.is_last_batch else epochs.processed
        return begun if self._resumed_epoch < 0 else self._resumed_epoch

    def state(self, num_data_ranks: int, trainer: Any) -> dict[str, Any]:
        """Return what a checkpoint needs, on rank 0. Collective over all ranks."""
        # Gradients are in no checkpoint: the first micro-batch since the last step is the next one.
        num_again = num_accumulated(trainer)
        now = self.window if num_again and self.window else random_state()
        own = {"now": now, "loaders": [order.state() for order in self._orders]}
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, states if dist.get_rank() == 0 else None)
        epoch = self.epoch_to_come(trainer)
        if self._epoch_of_batch >= 0:  # Lightning counts one too few in a run that began at the end of an epoch.
            epoch = self._epoch_of_batch + trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        place = {"epoch": epoch, "num_accumulated": num_again}
        return {"num_data_ranks": num_data_ranks, "random": states, **place}

    def resume(self, checkpoint: Mapping[str, Any], num_data_ranks: int, *, by_steps: bool) -> None:
        """Go on where a checkpoint was saved, whose progress is made that of so many ranks; local, alike on all.

        With as many ranks as then each takes its random states, too. Checkpoints of other strategies begin the epoch
        anew. ``by_steps``: the Trainer has ``max_steps``.
        """
        saved, loops = checkpoint.get(KEY), checkpoint.get("loops", {}).get("fit_loop")
        if saved is None or loops is None:
            return
        self._resumed_epoch = saved["epoch"]
        if num_before := begin_in_epoch(loops, self._resumed_epoch, by_steps=by_steps):
            self._rest = {"num_before": num_before, **saved}, num_data_ranks
        if len(saved["random"]) == dist.get_world_size():
            self.saved = dict(saved["random"][dist.get_rank()])
        # Lightning says it of all that have no state_dict.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")

    def follow(self, loader: Any, epoch: int, trainer: Any) -> Any:
        """Let the first pass of a loader for training be the rest of the one in which the checkpoint was saved; local.

        One with a ``load_state_dict`` reads on by itself; what has no order of indices begins anew, with a warning.
        Returns the loader, or what takes its place.
        """
        self._trainer = trainer
        has_order = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        has_state = hasattr(loader, "load_state_dict")
        if self._rest is not None and self.num_read is None:
            num_before, num_ranks = self._rest[0]["num_data_ranks"], self._rest[1]
            if has_state and num_before != num_ranks:
                warn_on_first_rank(
                    f"this {type(loader).__name__} goes on from the state of one of {num_before} ranks, and now there "
                    f"are {num_ranks}: rows of this epoch are lost or read twice. Go on with as many ranks, or take a "
                    "DataLoader of a map-style dataset, which goes on by rows",
                    stacklevel=2,
                )
            self.num_read = self._batches_to_leave_out(loader if has_order else None, has_state=has_state)
            set_batches_read(trainer, self.num_read)
        if has_state:
            return loader if has_order or _length(loader) is not None else _OneAhead(loader)
        if self.num_read is not None and not has_order:
            warn_on_first_rank(
                f"the run goes on in mid-epoch, and this {type(loader).__name__} begins the epoch anew: take a "
                "DataLoader of a map-style dataset, or a StatefulDataLoader of torchdata",
                stacklevel=2,
            )
        if epoch != self._epoch:  # Trainer(reload_dataloaders_every_n_epochs=...)
            self.release()
            self._orders, self._epoch = [], epoch
        if has_order and not any(order.loader is loader for order in self._orders):
            saved = dict(enumerate(self.saved.get("loaders", ())))
            self._orders.append(_Order(loader, self, saved.get(len(self._orders), {})))
        return loader

    def _batches_to_leave_out(self, loader: Any, *, has_state: bool) -> int:
        """How many batches each rank has read already, in batches of now: as many rows as were read; local."""
        assert self._rest is not None
        saved, num_ranks = self._rest
        before, num_again = saved["num_data_ranks"], saved.get("num_accumulated", 0)
        if num_again and has_state:
            warn_on_first_rank(
                f"gradients of {num_again} micro-batches, behind which the checkpoint was saved, are lost: a loader "
                "with a state of its own cannot go back to them",
                stacklevel=3,
            )
            num_again = 0
        orders = saved["random"][0]["loaders"]
        then, now = 1, 1  # As many rows as then.
        if loader is not None and orders and orders[0].get("size") and (size := _batch_size(loader)):
            then, now = orders[0]["size"], size
        num_batches = saved["num_before"] - num_again
        number, left = divmod(num_batches * before * then, num_ranks * now)
        if left:
            warn_on_first_rank(
                f"{before} ranks had read {num_batches} batches each of this epoch, which {num_ranks} ranks cannot "
                f"share equally in batches of now: {left} rows are read again",
                stacklevel=3,
            )
        return number

    def fetches(self) -> None:
        """A micro-batch is about to be read, which may be the first one since the last step; local."""
        if self.window is None and self._trainer.accumulate_grad_batches > 1:
            self.window = random_state()

    def batch_begins(self, epoch: int) -> None:
        """Note the epoch; the first batch of a resumed run restores the random states, if no loader has; local."""
        if "now" in self.saved and not self._orders:
            set_random_state(self.saved["now"])
        self.saved, self._rest, self.num_read, self._epoch_of_batch = {}, None, None, epoch
        self.fetches()

    def release(self) -> None:
        """Leave the loaders as they were; local."""
        for order in self._orders:
            vars(order.loader)[order.place] = order.indices


class _OneAhead:
    """Takes the place of a loader with a state and without a length, of which Lightning reads one batch too many.

    It saves the state of the loader, which then lacks that batch; here it is the state before the last batch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self._is_resumed = loader, False
        self._before: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # A copy has no attributes yet.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        now = self.loader.state_dict()
        for batch in batches:
            self._before, now = now, self.loader.state_dict()
            yield batch
        self._before = None
        if self._is_resumed:
            self._is_resumed = False
            forget_workers(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The state with which the loader reads on behind the last batch but one; local."""
        return self.loader.state_dict() if self._before is None else self._before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin there; local."""
        self._is_resumed = True
        self.loader.load_state_dict(state)


def _length(loader: Any) -> int | None:
    """Number of batches; ``None`` without a length, as Lightning takes it: a ``__len__`` that is missing or refuses."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _batch_size(loader: Any) -> int | None:
    """Rows of a batch, of the first one in a list of batches; ``None`` if a batch sampler of the user does not say."""
    sampler = getattr(loader, "batch_sampler", None)
    batches = getattr(sampler, "indices", sampler)
    if isinstance(batches, list | tuple) and batches:
        return len(batches[0])
    size = getattr(loader, "batch_size", None)
    return 1 if sampler is None and size is None else getattr(batches, "batch_size", size)


class _Order:
    """What a loader has in place of its sampler: the indices, and the states of generators before they are drawn."""

    def __init__(self, loader: DataLoader[Any], data: TrainingData, saved: Mapping[str, Any]) -> None:
        self.loader, self._data, self._num_skipped = loader, data, data.num_read or 0
        self.place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.indices: Any = getattr(loader, self.place)
        own = (getattr(getattr(self.indices, "sampler", self.indices), "generator", None), loader.generator)
        self._generator = next((each for each in own if isinstance(each, torch.Generator)), None)
        if length := _length(self.indices):  # A loader that is shorter than another one has begun again.
            self._num_skipped %= length
        self._is_rest = data.num_read == 0 or bool(self._num_skipped)
        self._resumed = saved.get("start") if self._is_rest else None
        if saved and not self._is_rest:  # The pass begins next, and draws from them.
            set_random_state({**data.saved["now"], "generator": saved["generator"]}, self._generator)
        self._start = random_state(self._generator)
        vars(loader)[self.place] = self  # A DataLoader refuses an assignment.

    def __getattr__(self, name: str) -> Any:
        if name == "indices" or name.startswith("__"):  # A copy has no attributes yet.
            raise AttributeError(name)
        return getattr(self.indices, name)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is drawn before the first index is asked for.
        now = (self._data.saved.pop("now", None) or random_state()) if self._is_rest else None
        if self._resumed is not None:
            set_random_state(self._resumed, self._generator)
        num_skipped, self._num_skipped, self._resumed, self._is_rest = self._num_skipped, 0, None, False
        self._start, indices = random_state(self._generator), iter(self.indices)
        has_workers = self.loader.num_workers > 0  # They ask for indices early, and draw from states of their own.
        if now is not None:
            indices = chain(list(islice(indices, num_skipped + has_workers))[num_skipped:], indices)
            set_random_state(now)
        while True:
            if not has_workers:
                self._data.fetches()
            try:
                index = next(indices)
            except StopIteration:
                return
            yield index

    def state(self) -> dict[str, Any]:
        """The random states when the present pass began, and that of the loader's own generator now; local."""
        generator = random_state(self._generator).get("generator")
        return {"start": self._start, "generator": generator, "size": _batch_size(self.loader)}


def random_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """The states of all generators that a step may draw from, as types that ``weights_only`` allows; local."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(numbers), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, numbers, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.from_numpy(numbers.astype("int64")), *rest]
    if generator is not None:
        state["generator"] = generator.get_state()
    return state


def set_random_state(state: Mapping[str, Any], generator: torch.Generator | None = None) -> None:
    """Undo :func:`random_state`; local."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, numbers, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, numbers.numpy().astype("uint32"), *rest))
    if generator is not None and state.get("generator") is not None:
        generator.set_state(state["generator"])
