"""How often damage to a checkpoint is found, on purpose: the table of docs/checkpoints.md.

    python -m tests.long.reliability

To checkpoints of ours, of torch.distributed.checkpoint, and to a file of torch.save. Two ranks save the weights and
the momenta of a small model twice. Each damage is made to one file alone; a load on both ranks then finds it by an
error, or does not. A load that does not raise and gives the bytes that were saved counts as well: the damage was in
bytes that mean nothing.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Format, write
from tests.support.processes import ProcessPool

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


FORMATS = (
    "lightning-muon, shards",
    "torch.distributed.checkpoint",
    "lightning-muon, one file",
    "torch.save (Lightning's DDP)",
)


def _save(name: str, path: Path, step: int) -> None:
    whole = name in FORMATS[2:]
    content = _gathered(step) if whole else _state(step)
    if name.startswith("lightning-muon"):
        how = Format(whole=whole, metadata_name=None if whole else "meta.pt")
        write({path: ({"": content} if whole else content, {"step": step})}, how)
    elif whole:
        if dist.get_rank() == 0:
            torch.save(content, path)
        dist.barrier()
    else:
        dcp.save(content, checkpoint_id=path)


def _load(name: str, path: Path) -> dict[str, Tensor]:
    """What this rank has saved."""
    is_ours, names = name.startswith("lightning-muon"), list(_state(0))
    opened = Checkpoint.open(path, metadata_name="meta.pt", weights_only=True) if is_ours else None
    if name in FORMATS[2:]:
        content = opened.content if opened is not None else torch.load(path, weights_only=True)
        return {each: content[each] for each in names}
    state = {each: torch.zeros_like(value) for each, value in _state(0).items()}
    dcp.load(state, checkpoint_id=path)
    return state


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


def _finds(name: str, path: Path) -> bool:
    """Whether a load raises, or else gives what was saved."""
    try:
        loaded = _load(name, path)
    except BaseException:
        return True
    return all(torch.equal(loaded[name], value) for name, value in _state(2).items())


def count_found(folder: str, name: str) -> dict[str, list[int]]:
    """Kind of damage -> how often it was found, and tried; on rank 0. Collective over all ranks."""
    path, earlier, found = Path(folder) / "last.ckpt", Path(folder) / "earlier.ckpt", dict[str, list[int]]()
    _save(name, earlier, 1)
    _save(name, path, 2)
    files = sorted(file.name for file in path.iterdir()) if path.is_dir() else [""]
    for kind, file, damage in damages(files):
        place, other = (path / file, earlier / file) if file else (path, earlier)
        if dist.get_rank() == 0:
            content = place.read_bytes()
            damage(place, other)
        dist.barrier()
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, _finds(name, path))
        if dist.get_rank() == 0:
            place.write_bytes(content)
            entry = found.setdefault(kind, [0, 0])
            entry[0] += all(results)
            entry[1] += 1
        dist.barrier()
    return found


def main() -> None:
    """Print what loads find."""
    print(f"| found / tried | {' | '.join(KINDS)} |\n|{' --- |' * (1 + len(KINDS))}")
    pool = ProcessPool()
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, list[int]] = pool.run(count_found, folder, name, world_size=2, timeout=600)[0]
        cells = [f"{found[kind][0]} / {found[kind][1]}" if kind in found else "" for kind in KINDS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
