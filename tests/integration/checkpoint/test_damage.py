"""Bytes that change, files that end early or are gone are found and named; a save that fails leaves the old one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon import DamagedCheckpointError
from lightning_muon.checkpoint.loading import Checkpoint, first_intact, newest_first
from lightning_muon.checkpoint.manifest import CLOCK, damages, describe, write_file, write_manifest
from lightning_muon.checkpoint.saving import Format, write
from lightning_muon.cli.main import main
from tests.integration.training import language_model, load, loader, strategy_class, trainer
from tests.long.reliability import Damage, flip
from tests.long.reliability import damages as table_of_damages
from tests.support.processes import ProcessPool


def _content() -> dict[str, Tensor]:
    return {f"{name}.{dist.get_rank()}": torch.randn(50, 40) for name in ("weight", "momentum")}


def _save(path: str, *, whole: bool = False, step: int = 1) -> None:
    torch.manual_seed(step)
    how = Format(whole=whole, metadata_name="meta.pt", about={"step": step})
    write({Path(path): (_content(), {"global_step": step, "loops": {}})}, how)


def _every_damage(files: list[str]) -> Iterator[tuple[str, str, Damage]]:
    """Those of the table of docs/checkpoints.md, and changes at the end of a file, which says what its hash is."""
    yield from table_of_damages(files)
    for number in range(150):
        yield f"end {number}", files[number % len(files)], partial(_change_end, number)


def _change_end(at: int, path: Path, _: Path) -> None:
    content = path.read_bytes()
    changed = content[:-at] + bytes([content[-at] ^ 4]) + content[len(content) - at + 1 :]
    path.write_bytes(changed if at else content + b"more")


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "file"])
def test_every_damage_is_found(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    path, earlier = tmp_path / "last.ckpt", tmp_path / "earlier.ckpt"
    for step, each in enumerate((path, earlier), 1):
        gloo.run(_save, str(each), step=step, whole=whole, world_size=2)
    files = [""] if whole else sorted(file.name for file in path.iterdir())
    for kind, name, damage in _every_damage(files):
        place = path / name
        content = place.read_bytes()
        damage(place, earlier / name)
        if path.exists() and not (place.exists() and place.read_bytes() == content):
            assert (found := damages(path)), f"{kind}, {name}"
            assert kind != "file missing" or (str(place) in found[0] and "is missing" in found[0])
        place.write_bytes(content)
    assert damages(path) == []
    about = describe(path) or {}
    assert about["step"] == 1 and about["num_ranks"] == 2 and about["torch"] == torch.__version__
    assert whole or sorted(about["files"]) == [name for name in files if name != "manifest.json"]


def _first_of(paths: list[str]) -> str:
    return str(first_intact([Path(path) for path in paths]))


def test_the_newest_intact_one_is_taken_on_all_ranks(gloo: ProcessPool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        gloo.run(_save, str(tmp_path / f"step={step}.ckpt"), step=step, whole=step == 2, world_size=2)
    newest = [str(path) for path in newest_first(tmp_path)]
    assert [Path(path).name for path in newest] == ["step=3.ckpt", "step=2.ckpt", "step=1.ckpt"]
    assert set(gloo.run(_first_of, newest, world_size=2)) == {newest[0]}
    (Path(newest[0]) / "__1_0.distcp").unlink()
    assert set(gloo.run(_first_of, newest, world_size=3)) == {newest[1]}
    Path(newest[1]).write_bytes(flip(3, Path(newest[1]).read_bytes()))
    assert set(gloo.run(_first_of, newest, world_size=1)) == {newest[2]}
    match = r"__1_0.distcp is missing[\s\S]*step=2.ckpt is not as it was written"
    gloo.expect_error_on_all_ranks(_first_of, newest[:2], exception=DamagedCheckpointError, match=match, world_size=2)


def _verify(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[Any, str]:
    """Exit code, or the message in its place, and what is printed."""
    try:
        main(["verify", *map(str, paths)])
    except SystemExit as end:
        return end.code, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_the_command_names_each_bad_file(gloo: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        gloo.run(_save, str(tmp_path / name), world_size=2)
    code, text = _verify(capsys, tmp_path, tmp_path / "a.ckpt")
    assert code == 0 and text.count(": as it was written, step 1") == 3
    shard = tmp_path / "b.ckpt" / "__0_0.distcp"
    shard.write_bytes(flip(1, shard.read_bytes()))
    code, text = _verify(capsys, tmp_path)
    assert code == 1 and f"{tmp_path}/b.ckpt: damaged\n  {shard} is not as it was written" in text
    torch.save({"weights": torch.ones(3)}, tmp_path / "plain.ckpt")
    code, text = _verify(capsys, tmp_path / "plain.ckpt")
    assert code == 1 and "not verified, it has no hashes" in text
    assert re.search(r"there is no .*missing", _verify(capsys, tmp_path / "missing")[0])
    (tmp_path / "b.ckpt" / "manifest.json").write_text("null")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "missing")
    code, text = _verify(capsys, tmp_path)
    assert code == 1 and "b.ckpt: damaged" in text and "link.ckpt: damaged" in text
    assert "a.ckpt: as it was written" in text


_MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda manifest: manifest.pop("files"),
    "files are a list": lambda manifest: manifest.update(files=[1]),
    "a size is text": lambda manifest: manifest["files"]["__0_0.distcp"].update(size="1"),
    "format is text": lambda manifest: manifest.update(format="1"),
}
# Of a checkpoint in one file.
_FILES: dict[str, Callable[[bytes], bytes]] = {
    "pickle": lambda content: b"\x80" + content[1:],
    "stray end": lambda content: content[:500] + b"PK\5\6" + bytes(18),
    # What is left is not taken for the file of another program.
    "zeros": lambda content: bytes(len(content)),
    "text": lambda _: b"hello",
    "both pages": lambda content: bytes(4096) + content[4096:-4096] + bytes(4096),
}
_OTHERS = ("brackets", "index is cut", "index is empty", "only a shard", "empty directory")


@pytest.mark.parametrize("kind", [*_MANIFESTS, *_FILES, *_OTHERS])
def test_what_cannot_be_read_is_named_and_passed_over(
    gloo: ProcessPool, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, before = tmp_path / "newest.ckpt", tmp_path / "before.ckpt"
    write_file({}, before, {"step": 3})
    gloo.run(_save, str(newest), whole=kind in _FILES, world_size=1)
    manifest, index = newest / "manifest.json", newest / ".metadata"
    if kind in _MANIFESTS:
        about = json.loads(manifest.read_text())
        del about["sha256"]
        _MANIFESTS[kind](about)
        seal = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        manifest.write_text(json.dumps({**about, "sha256": seal}))
    elif kind == "brackets":
        manifest.write_text("[" * 100_000)
    elif kind.startswith("index"):
        manifest.unlink()
        index.write_bytes(index.read_bytes()[:50] if kind == "index is cut" else b"")
    elif kind in _FILES:
        newest.write_bytes(_FILES[kind](newest.read_bytes()))
    else:
        for file in newest.iterdir():
            file.unlink() if kind == "empty directory" or file.suffix != ".distcp" else None
    with pytest.warns(UserWarning, match=r"newest.ckpt is damaged[\s\S]*Going on from .*before.ckpt"):
        assert first_intact([newest, before]) == before
    code, text = _verify(capsys, tmp_path)
    assert code == 1 and "newest.ckpt: as it was written" not in text


def test_a_clock_that_is_put_back_does_not_make_a_checkpoint_older(tmp_path: Path) -> None:
    write_file({}, tmp_path / "step=1.ckpt", {"step": 1, "time": CLOCK.now() + 7200})
    first_intact(newest_first(tmp_path))
    write_file({}, tmp_path / "step=2.ckpt", {"step": 2, "time": CLOCK.now()})
    assert [path.name for path in newest_first(tmp_path)] == ["step=2.ckpt", "step=1.ckpt"]


def _train(directory: str, *, whole: bool, is_full: bool) -> tuple[list[float], list[str], list[int]]:
    """Losses, the errors of saves, and the step that is intact after each; a disk is full in the third step.

    That of rank 1, or of rank 0, which writes whole files. In the fifth step the folder is gone.
    """
    pl, errors, intact = load(), list[str](), list[int]()
    model, before = language_model(pl), resource.getrlimit(resource.RLIMIT_FSIZE)

    class Saves(pl.Callback):
        def on_train_batch_end(self, fitter: Any, *_: Any) -> None:
            if fitter.global_step % 2 == 0:
                return
            if is_full and fitter.global_step == 3 and dist.get_rank() == int(not whole):
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
            folder = os.devnull if is_full and fitter.global_step == 5 else directory
            try:
                fitter.save_checkpoint(f"{folder}/last.ckpt")
            except (OSError, RuntimeError) as error:
                errors.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            path = Path(directory, "last.ckpt")
            intact.append((describe(path) or {})["step"] if damages(path) == [] else -1)
            dist.barrier()

    strategy = strategy_class()(save_distributed_checkpoint=not whole)
    trainer(pl, strategy=strategy, callbacks=[Saves()], max_steps=8).fit(model, loader())
    return model.losses, errors, intact


@pytest.mark.parametrize("whole", [False, True])
def test_a_disk_that_takes_nothing_stops_no_training(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    unharmed = gloo.run(_train, str(tmp_path), whole=whole, is_full=False, world_size=2)
    for found, (losses, none, _) in zip(
        gloo.run(_train, str(tmp_path), whole=whole, is_full=True, world_size=2), unharmed, strict=True
    ):
        assert found[0] == losses and none == [] and found[2] == [1, 1, 1, 7]
        assert "File too large" in found[1][0] and "Not a directory" in found[1][1]
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_files_of_other_programs_are_taken_with_a_warning(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(3)}, tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="has no hashes of its files"):
        assert first_intact([tmp_path / "plain.ckpt"]) == tmp_path / "plain.ckpt"
    write_file({"weights": torch.ones(3)}, tmp_path / "ours.ckpt", {"step": 4})
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        loaded: Any = torch.load(tmp_path / "ours.ckpt", **options)
        assert torch.equal(loaded["weights"], torch.ones(3))
    shutil.copy(tmp_path / "ours.ckpt", tmp_path / "copied.pt")
    assert damages(tmp_path / "copied.pt") == [] and (describe(tmp_path / "copied.pt") or {})["step"] == 4


def test_a_later_format_is_no_damage(tmp_path: Path) -> None:
    write_manifest(tmp_path, {}, {"format": 2})
    with pytest.raises(ValueError, match=r"manifest\.json was written by a later version .*, in format 2; this one"):
        describe(tmp_path)


class _MakesFolder:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_a_search_for_damage_unpickles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, proof = tmp_path / "folder", tmp_path / "proof"
    (folder / "from-a-stranger.ckpt").mkdir(parents=True)
    written = pickle.dumps(_MakesFolder(proof))
    (folder / "from-a-stranger.ckpt" / ".metadata").write_bytes(written)
    (folder / "file.ckpt").write_bytes(written)
    code, text = _verify(capsys, folder)
    assert code == 1 and "from-a-stranger.ckpt: not verified" in text and "file.ckpt: damaged" in text
    assert len(newest_first(folder)) == 2 and not proof.exists()


class _WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def _plant(path: str, folder: str, place: str) -> None:
    """Save a checkpoint with an object that runs code in one of the three places where there are pickles."""
    code = _MakesFolder(Path(folder))
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2), "_extra_state": code if place == "shard" else 1}
    rest = {"about": code} if place == "meta.pt" else {}
    write({Path(path): ({"model": weights}, rest)}, Format(whole=False, metadata_name="meta.pt"))
    if place == ".metadata" and dist.get_rank() == 0:
        (Path(path) / ".metadata").write_bytes(pickle.dumps(code))
        write_manifest(Path(path), {}, {"save": "of somebody else"})


def _load_planted(path: str, *, weights_only: bool | None) -> None:
    opened = Checkpoint.open(Path(path), metadata_name="meta.pt", weights_only=weights_only)
    opened.load_weights("model", _WithExtraState(3, 2), strict=True)


@pytest.mark.parametrize("place", ["meta.pt", ".metadata", "shard"])
def test_no_load_runs_code_of_a_checkpoint(gloo: ProcessPool, tmp_path: Path, place: str) -> None:
    path, folder = tmp_path / "last.ckpt", tmp_path / "made"
    gloo.run(_plant, str(path), str(folder), place, world_size=2)
    for weights_only in (None, True):
        options: Any = {"exception": Exception, "match": "mkdir", "world_size": 2}
        gloo.expect_error_on_all_ranks(_load_planted, str(path), weights_only=weights_only, **options)
    with pytest.raises(SystemExit, match=r"mkdir|--trust-pickle"):
        main(["convert", str(path), str(tmp_path / "one")])
    assert not folder.exists()
    if place == ".metadata":  # torch writes no objects there, so that nobody needs it.
        with pytest.raises(SystemExit, match=r"\.metadata is not read"):
            main(["convert", str(path), str(tmp_path / "one"), "--trust-pickle"])
        return
    gloo.run(_load_planted, str(path), weights_only=False, world_size=1)
    assert folder.exists()
