"""What happens to checkpoints that are damaged, and to runs that are broken, on purpose.

    python -m tests.long.reliability damage
    python -m tests.long.reliability kills --tries 9 --restarts 6 --seed 1

damage: to checkpoints of ours, of torch.distributed.checkpoint, and to a file of torch.save. Two ranks save the weights
and the momenta of a small model twice. Each damage is made to one file alone; a load on both ranks then finds it by an
error, or does not. A load that does not raise and gives the bytes that were saved counts as well: the damage was in
bytes that mean nothing.

kills: trainings of two processes are killed while they save, lose a rank under torchrun, are told to end, or find their
disk full. An attempt is right if what follows has losses, and weights, equal to the last bit to those of a run that
nobody breaks. The tests of the suite make the same attempts, at fixed places.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Format, write
from tests.integration import test_killed_while_saving as killing
from tests.integration.checkpoint.test_full_disk import require_unharmed
from tests.long import test_torchrun as launching
from tests.support.processes import ProcessPool, RanksFailedError

Damage = Callable[[Path, Path], None]
BESIDE_DATA = (".metadata", "meta.pt", "manifest.json")
KINDS = ("bit of data", *(f"bit of {name}" for name in BESIDE_DATA))
KINDS += ("page of zeros", "cut off", "file missing", "file of another save")


def _state(step: int) -> dict[str, Any]:
    torch.manual_seed(1000 * step + dist.get_rank())
    return {f"{name}.{dist.get_rank()}": torch.randn(64, 96) for name in ("weight", "momentum")}


def _gathered(step: int) -> dict[str, Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, _state(step))
    return {name: value for part in parts for name, value in part.items()}


def _save_ours(path: Path, step: int, *, whole: bool) -> None:
    how = Format(whole=whole, metadata_name=None if whole else "meta.pt")
    write({path: ({"": _gathered(step)} if whole else _state(step), {"step": step})}, how)


def _save_file(path: Path, step: int) -> None:
    content = _gathered(step)
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()


def _load_shards(path: Path) -> dict[str, Tensor]:
    state = {name: torch.zeros_like(value) for name, value in _state(0).items()}
    dcp.load(state, checkpoint_id=path)
    return state


def _load_ours(path: Path, *, whole: bool) -> dict[str, Tensor]:
    opened = Checkpoint.open(path, metadata_name="meta.pt", weights_only=True)
    return {name: opened.content[name] for name in _state(0)} if whole else _load_shards(path)


def _load_file(path: Path) -> dict[str, Tensor]:
    content = torch.load(path, weights_only=True)
    return {name: content[name] for name in _state(0)}


FORMATS: dict[str, tuple[Callable[[Path, int], Any], Callable[[Path], dict[str, Tensor]]]] = {
    "lightning-muon, shards": (partial(_save_ours, whole=False), partial(_load_ours, whole=False)),
    "torch.distributed.checkpoint": (lambda path, step: dcp.save(_state(step), checkpoint_id=path), _load_shards),
    "lightning-muon, one file": (partial(_save_ours, whole=True), partial(_load_ours, whole=True)),
    "torch.save (Lightning's DDP)": (_save_file, _load_file),
}


def _change(change: Callable[[bytes], bytes], path: Path, _: Path) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(seed: int, content: bytes) -> bytes:
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
    changes = {kind: (flip, 40, names) for kind, names in by_kind.items()}
    changes |= {"page of zeros": (_zeros, 20, files), "cut off": (_cut, 20, files)}
    for kind, (change, number, names) in changes.items():
        for seed in range(number):
            yield kind, names[seed % len(names)], partial(_change, partial(change, seed))
    for name in files:
        yield "file missing", name, lambda path, _: path.unlink()
        if len(files) > 1:
            yield "file of another save", name, lambda path, other: shutil.copy(other, path)


def _finds(load: Callable[[Path], dict[str, Tensor]], path: Path) -> bool:
    """Whether a load raises, or else gives what was saved."""
    try:
        loaded = load(path)
    except BaseException:
        return True
    return all(torch.equal(loaded[name], value) for name, value in _state(2).items())


def count_found(folder: str, name: str) -> dict[str, list[int]]:
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


def print_damages() -> None:
    """The table of what loads find."""
    print(f"| found / tried | {' | '.join(KINDS)} |\n|{' --- |' * (1 + len(KINDS))}")
    pool = ProcessPool()
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, list[int]] = pool.run(count_found, folder, name, world_size=2, timeout=600)[0]
        cells = [f"{found[kind][0]} / {found[kind][1]}" if kind in found else "" for kind in KINDS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    pool.close()


class KillSeries:
    """Kills of all ranks of a training at random changes of its second and third save over ``last``."""

    def __init__(self, pool: ProcessPool, folder: Path, draw: random.Random) -> None:
        self._pool, self._draw = pool, draw
        self._whole = pool.run(killing.fit, str(folder / "whole"), world_size=2)[0]
        self._num_changes = pool.run_fresh(killing.count_changes, str(folder / "counted"), world_size=2)

    def attempt(self, folder: Path, *, seconds: float) -> str:
        """Kill when a rank is about to change something, which comes ``seconds`` late; which epoch was left."""
        for number in count(1):
            rank, within = self._draw.randrange(2), folder / str(number)
            # The first of three saves has the fewest; the number of all differs a little between runs.
            place, num_changes = (rank, killing.CHANGES, re.escape(str(within))), self._num_changes[rank]
            how = {"count": self._draw.randint(num_changes // 3 + 1, num_changes), "seconds": seconds}
            try:
                self._pool.run_fresh(killing.fit_killed, str(within), *place, **how, world_size=2)
            except RanksFailedError:
                return f"went on from epoch {killing.require_resumed(self._pool, within, self._whole)}"
        raise AssertionError


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


def print_kills(*, tries: int, restarts: int, seed: int) -> None:
    """The table of what happens to runs."""
    # A shell that starts a program in the background lets it, and all that it starts, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    draw, pool = random.Random(seed), ProcessPool()
    print("| broken | right / tried | what happened |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        kills = KillSeries(pool, Path(folder), draw)
        for who, seconds in (("", 0.0), (", one of them slow", 0.5)):
            name = f"all ranks killed while they overwrite `last`{who}"
            print_attempts(name, tries, partial(kills.attempt, seconds=seconds))
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

    print_attempts("a rank killed under `torchrun --max-restarts`", restarts, restart)
    for name, launcher, number, code in (
        ("SIGTERM to torchrun", launching.TORCHRUN, signal.SIGTERM, 1),
        ("SIGTERM to the program", (), signal.SIGTERM, 143),
        ("Ctrl-C to the program", (), signal.SIGINT, 130),
    ):
        print_attempts(name, restarts, partial(told, launcher, number, code))
    print_attempts("disk full, then read-only", 1, full_disk)
    pool.close()


def main() -> None:
    """Print a table of docs/checkpoints.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("damage", "kills"))
    parser.add_argument("--tries", type=int, default=9, help="kills while the ranks save")
    parser.add_argument("--restarts", type=int, default=6, help="of each kind of signal")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    if arguments.what == "damage":
        print_damages()
        return
    print(f"--seed {arguments.seed}")
    print_kills(tries=arguments.tries, restarts=arguments.restarts, seed=arguments.seed)


if __name__ == "__main__":
    main()
