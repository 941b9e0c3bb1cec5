"""What a resumed run may change, states of other optimizers and options, kills in a save; equal bits: tests/matrix."""

import os
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import MuonConfig
from tests.integration import training
from tests.reference.muon import orthogonalized
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.tensors import whole


def _scheduled(module: nn.Module) -> Any:
    optimizer = training.adamw(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=24)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _two_groups(module: nn.Module) -> Any:
    parameters = list(module.parameters())
    return torch.optim.AdamW([{"params": parameters[:4]}, {"params": parameters[4:]}], lr=1e-2)


def _run(
    directory: str,
    configure: Any = training.adamw,
    *,
    make: Any = training.language_model,
    name: str = "{epoch}",
    resume: str | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[int, float, float]]]:
    """Losses, weights and param groups of a training that saves a checkpoint after each epoch."""
    pl = training.load()
    model = make(pl, configure=configure, seed=1 if resume else 0)
    saves = pl.callbacks.ModelCheckpoint(directory, filename=name, save_top_k=-1, enable_version_counter=False)
    options |= {"strategy": training.strategy_class()(**(strategy or {})), "enable_checkpointing": True}
    fitter = training.trainer(pl, callbacks=[saves], **options)
    fitter.fit(model, training.loader(), ckpt_path=resume, weights_only=False)
    # As LearningRateMonitor calls them.
    assert {each.name for each in fitter.lr_scheduler_configs} <= {"lr-AdamW"}
    assert not any(each.name.startswith("lightning_muon") for each in threading.enumerate())
    groups = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in fitter.optimizers[0].param_groups]
    return model.losses, training.full_weights(model), groups


@pytest.mark.parametrize("sharded", [True, False])
def test_resuming_takes_a_scheduler_but_no_other_state(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    kind: dict[str, Any] = {"world_size": 2, "strategy": {"save_distributed_checkpoint": sharded}}
    (first, *_), _ = gloo.run(_run, str(tmp_path / "a"), max_epochs=1, **kind)
    kind |= {"resume": f"{tmp_path}/a/epoch=0.ckpt"}
    (resumed, *_), _ = gloo.run(_run, str(tmp_path / "b"), _scheduled, **kind)
    assert resumed[0] < first[0], "weights and momentum were loaded"
    match = "other param groups.*groups"
    gloo.expect_error_on_all_ranks(_run, str(tmp_path / "c"), _two_groups, exception=RuntimeError, match=match, **kind)


_OVERWRITES: dict[str, Any] = {"name": "last", "max_epochs": 3, "limit_train_batches": 2}


def _fit_killed(directory: str, rank: int, events: str, name: str) -> None:
    """As :func:`_run`, until ``rank`` is about to do one of ``events`` to a path that matches, for the second time.

    It is slow: for half a second the others go on, as far as they can without it. Then all are killed.
    """
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    left = 2

    def observe(what: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if re.fullmatch(events, what) and args and re.search(name, str(args[0])):
            left -= 1
            if left == 0:
                time.sleep(0.5)
                for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == rank:
        sys.addaudithook(observe)
    _run(directory, **_OVERWRITES)


def test_a_run_that_was_killed_while_it_saved_goes_on_exactly(gloo: ProcessPool, tmp_path: Path) -> None:
    losses, weights, _ = gloo.run(_run, str(tmp_path / "reference"), world_size=2, **_OVERWRITES)[0]
    for num_epochs, *place in (
        # The last rank is about to write its shard of the second epoch; the other one has.
        (1, 1, "open", "__1_0.distcp"),
        # The new checkpoint has taken the place of the old one, which is still there.
        (2, 0, "shutil.rmtree", r"\.unfinished-\w+$"),
    ):
        directory = tmp_path / str(num_epochs)
        with pytest.raises(RanksFailedError):
            gloo.run_fresh(_fit_killed, str(directory), *place, world_size=2)
        # A Trainer finds the last one by looking into the directory, before it asks the strategy.
        resumed = gloo.run(_run, str(directory), resume="last", world_size=2, **_OVERWRITES)
        assert resumed[0][0] == resumed[1][0] == losses[2 * num_epochs :], place
        assert training.max_difference(resumed[0][1], weights) == 0.0
        # A save that comes clears away what one before it has left.
        assert [path.name for path in directory.iterdir()] == ["last.ckpt"]


def _finetuned(pl: Any, **options: Any) -> Any:
    """Its blocks are frozen in the first epoch."""

    class UnfreezeBlocks(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.network.blocks)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.network.blocks, optimizer, lr=5e-3)

    model = training.language_model(pl, **options)
    model.configure_callbacks = lambda: [UnfreezeBlocks()]
    return model


def _trainable(module: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.03)


def test_finetuning_adds_a_group_that_trains_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    def finetune(folder: str, world_size: int = 2, resume: str | None = None, **sizes: Any) -> Any:
        # Until the blocks train, nothing does that is a matrix.
        options = {"make": _finetuned, "strategy": sizes | {"optimizer": training.EXACT}, "max_epochs": 3}
        return gloo.run(_run, f"{tmp_path}/{folder}", _trainable, resume=resume, **options, world_size=world_size)[0]

    alone = finetune("alone", 1, sharding="none")
    for sizes in ({}, {"sharding": "zero2"}):
        losses, weights, groups = finetune("a", **sizes)
        # The new group has the weight decay of the user's AdamW.
        assert groups == [(3, 1e-2, 0.03), (12, 5e-3, 0.03)]
        assert losses == pytest.approx(alone[0], abs=1e-4)
        assert training.max_difference(weights, alone[1]) < 1e-4
    assert finetune("b", resume=f"{tmp_path}/a/epoch=1.ckpt", replicate_size=2)[2] == groups


_T = TypeVar("_T")


def _odd(pl: Any, *, configure: Any, seed: int) -> Any:
    """A ``Generic`` module that has its network among its hyper-parameters."""

    class Odd(Generic[_T], training.language_model(pl, configure=configure).__class__):
        def __init__(self, network: nn.Module, width: int, loss: nn.Module) -> None:
            super().__init__()
            self.network = network
            self.save_hyperparameters()

    class Concrete(Odd[int]):
        pass

    torch.manual_seed(seed)
    return Concrete(training.Network(), 3, nn.MSELoss())


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_an_odd_module_goes_on(gloo: ProcessPool, tmp_path: Path) -> None:
    """With an optimizer that keeps no state."""
    odd: dict[str, Any] = {"make": _odd, "strategy": {"save_distributed_checkpoint": False}, "world_size": 2}
    first = tmp_path / "whole" / "epoch=0.ckpt"
    (_, whole, _), _ = gloo.run(_run, str(first.parent), _sgd, **odd)
    (_, resumed, _), _ = gloo.run(_run, str(tmp_path / "rest"), _sgd, resume=str(first), **odd)
    assert training.max_difference(whole, resumed) == 0.0
    saved = torch.load(first, weights_only=False)["hyper_parameters"]
    assert sorted(saved) == ["loss", "width"], "a part of the module is none"


# Sums of float32 in another order, 1 - mu in float32, and an eps in another place, through Newton-Schulz.
_TOLERANCE = 2e-5


def _torch_muon(module: nn.Module) -> torch.optim.Optimizer:
    """Of the matrices; nothing else is trained."""
    return torch.optim.Muon([each for each in module.parameters() if each.ndim == 2], lr=0.02, momentum=0.9)


def _float32(matrix: Tensor, coefficients: Any, ns_steps: int, eps: float) -> Tensor:
    return orthogonalized(matrix, steps=(coefficients,) * ns_steps, eps=eps)


def _fit(strategy: str, epochs: int, path: str, *, resumes: bool = False) -> dict[str, Tensor]:
    """Weights at the end; what is saved is as Lightning writes it."""
    pl = training.load()
    used = training.strategy_class()(optimizer=training.EXACT) if strategy == "ours" else strategy
    model = training.language_model(pl, configure=_torch_muon)
    fitter = training.trainer(pl, strategy=used, max_epochs=epochs)
    # In bfloat16 the order of sums would show in the third digit.
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _float32):
        fitter.fit(model, training.loader(), ckpt_path=path if resumes else None, weights_only=False)
    if not resumes:
        fitter.save_checkpoint(path)
    return training.full_weights(model)


def test_the_next_steps_are_those_of_torchs_muon(gloo: ProcessPool, tmp_path: Path) -> None:
    """Whose files do not say which parameter a state is of."""
    plain = "ddp_find_unused_parameters_true"
    for epochs in (1, 2):
        (expected,) = gloo.run(_fit, plain, epochs, f"{tmp_path}/{epochs}.ckpt", world_size=1)
    found, _ = gloo.run(_fit, "ours", 2, f"{tmp_path}/1.ckpt", resumes=True, world_size=2)
    assert training.max_difference(found, expected) < _TOLERANCE


# What version 0.1 has in param groups, of which some are gone.
_OF_VERSION_0_1 = {"hyperball": True, "muon_eq": "none", "ns_coefficients": "you"}


def _resume_with_others(folder: str, is_sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two matrices of blocks swap Muon and AdamW, NorMuon begins, and options are gone: states, and warnings."""
    pl = training.load()
    states: list[dict[str, Tensor]] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for on_adamw in (0, 1):
            model = training.language_model(pl)
            config = MuonConfig(adamw_patterns=(f"*blocks.{on_adamw}.up.weight",), normuon=on_adamw == 1)
            strategy = training.strategy_class()(optimizer=config, save_distributed_checkpoint=is_sharded)
            fitter = training.trainer(pl, strategy=strategy, max_steps=2)
            path = f"{folder}/one.ckpt" if on_adamw else None
            fitter.fit(model, training.loader(), ckpt_path=path, weights_only=False)
            fitter.optimizers[0].state_dict()  # Makes what the first step would make.
            state = fitter.optimizers[0].state
            weights = [block.up.weight for block in model.network.blocks]
            states.append({
                f"{number} {key}": whole(value) for number, weight in enumerate(weights)
                for key, value in state[weight].items()
            })  # fmt: skip
            assert "hyperball" not in fitter.optimizers[0].param_groups[0]
            fitter.optimizers[0].param_groups[0].update(_OF_VERSION_0_1)
            for parameter, of_parameter in state.items():
                of_parameter["initial_norm"] = torch.ones_like(parameter)
            fitter.save_checkpoint(f"{folder}/one.ckpt")
    words = ("moved from", "second moments begin", "of version 0.1")
    return states[0], states[1], [text for each in caught if any(word in (text := str(each.message)) for word in words)]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_state_goes_on_with_other_routes_and_options(gloo: ProcessPool, tmp_path: Path, is_sharded: bool) -> None:
    (before, after, texts), (*_, of_rank_1) = gloo.run(_resume_with_others, str(tmp_path), is_sharded, world_size=2)
    assert before["0 exp_avg"].count_nonzero() and torch.equal(after["0 momentum_buffer"], before["0 exp_avg"])
    assert before["1 momentum_buffer"].count_nonzero() and after["1 step"] == 0
    zeros = [after[name] for name in ("0 second_momentum_buffer", "1 exp_avg", "1 exp_avg_sq")]
    assert not any(each.count_nonzero() for each in zeros)
    assert not any("initial_norm" in key for key in after)
    for words in (
        r"of version 0.1; .*; ns_coefficients='you' went in .*; hyperball went in version 0.2: it gained nothing",
        r"blocks\.0\.up\.weight.* moved from AdamW to Muon: their first moments go on as momenta",
        r"blocks\.1\.up\.weight.* moved from Muon to AdamW: their moments begin with zeros",
        "second moments begin with zeros",
    ):
        assert sum(bool(re.search(words, text)) for text in texts) == 1, texts
    assert of_rank_1 == [], "rank 0 says it for all"
