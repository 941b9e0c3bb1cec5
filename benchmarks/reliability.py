"""What happens to runs and checkpoints that are broken on purpose, and how much time of a training a save takes.

    python -m benchmarks.reliability
    python -m benchmarks.reliability damage
    python -m benchmarks.reliability kills --tries 9 --restarts 6 --seed 1
    python -m benchmarks.reliability saving --accelerator cuda --width 2048 --blocks 12 --rows 32000

Without a word it prints both tables of docs/reliability.md.

damage: to checkpoints of ours, of torch.distributed.checkpoint, and to a file of torch.save. Two ranks save the weights
and the momenta of a small model twice. Each damage is made to one file alone; a load on both ranks then finds it by an
error, or does not. A load that does not raise and gives the bytes that were saved counts as well: the damage was in
bytes that mean nothing.

kills: trainings of two processes are killed while they save, lose a rank under torchrun, are told to end, or find their
disk full. An attempt is right if what follows has losses, and weights, equal to the last bit to those of a run that
nobody breaks. The tests of the suite make the same attempts, at fixed places.

saving: seconds of a step alone, while ``async_save=True`` writes, and of a save, with and without hashes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import Embedding, Linear, ReLU, Sequential

from benchmarks.ranks import run_on_ranks
from lightning_muon import ParallelMuonFabricStrategy
from lightning_muon.checkpoint import manifest
from lightning_muon.checkpoint.background import THREAD
from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import write_checkpoint
from tests.integration import test_killed_while_saving as killing
from tests.integration import test_torchrun as launching
from tests.integration.checkpoint.test_full_disk import require_unharmed
from tests.support.processes import ProcessPool, RanksFailedError

Damage = Callable[[Path, Path], None]


def _state(step: int) -> dict[str, Any]:
    torch.manual_seed(1000 * step + dist.get_rank())
    return {f"{name}.{dist.get_rank()}": torch.randn(64, 96) for name in ("weight", "momentum")}


def _load_shards(path: Path) -> dict[str, Tensor]:
    state = {name: torch.zeros_like(value) for name, value in _state(0).items()}
    dcp.load(state, checkpoint_id=path)
    return state


def _save_ours(path: Path, step: int) -> None:
    write_checkpoint(path, _state(step), {"step": step}, metadata_name="meta.pt")


def _load_ours(path: Path) -> dict[str, Tensor]:
    Checkpoint.open(path, metadata_name="meta.pt", weights_only=True)
    return _load_shards(path)


def _gathered(step: int) -> dict[str, Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _state(step))
    return {name: value for part in parts for name, value in part.items()}


def _save_our_file(path: Path, step: int) -> None:
    write_checkpoint(path, _gathered(step), {"step": step}, metadata_name=None)


def _load_our_file(path: Path) -> dict[str, Tensor]:
    content = Checkpoint.open(path, metadata_name="meta.pt", weights_only=True).content
    return {name: content[name] for name in _state(0)}


def _save_file(path: Path, step: int) -> None:
    content = _gathered(step)
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()


def _load_file(path: Path) -> dict[str, Tensor]:
    content = torch.load(path, weights_only=True)
    return {name: content[name] for name in _state(0)}


FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], dict[str, Tensor]]]] = {
    "lightning-muon, shards": (_save_ours, _load_ours),
    "torch.distributed.checkpoint": (lambda path, step: dcp.save(_state(step), checkpoint_id=path), _load_shards),
    "lightning-muon, one file": (_save_our_file, _load_our_file),
    "torch.save (Lightning's DDP)": (_save_file, _load_file),
}


def _change(change: Callable[[bytes], bytes], path: Path, _: Path) -> None:
    path.write_bytes(change(path.read_bytes()))


def _flip(seed: int, content: bytes) -> bytes:
    changed = bytearray(content)
    changed[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
    return bytes(changed)


def _zeros(seed: int, content: bytes) -> bytes:
    place = random.Random(seed).randrange(max(1, len(content) - 64))
    return content[:place] + bytes(64) + content[place + 64 :]


def _cut(seed: int, content: bytes) -> bytes:
    return content[: random.Random(seed).randrange(len(content))]


def damages(files: list[str]) -> Iterator[tuple[str, str, Damage]]:
    """Kind, file, and what is done to it, given its path and that of the same file of the earlier save."""
    by_kind: dict[str, list[str]] = {}
    for name in files:
        by_kind.setdefault(f"bit of {name}" if name in BESIDE_DATA else "bit of data", []).append(name)
    changes = {kind: (_flip, 40, names) for kind, names in by_kind.items()}
    changes |= {"page of zeros": (_zeros, 20, files), "cut off": (_cut, 20, files)}
    for kind, (change, number, names) in changes.items():
        for seed in range(number):
            yield kind, names[seed % len(names)], partial(_change, partial(change, seed))
    for name in files:
        yield "file missing", name, lambda path, _: path.unlink()
        if len(files) > 1:
            yield "file of another save", name, lambda path, other: shutil.copy(other, path)


def _finds(load: Callable[[Path], dict[str, Tensor]], path: Path) -> bool:
    """Whether a load on all ranks raises; or else whether what it gives is what was saved."""
    try:
        loaded = load(path)
        is_right = all(torch.equal(loaded[name], value) for name, value in _state(2).items())
    except BaseException:
        return True
    return is_right


def count(folder: str, name: str) -> dict[str, list[int]]:
    """Kind of damage -> how often it was found, and tried; on rank 0. Collective over all ranks."""
    save, load = FORMATS[name]
    path, earlier, found = Path(folder) / "last.ckpt", Path(folder) / "earlier.ckpt", dict[str, list[int]]()
    save(earlier, 1)
    save(path, 2)
    files = sorted(file.name for file in path.iterdir()) if path.is_dir() else [""]
    for kind, file, damage in damages(files):
        place, other = (path / file, earlier / file) if file else (path, earlier)
        if dist.get_rank() == 0:
            content = place.read_bytes()
            damage(place, other)
        dist.barrier()
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, _finds(load, path))
        if dist.get_rank() == 0:
            place.write_bytes(content)
            entry = found.setdefault(kind, [0, 0])
            entry[0] += all(results)
            entry[1] += 1
        dist.barrier()
    return found


BESIDE_DATA = (".metadata", "meta.pt", "manifest.json")
KINDS = ("bit of data", *(f"bit of {name}" for name in BESIDE_DATA))
KINDS += ("page of zeros", "cut off", "file missing", "file of another save")


def print_damages() -> None:
    """The table of what loads find."""
    print(f"| found / tried | {' | '.join(KINDS)} |\n|{' --- |' * (1 + len(KINDS))}")
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            found: Any = run_on_ranks(count, folder, name, num_ranks=2)
        cells = [f"{found[kind][0]} / {found[kind][1]}" if kind in found else "" for kind in KINDS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


class KillSeries:
    """Kills of all ranks of a training at random changes of its second and third save over ``last``."""

    def __init__(self, pool: ProcessPool, folder: Path, draw: random.Random) -> None:
        self._pool, self._draw = pool, draw
        self._whole = pool.run(killing.fit, str(folder / "whole"), world_size=2)[0]
        self._num_changes = pool.run_fresh(killing.count_changes, str(folder / "counted"), world_size=2)

    def attempt(self, folder: Path, *, seconds: float) -> str:
        """Kill when a rank is about to change something, which comes ``seconds`` late; which epoch was left."""
        rank = self._draw.randrange(2)
        num_changes = self._num_changes[rank]
        # The first of three saves has the fewest.
        place = rank, killing.CHANGES, re.escape(str(folder))
        number = self._draw.randint(num_changes // 3 + 1, num_changes)
        try:
            self._pool.run_fresh(killing.fit_killed, str(folder), *place, count=number, seconds=seconds, world_size=2)
        except RanksFailedError:
            num_epochs = killing.require_resumed(self._pool, folder, self._whole)
            return f"went on from epoch {num_epochs}"
        raise AssertionError(f"change {number} of rank {rank} did not come")


def print_attempts(name: str, number: int, attempt: Callable[[Path], str]) -> None:
    """A row: how many of so many attempts, each in a folder of its own, were right, and what they did."""
    done = Counter[str]()
    for _ in range(number):
        with tempfile.TemporaryDirectory() as folder:
            try:
                done[attempt(Path(folder))] += 1
            except PermissionError as error:
                print(f"| {name} | not tried: {error} | |", flush=True)
                return
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
    what = "; ".join(f"{text}: {times}" for text, times in sorted(done.items()))
    print(f"| {name} | {done.total()} / {number} | {what} |", flush=True)


def print_kills(arguments: argparse.Namespace) -> None:
    """The table of what happens to runs."""
    # A shell that starts a program in the background lets it, and all that it starts, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    draw, pool = random.Random(arguments.seed), ProcessPool()
    print("| broken | right / tried | what happened |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        kills = KillSeries(pool, Path(folder), draw)
        for who, seconds in (("", 0.0), (", one of them slow", 0.5)):
            name = f"all ranks killed while they overwrite `last`{who}"
            print_attempts(name, arguments.tries, partial(kills.attempt, seconds=seconds))
        (Path(folder) / "program").mkdir()
        whole = launching.end(launching.start(Path(folder) / "program"), Path(folder) / "program")

    def restart(folder: Path) -> str:
        launching.require_restarted(whole, folder, kill_at=draw.randrange(1, launching.NUM_STEPS))
        return "came back by itself, with equal losses"

    def told(launcher: tuple[str, ...], number: int, code: int, folder: Path) -> str:
        num_steps = draw.randrange(1, launching.NUM_STEPS - 2)
        launching.require_saved(whole, folder, launcher, number, code, num_steps=num_steps)
        return "saved in the middle of the epoch; no step lost or run again"

    def full_disk(folder: Path) -> str:
        require_unharmed(pool, folder)
        return "the same error on all ranks, the old checkpoint intact, equal losses"

    print_attempts("a rank killed under `torchrun --max-restarts`", arguments.restarts, restart)
    print_attempts("SIGTERM to torchrun", arguments.restarts, partial(told, launching.TORCHRUN, signal.SIGTERM, 1))
    print_attempts("SIGTERM to the program", arguments.restarts, partial(told, (), signal.SIGTERM, 143))
    print_attempts("Ctrl-C to the program", arguments.restarts, partial(told, (), signal.SIGINT, 130))
    print_attempts("disk full, then read-only", 1, full_disk)
    pool.close()


class _Training:
    """A Fabric program whose steps are short compared with the writing of its state."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        strategy = ParallelMuonFabricStrategy(async_save=True)
        self.fabric = Fabric(accelerator=arguments.accelerator, devices=arguments.ranks, strategy=strategy)
        self.fabric.launch()
        width = arguments.width
        blocks = [
            Sequential(Linear(width, 4 * width), ReLU(), Linear(4 * width, width)) for _ in range(arguments.blocks)
        ]
        model = Sequential(Embedding(arguments.rows, width), *blocks)
        self.model, self.optimizer = self.fabric.setup(model, torch.optim.AdamW(model.parameters()))
        self.tokens = torch.randint(arguments.rows, (arguments.tokens,), device=self.fabric.device)

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and those that this thread was on a processor."""
        start, start_cpu = time.perf_counter(), time.thread_time()
        self.fabric.backward(self.model(self.tokens).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, time.thread_time() - start_cpu

    def save(self, path: Path, *, steps: bool) -> tuple[float, list[tuple[float, float]], float]:
        """Seconds of the call, of each step that was taken while it was written, and from the call to the commit."""
        start = time.perf_counter()
        self.fabric.save(path, {"model": self.model, "optimizer": self.optimizer})
        called, during = time.perf_counter() - start, list[tuple[float, float]]()
        while steps and self.fabric.broadcast(any(each.name == THREAD for each in threading.enumerate())):
            during.append(self.step())
        self.fabric.strategy.finish_saving()
        return called, during[:-1], time.perf_counter() - start


class _NoHash:
    def __init__(self, *_: bytes) -> None:
        pass

    def update(self, data: Any) -> None:
        """Hash nothing."""

    def hexdigest(self) -> str:
        return "0" * 64


def time_saving(arguments: argparse.Namespace) -> None:
    """Print what saving costs; each figure is a median over rounds that take turns. Collective over all ranks."""
    training, found = _Training(arguments), dict[str, list[float]]()

    def note(name: str, *seconds: float) -> None:
        found.setdefault(name, []).extend(seconds)

    def note_steps(name: str, steps: list[tuple[float, float]]) -> None:
        note(name, *(seconds for seconds, _ in steps))
        note(f"{name}, on a processor", *(seconds for _, seconds in steps))

    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(training.fabric.broadcast(folder)) / "last.ckpt"
        training.save(path, steps=False)
        for _ in range(arguments.rounds):
            note_steps("step", [training.step() for _ in range(10)])
            called, during, _ = training.save(path, steps=True)
            note("call of save", called)
            note_steps("step while it is written", during)
            note("save without steps", training.save(path, steps=False)[2])
            with mock.patch.object(manifest, "hashlib", SimpleNamespace(sha256=_NoHash)):
                note("save without steps and hashes", training.save(path, steps=False)[2])
        size = sum(file.stat().st_size for file in path.iterdir())
    if training.fabric.is_global_zero:
        print(f"{size / 1e6:.0f} MB, {arguments.ranks} ranks")
        for name, values in found.items():
            print(f"{name}: {statistics.median(values):.4f} s (median of {len(values)})")
        for kind in ("", ", on a processor"):
            ratio = statistics.mean(found[f"step while it is written{kind}"]) / statistics.mean(found[f"step{kind}"])
            print(f"mean step while it is written / mean step{kind}: {ratio:.3f}")


def main() -> None:
    """Print the tables of docs/reliability.md, or what saving costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("damage", "kills", "saving"), help="default: damage and kills")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--folder", help="where to save")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    numbers = {"tries": 9, "restarts": 6}
    numbers |= {"ranks": 1, "width": 256, "blocks": 2, "rows": 200_000, "tokens": 512, "rounds": 5}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if arguments.what == "saving":
        time_saving(arguments)
        return
    if arguments.what != "kills":
        print_damages()
    if arguments.what != "damage":
        print(f"--seed {arguments.seed}")
        print_kills(arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
