"""A run goes on with states of torch.optim.Muon and AdamW, and with those of options that are gone or have changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_muon import MuonConfig
from tests.integration.training import (
    EXACT,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    strategy_class,
    trainer,
)
from tests.reference.muon import orthogonalized
from tests.support.processes import ProcessPool

# Sums of float32 in another order, 1 - mu in float32, and an eps in another place, through Newton-Schulz.
_TOLERANCE = 2e-5
_STEPS_BEFORE, _STEPS_AFTER = 4, 3


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(7, 13), nn.Linear(13, 7), nn.Linear(7, 5, bias=False)
        self.unused = nn.Linear(3, 2, bias=False)  # Has no gradient.

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(12, 7, generator=generator), torch.randn(12, 5, generator=generator)
        return F.mse_loss(self.head(torch.tanh(self.down(torch.tanh(self.up(inputs))))), targets)


def _parts(network: Any) -> tuple[list[Any], list[Any]]:
    """Matrices and the rest, in the order of the groups."""
    return [network.up.weight, network.down.weight, network.head.weight], [network.up.bias, network.down.bias]


def _torch_muon(network: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = _parts(network)
    muon = torch.optim.Muon([*matrices, network.unused.weight], lr=0.02, momentum=0.9)
    return [muon, torch.optim.AdamW(rest, lr=0.01)]


def _adamw(network: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = _parts(network)
    return [torch.optim.AdamW([{"params": matrices}, {"params": rest}], lr=0.01)]


# Optimizers of the program before, and of the one that goes on under our strategy, which makes a ParallelMuon of one.
_Make = Callable[[Any], list[torch.optim.Optimizer]]


def _before(make: _Make, path: str) -> dict[str, Tensor]:
    """Train in one process, with a checkpoint in the middle as Lightning writes it; the weights at the end."""
    network = _Network()
    optimizers = make(network)
    for step in range(_STEPS_BEFORE + _STEPS_AFTER):
        if step == _STEPS_BEFORE:
            content: dict[str, Any] = {f"network.{key}": value for key, value in network.state_dict().items()}
            content = {"state_dict": content, "optimizer_states": [each.state_dict() for each in optimizers]}
            content |= {"lr_schedulers": [], "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.0"}
            torch.save(content, path)
        network.zero_grad()
        network(step).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {f"network.{key}": value for key, value in network.state_dict().items()}


def _after(make: _Make, path: str) -> dict[str, Tensor]:
    """Go on from this checkpoint on all ranks."""
    pl = load()

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.automatic_optimization = _Network(), False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.network(int(batch)))
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return make(self.network)

    model = Model()
    fitter = trainer(pl, strategy=strategy_class()(optimizer=EXACT), max_epochs=1, use_distributed_sampler=False)
    steps: Any = range(_STEPS_BEFORE, _STEPS_BEFORE + _STEPS_AFTER)
    fitter.fit(model, DataLoader(steps, batch_size=1), ckpt_path=path, weights_only=False)
    return full_weights(model)


def _float32(matrix: Tensor, coefficients: Any, ns_steps: int, eps: float) -> Tensor:
    return orthogonalized(matrix, steps=(coefficients,) * ns_steps, eps=eps)


def test_the_next_steps_are_those_of_torchs_muon_and_adamw(gloo: ProcessPool, tmp_path: Path) -> None:
    path = f"{tmp_path}/one.ckpt"
    # In bfloat16 the order of sums would show in the third digit.
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _float32):
        expected = _before(_torch_muon, path)
    found = gloo.run(_after, _torch_muon, path, world_size=2)[0]
    assert max_difference(found, expected) < _TOLERANCE


def _texts(caught: list[warnings.WarningMessage], part: str) -> list[str]:
    return [str(each.message) for each in caught if part in str(each.message)]


def _resume_with_other_routes(folder: str, is_sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two matrices of blocks swap Muon and AdamW: their states before, after, and the warnings."""
    pl = load()
    states: list[dict[str, Tensor]] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for on_adamw in (0, 1):
            model = language_model(pl)
            config = MuonConfig(adamw_patterns=(f"*blocks.{on_adamw}.up.weight",))
            strategy = strategy_class()(optimizer=config, save_distributed_checkpoint=is_sharded)
            fitter = trainer(pl, strategy=strategy, max_steps=2)
            fitter.fit(model, loader(), ckpt_path=f"{folder}/one.ckpt" if on_adamw else None, weights_only=False)
            fitter.save_checkpoint(f"{folder}/one.ckpt")
            state = fitter.optimizers[0].state
            weights = [block.up.weight for block in model.network.blocks]
            states.append({
                f"{number} {key}": value.full_tensor() if isinstance(value, DTensor) else value
                for number, weight in enumerate(weights)
                for key, value in state[weight].items()
            })  # fmt: skip
    return states[0], states[1], _texts(caught, "moved from")


@pytest.mark.parametrize("is_sharded", [True, False])
def test_matrices_that_swap_their_algorithms_go_on(gloo: ProcessPool, tmp_path: Path, is_sharded: bool) -> None:
    before, after, texts = gloo.run(_resume_with_other_routes, str(tmp_path), is_sharded, world_size=2)[0]
    assert before["0 exp_avg"].count_nonzero() and torch.equal(after["0 momentum_buffer"], before["0 exp_avg"])
    assert before["1 momentum_buffer"].count_nonzero() and after["1 step"] == 0
    assert not after["1 exp_avg"].count_nonzero() and not after["1 exp_avg_sq"].count_nonzero()
    assert [text.split(" moved ")[1] for text in texts] == [
        "from AdamW to Muon: their first moments go on as momenta",
        "from Muon to AdamW: their moments begin with zeros",
    ]
    assert "network.blocks.0.up.weight" in texts[0] and "network.blocks.1.up.weight" in texts[1]


# What version 0.1 has in param groups, of which some are gone.
_OF_VERSION_0_1 = {"hyperball": True, "muon_eq": "none", "muon_plus": "none", "ns_coefficients": "you"}


class _OldCallback:
    """Mixed with the ``Callback`` of Lightning, it leaves a state under the name of a callback that is gone."""

    state_key = "QKClip"

    def state_dict(self) -> dict[str, Any]:
        return {"largest": 7.0}


def _resume_without_options(folder: str, is_sharded: bool) -> list[tuple[dict[str, Tensor], list[str]]]:
    """Two runs that are saved and go on, one with options that are gone: weights and warnings."""
    pl, found = load(), list[tuple[dict[str, Tensor], list[str]]]()
    gone = type("Gone", (_OldCallback, pl.Callback), {})()
    strategy: dict[str, Any] = {"optimizer": EXACT, "save_distributed_checkpoint": is_sharded}
    for is_old in (False, True):
        path = f"{folder}/{is_old}.ckpt"
        fitter = trainer(pl, strategy=strategy_class()(**strategy), max_steps=2, callbacks=[gone] * is_old)
        fitter.fit(language_model(pl), loader())
        optimizer = fitter.optimizers[0]
        if is_old:
            optimizer.param_groups[0].update(_OF_VERSION_0_1)
            for parameter, state in optimizer.state.items():
                state["initial_norm"] = torch.ones_like(parameter)
        fitter.save_checkpoint(path)
        model, fitter = language_model(pl), trainer(pl, strategy=strategy_class()(**strategy), max_steps=4)
        with warnings.catch_warnings(record=True, action="always") as caught:
            fitter.fit(model, loader(), ckpt_path=path, weights_only=False)
        (group,), states = fitter.optimizers[0].param_groups, fitter.optimizers[0].state.values()
        assert "hyperball" not in group and not any("initial_norm" in state for state in states)
        found.append((full_weights(model), _texts(caught, "of version 0.1")))
    return found


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_checkpoint_with_options_that_are_gone(gloo: ProcessPool, tmp_path: Path, is_sharded: bool) -> None:
    """The rest of the state goes on as without them, and rank 0 says so once."""
    (new, old), (_, of_rank_1) = gloo.run(_resume_without_options, str(tmp_path), is_sharded, world_size=2)
    assert max_difference(old[0], new[0]) == 0.0
    (text,) = old[1]
    used = ("; hyperball went in version 0.2: it gained nothing", "; ns_coefficients='you' went in")
    assert all(part in text for part in used) and "muon_" not in text
    assert new[1] == of_rank_1[1] == []
