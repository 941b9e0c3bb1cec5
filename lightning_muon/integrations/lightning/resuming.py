"""A resumed run goes on with the batches of its epoch that are still to come, and with the random states of all ranks.

Lightning begins the epoch of a checkpoint anew, unless its loaders have a ``state_dict``: batches before the checkpoint
would be seen twice, and as many others never.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_muon.compat.torch import INDEX_SAMPLER

KEY = "lightning_muon"  # In a checkpoint of a Trainer, for what Lightning does not save.
_NOT_RESUMABLE = ".*your dataloader is not resumable"  # Lightning says it of all that have no state_dict.


class TrainingData:
    """The place of a run in its training data, and the states of its random generators; one for each run."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []
        self._orders_of_ended_run: list[dict[str, Any]] = []
        self._epoch = -1  # In which the loaders came.
        self._resumption: _Resumption | None = None
        self.epoch_of_batch: int | None = None  # That of the last batch of this run.
        self._resumed_epoch: int | None = None  # That of its first one.

    def epoch_to_come(self, trainer: Any) -> int:
        """The epoch that a loader begins now; local."""
        if self.epoch_of_batch is not None:
            return trainer.current_epoch
        if self._resumed_epoch is not None:
            return self._resumed_epoch
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        return epochs.ready if batches.is_last_batch else epochs.processed

    def state(self, num_data_ranks: int, trainer: Any) -> dict[str, Any]:
        """Return what a checkpoint needs, on rank 0. Collective over all ranks; every rank must call it."""
        own = {"now": random_state(), "loaders": self._orders()}
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, states if dist.get_rank() == 0 else None)
        # In a run that began at the end of an epoch Lightning counts one too few as ready.
        begins_next = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and self.epoch_of_batch is not None
        epoch = self.epoch_to_come(trainer) if self.epoch_of_batch is None else self.epoch_of_batch
        return {"num_data_ranks": num_data_ranks, "random": states, "epoch": epoch + begins_next}

    def resume(self, checkpoint: Mapping[str, Any], num_data_ranks: int, *, by_steps: bool) -> None:
        """Go on where a checkpoint was saved, whose progress is made that of so many ranks; local, alike on all.

        With as many ranks as then each takes its random states, too. Older checkpoints and those of other strategies
        begin the epoch anew. ``by_steps``: the Trainer has ``max_steps``.
        """
        saved, loops = checkpoint.get(KEY), checkpoint.get("loops", {}).get("fit_loop")
        if saved is None or loops is None:
            return
        progress, num_read = loops["epoch_loop.batch_progress"], 0
        if not progress["is_last_batch"]:
            if loops["epoch_progress"]["current"]["processed"] > saved.get("epoch", math.inf):
                # The run was told to stop in the middle of its epoch, which Lightning then took for ended.
                _set_epochs_begun(loops, saved["epoch"] + 1)
                _put_before_end_of_epoch(loops)
            current, before = progress["current"], saved["num_data_ranks"]
            is_ending = current["processed"] - current["completed"]  # 1 in on_train_batch_end.
            num_read, num_again = divmod(current["processed"] * before, num_data_ranks)
            if num_again and dist.get_rank() == 0:
                warnings.warn(
                    f"{before} ranks had read {current['processed']} batches each of this epoch, which "
                    f"{num_data_ranks} ranks cannot share equally: {num_again} batches are read again",
                    stacklevel=2,
                )
            current |= dict.fromkeys(("ready", "started", "processed"), num_read)
            current["completed"] = num_read - is_ending
        self._resumed_epoch = saved.get("epoch")
        if progress["is_last_batch"] and "epoch" in saved:
            _set_epochs_begun(loops, saved["epoch"])
            if by_steps and loops["epoch_progress"]["current"]["processed"] == saved["epoch"]:
                _put_before_end_of_epoch(loops)
        is_as_before = len(saved["random"]) == dist.get_world_size()
        self._resumption = _Resumption(num_read, saved["random"][dist.get_rank()] if is_as_before else None)
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    def follow(self, loader: Any, epoch: int) -> Any:
        """A loader for training; its first pass is the rest of the one in which the checkpoint was saved.

        One with a ``load_state_dict`` is left to Lightning, and what is no ``DataLoader`` begins anew.
        """
        if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
            _warn_of_lost_order(loader)
            return loader
        if epoch != self._epoch and self._loaders:  # Trainer(reload_dataloaders_every_n_epochs=...)
            self.release()
        self._epoch = epoch
        if "_muon_order" in vars(loader):
            if any(loader is each for each in self._loaders):
                return loader
            _leave(loader)  # The end of an earlier run did not come.
        order = _Order(loader)
        if self._resumption is not None:
            self._resumption.prepare(order, len(self._loaders))
        vars(loader).update(_muon_order=order, _muon_resumption=self._resumption)
        loader.__class__ = _followed(type(loader))
        self._loaders.append(loader)
        return loader

    def restore_random_state(self) -> None:
        """Restore the random state before the first step of a resumed run, unless a loader has done it; local."""
        if self._resumption is not None:
            self._resumption.restore_random_state()

    def _orders(self) -> list[dict[str, Any]]:
        return [loader._muon_order.state() for loader in self._loaders] or self._orders_of_ended_run

    def release(self) -> None:
        """Leave the loaders as they were; local."""
        self._orders_of_ended_run = self._orders()
        for loader in self._loaders:
            _leave(loader)
        self._loaders, self._resumption = [], None


def _warn_of_lost_order(loader: Any) -> None:
    """Say on rank 0 if Lightning has put a sampler around one whose random order no ``state_dict`` then has; local."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or type(sampler) is DistributedSampler:
        return
    if sampler.dataset is not loader.dataset and sampler.rank == 0:
        warnings.warn(
            f"Lightning shares out what the sampler of this {type(loader).__name__} yields, and the state of the "
            "loader does not have its order: if that is random, a run resumed in mid-epoch sees some samples twice and "
            "others never. Give the loader sampler=DistributedSampler(dataset, shuffle=True), of torch.utils.data",
            stacklevel=2,
        )


def _set_epochs_begun(loops: dict[str, Any], number: int) -> None:
    for counts in loops["epoch_progress"].values():
        counts |= dict.fromkeys(("ready", "started"), number)


def _put_before_end_of_epoch(loops: dict[str, Any]) -> None:
    """Make the progress that of a checkpoint saved after the last batch, before the hooks of the end of the epoch.

    With ``max_steps`` Lightning 2.6 takes one from behind them for one in the middle of the epoch: it trains with one
    batch more, and then begins the next epoch (``FitLoop.restarting``). Local.
    """
    for counts in loops["epoch_progress"].values():
        counts |= dict.fromkeys(("processed", "completed"), counts["ready"] - 1)
    for counts in map(loops["epoch_loop.batch_progress"].get, ("total", "current")):
        counts["completed"] = counts["processed"] - 1
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


class _Resumption:
    """What the first passes over the loaders of a resumed run leave out, and where their random states begin."""

    def __init__(self, num_read: int, saved: Mapping[str, Any] | None) -> None:
        self._num_read = num_read
        self._state, self._loaders = (saved["now"], saved["loaders"]) if saved else (None, [])

    def prepare(self, order: _Order, number: int) -> None:
        """Tell a loader where its order begins; ``number`` is its place among those for training."""
        saved = self._loaders[number] if number < len(self._loaders) else {}
        # A loader that is shorter than another one has begun again.
        order.num_skipped = self._num_read % order.length if order.length else self._num_read
        if order.num_skipped:
            order.saved_start = saved.get("start")
        elif order.generator is not None and saved.get("generator") is not None:
            order.generator.set_state(saved["generator"])

    def iterate(self, order: _Order, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass now; its first batch is the next one, and finds the random states that were saved."""
        num_dropped = 0 if order.has_indices else order.num_skipped
        begins_epoch = order.num_skipped == 0
        if begins_epoch and self._state is not None:
            set_random_state(self._state)
        iterator = iterate()
        if begins_epoch and self._state is not None:
            self._state = random_state()

        def batches() -> Iterator[Any]:
            rest = islice(iterator, num_dropped, None)
            first = next(rest, None) if num_dropped else None
            self.restore_random_state()
            if first is not None:
                yield first
            yield from rest

        return batches()

    def restore_random_state(self) -> None:
        """Do it once; local."""
        if self._state is not None:
            set_random_state(self._state)
            self._state = None


class _Order:
    """The indices that a loader draws, and the states of the generators from which it drew them."""

    num_skipped = 0  # Of the next pass.
    saved_start: Mapping[str, Any] | None = None  # States for the next pass.

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.indices: Any = getattr(loader, INDEX_SAMPLER)
        self.has_indices = not isinstance(loader.dataset, IterableDataset)
        try:
            self.length = len(self.indices) if self.has_indices else None
        except (TypeError, NotImplementedError):  # A sampler need not have a length: one of batches of as many tokens.
            self.length = None
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        generator = getattr(sampler, "generator", None) or loader.generator
        self.generator = generator if isinstance(generator, torch.Generator) else None
        self._start = self._states()

    def __getattr__(self, name: str) -> Any:
        if name == "indices" or name.startswith("__"):  # A copy has no attributes yet.
            raise AttributeError(name)
        return getattr(self.indices, name)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing is drawn before the first index is asked for.
        saved, num_skipped = self.saved_start, self.num_skipped if self.has_indices else 0
        self.saved_start, self.num_skipped = None, 0
        now = random_state() if saved is not None else None
        if saved is not None:
            set_random_state(saved)
            if self.generator is not None and "generator" in saved:
                self.generator.set_state(saved["generator"])
        self._start = self._states()
        indices = iter(self.indices)
        for _ in range(num_skipped):
            next(indices, None)
        if now is not None:
            set_random_state(now)
        yield from indices

    def state(self) -> dict[str, Any]:
        """How the present pass began, and the state of a generator of the loader's own; local."""
        return {"start": self._start, "generator": None if self.generator is None else self.generator.get_state()}

    def _states(self) -> dict[str, Any]:
        return random_state() | ({} if self.generator is None else {"generator": self.generator.get_state()})


def _leave(loader: Any) -> None:
    loader.__class__ = type(loader).__base__
    del loader._muon_order, loader._muon_resumption


@cache
def _followed(kind: type[Any]) -> type[Any]:
    """The class of a loader that a run follows, beside the attributes ``_muon_order`` and ``_muon_resumption``."""

    def iterate(self: Any) -> Iterator[Any]:
        resumption, self._muon_resumption = self._muon_resumption, None
        begin = partial(kind.__iter__, self)
        return begin() if resumption is None else resumption.iterate(self._muon_order, begin)

    def indices(self: Any) -> Any:  # A loader that Lightning makes of this one is not followed.
        own = vars(self)
        return own["_muon_order"] if "_muon_order" in own else getattr(super(followed, self), INDEX_SAMPLER)

    body = {
        "__iter__": iterate,
        INDEX_SAMPLER: property(indices),
        "_muon_resumption": None,
        "__module__": kind.__module__,
    }
    followed = type(kind.__name__, (kind,), body)
    return followed


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
