"""A resumed run goes on with the batches of its epoch that are still to come, and with the random states of all ranks.

Lightning begins the epoch of a checkpoint anew, unless its loaders have a ``state_dict`` (torchdata's
StatefulDataLoader). A ``DataLoader`` of a map-style dataset has an order of indices, of which the rest is read here.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_muon.comm.agreement import warn_on_first_rank
from lightning_muon.compat.lightning import begin_in_epoch, set_batches_read

KEY = "lightning_muon"  # In a checkpoint of a Trainer, for what Lightning does not save.


class TrainingData:
    """The place of a run in its training data, and the states of its random generators; one for each run."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []
        self.saved: dict[str, Any] = {}  # States of this rank in the checkpoint, until the first batch.
        self.num_read = 0  # Batches that the first pass of each loader leaves out.
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
        own = {"now": random_state(), "loaders": [order.state() for order in self._orders]}
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, states if dist.get_rank() == 0 else None)
        epoch = self.epoch_to_come(trainer)
        if self._epoch_of_batch >= 0:  # Lightning counts one too few in a run that began at the end of an epoch.
            epoch = self._epoch_of_batch + trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        return {"num_data_ranks": num_data_ranks, "random": states, "epoch": epoch}

    def resume(self, checkpoint: Mapping[str, Any], num_data_ranks: int, *, by_steps: bool) -> None:
        """Go on where a checkpoint was saved, whose progress is made that of so many ranks; local, alike on all.

        With as many ranks as then each takes its random states, too. Checkpoints of other strategies begin the epoch
        anew. ``by_steps``: the Trainer has ``max_steps``.
        """
        saved, loops = checkpoint.get(KEY), checkpoint.get("loops", {}).get("fit_loop")
        if saved is None or loops is None:
            return
        self._resumed_epoch, before = saved["epoch"], saved["num_data_ranks"]
        if num_before := begin_in_epoch(loops, self._resumed_epoch, by_steps=by_steps):
            self.num_read, num_again = divmod(num_before * before, num_data_ranks)
            set_batches_read(loops, self.num_read)
            if num_again:
                text = f"{before} ranks had read {num_before} batches each of this epoch, which {num_data_ranks} ranks "
                warn_on_first_rank(f"{text}cannot share equally: {num_again} batches are read again", stacklevel=2)
        if len(saved["random"]) == dist.get_world_size():
            self.saved = dict(saved["random"][dist.get_rank()])
        # Lightning says it of all that have no state_dict.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")

    def follow(self, loader: Any, epoch: int) -> None:
        """Let the first pass of a loader for training be the rest of the one in which the checkpoint was saved; local.

        One with a ``load_state_dict`` is left to Lightning; what has no order of indices begins anew, with a warning.
        """
        has_order = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if hasattr(loader, "load_state_dict"):
            return
        if self.num_read and not has_order:
            text = f"the run goes on in mid-epoch, and this {type(loader).__name__} begins the epoch anew: take a "
            text += "DataLoader of a map-style dataset, or a StatefulDataLoader of torchdata"
            warn_on_first_rank(text, stacklevel=2)
        if epoch != self._epoch:  # Trainer(reload_dataloaders_every_n_epochs=...)
            self.release()
            self._orders, self._epoch = [], epoch
        if has_order and not any(order.loader is loader for order in self._orders):
            saved = dict(enumerate(self.saved.get("loaders", ())))
            self._orders.append(_Order(loader, self, saved.get(len(self._orders), {})))

    def batch_begins(self, epoch: int) -> None:
        """Note the epoch; the first batch of a resumed run restores the random states, if no loader has; local."""
        if "now" in self.saved and not self._orders:
            set_random_state(self.saved["now"])
        self.saved, self.num_read, self._epoch_of_batch = {}, 0, epoch

    def release(self) -> None:
        """Leave the loaders as they were; local."""
        for order in self._orders:
            vars(order.loader)[order.place] = order.indices


class _Order:
    """What a loader has in place of its sampler: the indices, and the states of generators before they are drawn."""

    def __init__(self, loader: DataLoader[Any], data: TrainingData, saved: Mapping[str, Any]) -> None:
        self.loader, self._data, self._num_skipped = loader, data, data.num_read
        self.place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.indices: Any = getattr(loader, self.place)
        own = (getattr(getattr(self.indices, "sampler", self.indices), "generator", None), loader.generator)
        self._generator = next((each for each in own if isinstance(each, torch.Generator)), None)
        # A loader that is shorter than another one has begun again; a sampler need not have a length.
        with suppress(TypeError, NotImplementedError, ZeroDivisionError):
            self._num_skipped %= len(self.indices)
        self._resumed = saved.get("start") if self._num_skipped else None
        if saved and not self._num_skipped:  # The pass begins next, and draws from them.
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
        now = (self._data.saved.pop("now", None) or random_state()) if self._num_skipped else None
        if self._resumed is not None:
            set_random_state(self._resumed, self._generator)
        num_skipped, self._num_skipped, self._resumed = self._num_skipped, 0, None
        self._start, indices = random_state(self._generator), iter(self.indices)
        for _ in range(num_skipped):
            next(indices, None)
        if now is not None:
            set_random_state(now)
        yield from indices

    def state(self) -> dict[str, Any]:
        """The random states when the present pass began, and that of the loader's own generator now; local."""
        return {"start": self._start, "generator": random_state(self._generator).get("generator")}


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
