"""Directories of shards become single files; compared with the weights of the run exactly."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn

from lightning_muon.checkpoint.saving import full_state_dict
from lightning_muon.cli.main import main
from tests.integration.training import PACKAGES, Network, load, loader, loss_of, strategy_class, trainer
from tests.support.processes import ProcessPool

pl = pytest.importorskip(PACKAGES[0])


class Model(pl.LightningModule):
    """Tied weights, a batch norm, hyper-parameters, an extra state."""

    def __init__(self, num_blocks: int = 1, rate: Any = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = Network(num_blocks=num_blocks, tied=True)
        self.norm = nn.BatchNorm1d(6)
        self.extra: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.network(tokens))

    def get_extra_state(self) -> Any:
        return {"seen": [{"tokens": torch.arange(3)}, {"tokens": torch.ones(2)}], "name": "extra"}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", loss_of(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=float(self.hparams["rate"]))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _train(path: str, rate: Any) -> tuple[dict[str, Any], float]:
    package = load(PACKAGES[0])
    package.seed_everything(0)
    model = Model(num_blocks=2, rate=rate)
    fitter = trainer(package, strategy=strategy_class()(), max_epochs=1)
    fitter.fit(model, loader(), loader())
    fitter.save_checkpoint(path)
    value = fitter.validate(model, loader(), verbose=False)[0]["val"]
    return full_state_dict(model), value


@pytest.fixture(scope="module")
def trained(gloo: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    path = tmp_path_factory.mktemp("trained") / "last.ckpt"
    weights, value = gloo.run(_train, str(path), 0.01, world_size=2)[0]
    assert path.is_dir()
    return path, weights, value


def test_any_trainer_reads_the_file(
    trained: tuple[Path, dict[str, Any], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, weights, value = trained
    file = tmp_path / "one.ckpt"
    main(["convert", str(directory), str(file)])
    assert [path.name for path in tmp_path.iterdir()] == ["one.ckpt"]
    content, metadata = (torch.load(path, weights_only=True) for path in (file, directory / "meta.pt"))
    assert content.keys() == {*metadata, "state_dict"}, "no states of optimizers"
    assert content["lr_schedulers"] == metadata["lr_schedulers"] and metadata["global_step"] > 0
    model = Model.load_from_checkpoint(file)
    assert model.hparams["num_blocks"] == 2 and model.extra["name"] == "extra"
    assert [entry["tokens"].tolist() for entry in model.extra["seen"]] == [[0, 1, 2], [1.0, 1.0]]
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights if name != "_extra_state")
    monkeypatch.setenv("WORLD_SIZE", "1")
    fitter = trainer(pl, strategy="auto")
    result = fitter.validate(Model(num_blocks=2), loader(), ckpt_path=file, verbose=False)[0]["val"]
    # Two ranks average the losses of half batches: a few ulp of fp32.
    assert result == pytest.approx(value, rel=1e-5)


def test_what_cannot_be_converted_is_explained(
    trained: tuple[Path, dict[str, Any], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, file, damaged, new = str(trained[0]), tmp_path / "one.ckpt", tmp_path / "damaged.ckpt", tmp_path / "new"
    file.write_text("mine")
    shutil.copytree(directory, damaged)
    next(damaged.glob("__1_*")).unlink()
    gone, two = tmp_path / "gone.ckpt", tmp_path / "two.ckpt"
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=gone, no_dist=True)
    (gone / "meta.pt").write_bytes(b"\x80\x02cgone\nThing\n.")
    torch.save({"a": {"weight": torch.ones(2)}, "b": {"weight": torch.ones(2)}}, two)
    missing = str(tmp_path / "missing" / "one.ckpt")
    for words, message in (
        ((tmp_path, file, "--force"), r"is no checkpoint directory: there is no file meta.pt in it"),
        ((missing, new), "there is no .*one.ckpt"),
        ((file, new), "or is no archive, as torch.save writes them$"),
        ((directory, missing), "there is no folder"),
        ((directory, tmp_path, "--force"), "is a directory"),
        ((directory, file), "exists; --force overwrites it"),
        ((damaged, file, "--force"), r"is damaged:\n.*__1_0.distcp is missing"),
        ((gone, file, "--force", "--trust-pickle"), r"meta\.pt cannot be read"),
        ((two, f"{new}.safetensors"), r"weights of one model, and there are \['a', 'b'\]"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["convert", *map(str, words)])
    with monkeypatch.context() as context:
        context.setattr(torch, "save", _disk_full)
        with pytest.raises(SystemExit, match="disk full"):
            main(["convert", directory, str(file), "--force"])
    assert file.read_text() == "mine" and not list(tmp_path.glob(".*"))
    main(["convert", directory, str(file), "--force"])
    assert Model.load_from_checkpoint(file).hparams["num_blocks"] == 2


def _disk_full(content: Any, file: Any) -> None:
    file.write(b"half")
    raise OSError("disk full")


def test_hyper_parameters_of_any_type_need_trust(gloo: ProcessPool, tmp_path: Path) -> None:
    directory, file = tmp_path / "last.ckpt", tmp_path / "one.ckpt"
    gloo.run(_train, str(directory), Fraction(1, 100), world_size=1)
    with pytest.raises(SystemExit, match="if you trust whoever wrote it, use --trust-pickle"):
        main(["convert", str(directory), str(file)])
    assert not file.exists()
    main(["convert", str(directory), str(file), "--trust-pickle"])
    model = Model.load_from_checkpoint(file, weights_only=False)
    assert model.hparams["rate"] == Fraction(1, 100)


def _begin(path: str) -> tuple[dict[str, Any], int]:
    """Weights and step with which a training begins."""
    found = list[tuple[dict[str, Any], int]]()

    class Beginning(Model):
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def on_train_start(self) -> None:
            weights = {name: value.clone() for name, value in full_state_dict(self).items()}
            found.append((weights, self.trainer.global_step))

    trainer(load(PACKAGES[0]), max_steps=1).fit(Beginning(num_blocks=2), loader(), ckpt_path=path)
    return found[0]


def test_weights_go_through_all_formats_and_begin_a_training(
    gloo: ProcessPool, trained: tuple[Path, dict[str, Any], float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, weights, _ = trained
    main(["verify", str(directory)])
    assert capsys.readouterr().out.endswith("written, step 4, mesh replicate 1 x shard 2\n")
    kinds = {"one.ckpt": "one file", "shards.ckpt": "a directory of shards", "safe.safetensors": "safetensors"}
    places = [tmp_path / name for name in (*kinds, "end.ckpt", "begin.ckpt")]
    for source, target, kind in zip([directory, *places], places, [*kinds.values(), "one file"], strict=False):
        main(["convert", str(source), str(target)])
        assert capsys.readouterr().out == f"wrote {target}, {kind}, without states of optimizers\n"
    main(["verify", *map(str, (*places[:2], places[3]))])
    content = torch.load(places[3], weights_only=True)["state_dict"]
    assert content.keys() == weights.keys() - {"_extra_state"}
    assert all(torch.equal(value, weights[name]) for name, value in content.items())
    torch.save(content, places[3])  # Weights alone, as anybody may have them.
    main(["convert", *map(str, places[3:])])
    begun, num_steps = gloo.run(_begin, str(places[4]), world_size=2)[0]
    assert num_steps == 0 and all(torch.equal(begun[name], value) for name, value in content.items())


def test_keys_of_a_program_stay_without_its_optimizer(tmp_path: Path) -> None:
    """As Fabric and a loop of one's own save."""
    network = Network(num_blocks=1)
    optimizer = torch.optim.AdamW(network.parameters())
    sum(weight.sum() for weight in network.parameters()).backward()
    optimizer.step()
    content = {"net": network.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    names = ("file", "shards", "again", "weights.safetensors")
    torch.save(content, tmp_path / names[0])
    torch.distributed.checkpoint.save(content, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for source, target in ((*names[:2],), (*names[1:3],), ("theirs", "one"), ("theirs", names[3])):
        main(["convert", str(tmp_path / source), str(tmp_path / target)])
    for name in ("again", "one"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert found.keys() - {"pytorch-lightning_version"} == {"net", "step"} and found["step"] == 3
        assert all(torch.equal(found["net"][key], value) for key, value in content["net"].items())
    found = pytest.importorskip("safetensors.torch").load_file(tmp_path / names[3])
    assert all(torch.equal(found[key], value) for key, value in content["net"].items())
