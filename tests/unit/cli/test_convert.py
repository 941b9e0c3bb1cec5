"""Directories of shards become single files; compared with the weights of the run exactly."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.cli import convert as convert_module
from lightning_muon.cli.main import main
from lightning_muon.sharding.weights import full_state_dict
from tests.integration.training import PACKAGES, Network, load, loader, loss_of, trainer
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
    fitter = trainer(package, max_epochs=1)
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
    directory, file, damaged = str(trained[0]), tmp_path / "one.ckpt", tmp_path / "damaged.ckpt"
    file.write_text("mine")
    shutil.copytree(directory, damaged)
    next(damaged.glob("__1_*")).unlink()
    gone = tmp_path / "gone.ckpt"
    gone.mkdir()
    (gone / "meta.pt").write_bytes(b"\x80\x02cgone\nThing\n.")
    missing = str(tmp_path / "missing" / "one.ckpt")
    for words, message in (
        ((str(tmp_path), str(file), "--force"), r"is no checkpoint directory: there is no file meta.pt in it"),
        ((directory, missing), "there is no folder"),
        ((directory, str(tmp_path), "--force"), "is a directory"),
        ((directory, str(file)), "exists; --force overwrites it"),
        ((str(damaged), str(file), "--force"), r"is damaged:\n.*__1_0.distcp is missing"),
        ((str(gone), str(file), "--force", "--trust-pickle"), r"meta\.pt cannot be read"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["convert", *words])
    with monkeypatch.context() as context:
        context.setattr(convert_module.torch, "save", _disk_full)
        with pytest.raises(SystemExit, match="disk full"):
            main(["convert", directory, str(file), "--force"])
    assert file.read_text() == "mine" and not list(tmp_path.glob(".one*"))
    main(["convert", directory, str(file), "--force"])
    assert Model.load_from_checkpoint(file).hparams["num_blocks"] == 2


def _disk_full(content: Any, path: Path) -> None:
    path.write_text("half")
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
