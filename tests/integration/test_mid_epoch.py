"""A run resumed in the middle of an epoch has the batches that are left, and the random states of the unbroken run."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_muon.checkpoint.loading import newest_first
from lightning_muon.integrations.registry import make
from tests.integration import training
from tests.support.processes import ProcessPool

_NUM_BATCHES = 6


class _Augmented(Dataset[Any]):
    """Rows that are drawn at random a little when they are read."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Tensor:
        noise = torch.rand(()) + random.random() + np.random.random()
        return torch.cat([torch.tensor([float(row)]), torch.sin(torch.arange(4.0) * (1 + row)) + 0.1 * noise])


class _StatefulStream(IterableDataset[Any]):
    """Begins where it was told to, also in every later pass, as streams of `datasets` do."""

    def __init__(self) -> None:
        self.place = self.begin = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.begin + 1, 13):
            self.place = number
            yield torch.arange(5.0) + number / 60

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def _loader(kind: str, batch_size: int = 2) -> Any:
    rows = TensorDataset(torch.rand(24, 5, generator=torch.Generator().manual_seed(1)))
    if kind == "torchdata":
        return StatefulDataLoader(rows, batch_size=2, sampler=DistributedSampler(rows))
    if kind == "stateful stream":
        return StatefulDataLoader(_StatefulStream(), batch_size=2, num_workers=1, persistent_workers=True)
    if kind == "stream":
        return DataLoader(training.Stream(torch.arange(60.0).reshape(12, 5) / 60), batch_size=2)
    data: Any = rows if kind in ("plain", "worker", "batches") else _Augmented(24 if kind == "augmented" else 12)
    options: dict[str, Any] = {"shuffle": True} if kind in ("random", "generator") else {}
    if kind == "batches":  # The user's own for each rank; a list does not say its batch size.
        own = list(range(dist.get_rank(), 24, dist.get_world_size()))
        return DataLoader(
            data, batch_sampler=[own[place : place + batch_size] for place in range(0, len(own), batch_size)]
        )
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(5)
    return DataLoader(data, batch_size=batch_size, num_workers=int(kind == "worker"), **options)


def _run(
    directory: str,
    kind: str,
    resume: str | None,
    saved: Sequence[int] = (),
    *,
    num_epochs: int = 2,
    num_steps: int = -1,
    window: int = 1,
    batch_size: int = 2,
    **options: Any,
) -> list[Any]:
    """Epoch, batch and loss of each batch, with checkpoints of ``saved`` steps, of each epoch with ``num_steps``.

    With a ``window`` of accumulated micro-batches ``saved`` are numbers of these.
    """
    pl, seen = training.load(), list[Any]()

    class Checkpoints(pl.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if window > 1 and (number := trainer.fit_loop.total_batch_idx + 1) in saved:
                trainer.save_checkpoint(f"{directory}/step={number}.ckpt")
            elif trainer.global_step in saved and window == 1:
                super().on_train_batch_end(trainer, *others)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = batch[0] if isinstance(batch, list) else batch
            loss = self.net(rows[:, 1:]).square().mean() + 0 * random.random() * float(np.random.random())
            seen.append((self.current_epoch, batch_idx, rows.tolist(), float(loss)))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + int(resume is not None))  # Another process begins with other random states.
    when = {"every_n_train_steps": 1, "save_on_train_epoch_end": False} if num_steps == -1 else {"every_n_epochs": 1}
    callback = Checkpoints(dirpath=directory, filename="{step}", save_top_k=-1, **when)
    fitter = training.trainer(
        pl,
        strategy=training.strategy_class()(**options),
        callbacks=[callback],
        enable_checkpointing=True,
        use_distributed_sampler=kind in ("plain", "worker", "augmented", "torchdata"),
        reload_dataloaders_every_n_epochs=int(kind == "augmented"),
        max_epochs=num_epochs,
        max_steps=num_steps,
        accumulate_grad_batches=window,
    )
    loader = _loader(kind, batch_size)
    before = vars(loader).copy()
    fitter.fit(Model(), loader, ckpt_path=resume, weights_only=False)
    if num_steps != -1:
        fitter.save_checkpoint(f"{directory}/end.ckpt")
    assert {key: vars(loader)[key] for key in ("sampler", "batch_sampler")}.items() <= before.items()
    return seen


def _rows(seen: list[Any], epoch: int) -> list[Any]:
    """The rows of an epoch, in the order in which they came."""
    return [row for number, _, batch, _ in seen if number == epoch for row in batch]


# Name -> loader, the batches behind which it is saved, options, and those of what is resumed. An epoch has 6 batches.
_CASES: dict[str, tuple[str, list[int], dict[str, Any], dict[str, Any]]] = {
    "worker": ("worker", [5, 6, 8], {}, {}),
    "augmented": ("augmented", [6, 8], {}, {}),
    "generator": ("generator", [6, 8], {}, {}),
    # A loader with a state of its own draws a seed at the beginning of an epoch before the random states are back.
    "torchdata": ("torchdata", [8], {}, {}),
    "stateful stream": ("stateful stream", [8], {}, {}),
    "accumulated, worker": ("worker", [2, 5, 10], {"window": 3}, {}),
    "accumulated, augmented": ("augmented", [2, 5, 10], {"window": 3}, {}),
    # Weights are whole when it is saved.
    "accumulated, whole": ("random", [2, 5, 10], {
        "window": 3, "reshard_after_backward": False, "save_distributed_checkpoint": "auto",
    }, {}),
    # Lightning itself trains with one batch more, and then begins the epoch.
    "so many steps": ("random", [6], {"num_epochs": -1, "num_steps": 13}, {}),
    "ends of epochs": ("plain", [6, 12], {"num_epochs": 3}, {}),
    "zero2": ("random", [4, 7], {}, {"sharding": "zero2"}),
    "ddp": ("random", [4, 7], {}, {"sharding": "ddp"}),
}  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_a_run_goes_on_with_the_next_batch(gloo: ProcessPool, tmp_path: Path, name: str) -> None:
    kind, saved, options, others = _CASES[name]
    folder = tmp_path / "whole"
    whole = gloo.run(_run, str(folder), kind, None, saved, **options, world_size=2)
    if kind == "torchdata":  # Each row once in an epoch, in another order in the next one.
        first, second = ([_rows(each, epoch) for each in whole] for epoch in range(2))
        assert len(set(map(str, chain(*first)))) == 24 and first != second
        assert sorted(chain(*first)) == sorted(chain(*second))
    for number in saved:
        begin = number - number % options.get("window", 1)  # An accumulated batch begins anew.
        checkpoint, rest = f"{folder}/step={number}.ckpt", tmp_path / str(number)
        resumed = gloo.run(_run, str(rest), kind, checkpoint, saved, **options, **others, world_size=2)
        folder = rest if name == "ends of epochs" else folder  # What is resumed is resumed again.
        for before, after in zip(whole, resumed, strict=True):
            *rows, losses = zip(*after, strict=True)
            *expected, expected_losses = zip(*before[begin:], strict=True)
            assert rows == expected, f"saved behind batch {number}"
            if others:  # Dropout is the same; other shards are added up in another order.
                assert losses == pytest.approx(expected_losses, rel=1e-5)
            elif kind != "stateful stream":  # Its workers start anew behind that epoch, with other seeds of dropout.
                assert losses == expected_losses, f"saved behind batch {number}"


def _warnings_of(kind: str, checkpoint: str) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        _run(f"{checkpoint}.more", kind, checkpoint)
    of_rows = ("goes on in mid-epoch", "lost or read twice")
    return [str(each.message) for each in caught if any(text in str(each.message) for text in of_rows)]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "text"),
    [
        ("stream", 2, "this DataLoader begins the epoch anew: take a DataLoader of a map-style dataset, or a Stateful"),
        ("torchdata", 1, "of one of 2 ranks, and now there are 1: rows of this epoch"),
        ("torchdata", 2, None),
    ],
)
def test_what_cannot_go_on_is_warned_of(
    gloo: ProcessPool, tmp_path: Path, kind: str, num_ranks: int, text: str | None
) -> None:
    gloo.run(_run, str(tmp_path), kind, None, [2], num_epochs=1, world_size=2)
    first, *others = gloo.run(_warnings_of, kind, f"{tmp_path}/step=2.ckpt", world_size=num_ranks)
    assert len(first) == (text is not None) and all(text in each for each in first) and not any(others)


@pytest.mark.parametrize("kind", ["plain", "random"])
def test_a_run_that_ended_in_mid_epoch_is_extended(gloo: ProcessPool, tmp_path: Path, kind: str) -> None:
    """Lightning counts the epoch as ended, and shuffles as in the next one."""
    options, ends = {"num_epochs": -1, "world_size": 2}, [4, _NUM_BATCHES + 3, 2 * _NUM_BATCHES + 1]
    whole = gloo.run(_run, str(tmp_path / "whole"), kind, None, num_steps=ends[-1], **options)
    # Saved at the end of the epoch, or by the program after the end of the run.
    names = ["step={}.ckpt", "end.ckpt"][:: 1 if kind == "plain" else -1]
    for (first, last), name in zip(pairwise([0, *ends]), ["", *names], strict=True):
        checkpoint = f"{tmp_path}/{first}/{name.format(first)}" if first else None
        found = gloo.run(_run, f"{tmp_path}/{last}", kind, checkpoint, num_steps=last, **options)
        assert found == [each[first:last] for each in whole], f"{name} of step {first}"


@pytest.mark.parametrize("kind", ["plain", "batches"])
def test_another_number_of_ranks_reads_the_rest_of_the_epoch(gloo: ProcessPool, tmp_path: Path, kind: str) -> None:
    whole = gloo.run(_run, str(tmp_path / "whole"), kind, None, [2], world_size=2)
    checkpoint = f"{tmp_path}/whole/step=2.ckpt"
    for batch_size in (2, 4):
        (rest,) = gloo.run(_run, str(tmp_path / "rest"), kind, checkpoint, batch_size=batch_size, world_size=1)
        assert sorted(_rows(rest, 0)) == sorted(_rows(whole[0][2:] + whole[1][2:], 0))
        assert sorted(_rows(rest, 1)) == sorted(_rows(whole[0] + whole[1], 1))


def _resume_by_itself(directory: str, steps: int, every: int) -> tuple[int, str, list[str], list[str]]:
    """The first step of a run whose program names no checkpoint, the best one by a metric of each rank, and warnings.

    Third are the checkpoints of AutoResume.
    """
    package = training.PACKAGES[1]
    pl, begun, rank = training.load(package), list[int](), float(os.environ["RANK"])
    model = training.language_model(pl)
    type(model).on_train_batch_start = lambda self, *_: self.log_dict({"own": rank + self.global_step % 3, "step": 1.0})
    type(model).on_train_start = lambda self: begun.append(self.trainer.global_step)
    best = pl.callbacks.ModelCheckpoint(
        f"{directory}/best", monitor="own", filename="{own:.0f}", every_n_train_steps=2, save_top_k=2
    )
    with warnings.catch_warnings(record=True, action="always") as caught:
        auto = make("AutoResume", package)(f"{directory}/auto", every_n_train_steps=every)
        fitter = training.trainer(
            pl,
            strategy=training.strategy_class(package)(),
            callbacks=[auto, best],
            enable_checkpointing=True,
            max_steps=steps,
            max_epochs=-1,
        )
        fitter.fit(model, training.loader(), weights_only=False)
    fitter.test(model, training.loader(), ckpt_path="best", verbose=False, weights_only=False)
    assert fitter.checkpoint_callback is best and fitter.ckpt_path == best.best_model_path
    texts = [str(each.message) for each in caught]
    return begun[0], best.best_model_path, os.listdir(f"{directory}/auto"), [t for t in texts if "ckpt" in t]


def test_a_program_goes_on_from_the_newest_intact_one(gloo: ProcessPool, tmp_path: Path) -> None:
    """Two of AutoResume are kept, with other intervals, too, and none of them is the best."""
    auto = tmp_path / "auto"
    for every, began, older, steps in ((2, 0, 4, 6), (2, 6, 8, 10), (3, 10, 10, 12)):
        for found in gloo.run(_resume_by_itself, str(tmp_path), steps, every, world_size=2):
            assert found[0] == began and found[1] == f"{tmp_path}/best/own=0.ckpt" and found[3] == []
            saved = {each.partition("step=")[2] for each in found[2]} - {""}
            assert saved == {f"{older}.ckpt", f"{steps}.ckpt"}
        (auto / "train.log").touch()
    newest, second = newest_first(auto)
    shard = newest / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for found in gloo.run(_resume_by_itself, str(tmp_path), 16, 4, world_size=2):
        assert found[0] == 10 and "step=12" in newest.name and "step=10" in second.name
        text = f"{newest} is damaged:\n  {shard} is not as it was written\nGoing on from {second}"
        assert len(found[3]) in (0, 1) and all(text in each for each in found[3])
