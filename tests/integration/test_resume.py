"""What a resumed run may change, and what a checkpoint leaves out; tests/matrix has runs that go on with equal bits."""

import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from tests.integration import training
from tests.support.processes import ProcessPool


def _scheduled(module: nn.Module) -> Any:
    optimizer = training.adamw(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=24)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _two_groups(module: nn.Module) -> Any:
    parameters = list(module.parameters())
    return torch.optim.AdamW([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=1e-2)


def _run(directory: str, configure: Any, *, resume: str | None = None, **options: Any) -> list[float]:
    """Losses of up to two epochs, with a checkpoint of each."""
    pl = training.load()
    strategy = training.strategy_class()(save_distributed_checkpoint=options.pop("sharded"))
    model = training.language_model(pl, configure=configure, seed=1 if resume else 0)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    fitter = training.trainer(pl, strategy=strategy, callbacks=[callback], enable_checkpointing=True, **options)
    fitter.fit(model, training.loader(), ckpt_path=resume, weights_only=False)
    return model.losses


@pytest.mark.parametrize("sharded", [True, False])
def test_resuming_takes_a_scheduler_but_no_other_state(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    kind = {"world_size": 2, "sharded": sharded}
    first = gloo.run(_run, str(tmp_path / "a"), training.adamw, max_epochs=1, **kind)
    kind |= {"resume": f"{tmp_path}/a/epoch=0.ckpt"}
    resumed = gloo.run(_run, str(tmp_path / "b"), _scheduled, **kind)
    assert resumed[0][0] < first[0][0], "weights and momentum were loaded"
    match = "other param groups.*groups"
    gloo.expect_error_on_all_ranks(_run, str(tmp_path / "c"), _two_groups, exception=RuntimeError, match=match, **kind)


_T = TypeVar("_T")


def _odd(path: str, epochs: int, resume: str | None = None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights of a ``Generic`` module that has its network among its hyper-parameters, with an optimizer that keeps no
    state; and the threads of ours that are left."""
    pl = training.load()

    class Odd(Generic[_T], training.language_model(pl).__class__):
        def __init__(self, network: nn.Module, width: int, loss: nn.Module) -> None:
            super().__init__()
            self.network = network
            self.save_hyperparameters()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Concrete(Odd[int]):
        pass

    torch.manual_seed(0)
    model = Concrete(training.Network(), 3, nn.MSELoss())
    fitter = training.trainer(pl, max_epochs=epochs)
    fitter.fit(model, training.loader(), ckpt_path=resume, weights_only=False)
    left = [each.name for each in threading.enumerate() if each.name.startswith("lightning_muon")]
    fitter.save_checkpoint(path)
    return training.full_weights(model), left


def test_an_odd_module_goes_on(gloo: ProcessPool, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("whole.ckpt", "half.ckpt", "rest.ckpt")]
    (whole, left), _ = gloo.run(_odd, paths[0], 2, world_size=2)
    gloo.run(_odd, paths[1], 1, world_size=2)
    (resumed, _), _ = gloo.run(_odd, paths[2], 2, paths[1], world_size=2)
    assert left == [] and training.max_difference(whole, resumed) == 0.0
    saved = torch.load(paths[0], weights_only=False)["hyper_parameters"]
    assert sorted(saved) == ["loss", "width"], "a part of the module is none"
