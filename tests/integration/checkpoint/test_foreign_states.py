"""A run goes on with the states of other optimizers: its next steps are those of the other program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_muon import MuonConfig, ParallelMuon
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
from tests.reference.other_muons import DionMuon, KellerJordanMuon
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


def _keller_jordan(network: Any, *, is_sorted: bool = False) -> list[torch.optim.Optimizer]:
    matrices, rest = _parts(network)
    matrices = sorted(matrices, key=lambda p: p.size(), reverse=True) if is_sorted else matrices
    muon = {"params": matrices, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    adam = {"params": rest, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False}
    return [KellerJordanMuon([muon, adam])]


def _dion(network: Any, *, nesterov: bool = True) -> list[torch.optim.Optimizer]:
    matrices, rest = _parts(network)
    muon = {"params": matrices, "lr": 0.02, "mu": 0.9, "nesterov": nesterov}
    return [DionMuon([muon, {"params": rest, "algorithm": "adamw", "lr": 0.01}], adjust_lr="rms_norm")]


def _in_one(network: Any) -> list[torch.optim.Optimizer]:
    """With other hyper-parameters than those that the state brings."""
    matrices, rest = _parts(network)
    groups = [{"params": matrices, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}]
    return [ParallelMuon(groups, lr=1.0, momentum=0.5, nesterov=False, compute_dtype="float32", wire_dtype="float32")]


# Optimizers of the program before, and of the one that goes on under our strategy.
_Make = Callable[[Any], list[torch.optim.Optimizer]]
_PROGRAMS: dict[str, tuple[_Make, _Make]] = {
    "torch.optim.Muon and AdamW": (_torch_muon, _torch_muon),  # The same; the strategy makes a ParallelMuon of one.
    "Keller Jordan": (_keller_jordan, _in_one),
    "Keller Jordan, by size": (partial(_keller_jordan, is_sorted=True), _in_one),
    "dion": (_dion, _in_one),
    "dion without nesterov": (partial(_dion, nesterov=False), _in_one),
}


def _before(name: str, path: str) -> dict[str, Tensor]:
    """Train in one process, with a checkpoint in the middle as Lightning writes it; the weights at the end."""
    network = _Network()
    optimizers = _PROGRAMS[name][0](network)
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


def _after(folder: str, names: list[str]) -> list[dict[str, Tensor]]:
    """Go on from each of these checkpoints, on all ranks."""
    pl = load()

    class Model(pl.LightningModule):
        def __init__(self, make: _Make) -> None:
            super().__init__()
            self.network, self.make, self.automatic_optimization = _Network(), make, False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.network(int(batch)))
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return self.make(self.network)

    found = []
    for name in names:
        model = Model(_PROGRAMS[name][1])
        fitter = trainer(pl, strategy=strategy_class()(optimizer=EXACT), max_epochs=1, use_distributed_sampler=False)
        steps: Any = range(_STEPS_BEFORE, _STEPS_BEFORE + _STEPS_AFTER)
        fitter.fit(model, DataLoader(steps, batch_size=1), ckpt_path=f"{folder}/{name}.ckpt", weights_only=False)
        found.append(full_weights(model))
    return found


def _float32(matrix: Tensor, coefficients: Any, ns_steps: int, eps: float) -> Tensor:
    return orthogonalized(matrix, steps=(coefficients,) * ns_steps, eps=eps)


def test_the_next_steps_are_those_of_the_other_optimizer(gloo: ProcessPool, tmp_path: Path) -> None:
    # In bfloat16 the order of sums would show in the third digit.
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _float32):
        expected = [_before(name, f"{tmp_path}/{name}.ckpt") for name in _PROGRAMS]
    found = gloo.run(_after, str(tmp_path), list(_PROGRAMS), world_size=2)[0]
    for name, weights, wanted in zip(_PROGRAMS, found, expected, strict=True):
        assert max_difference(weights, wanted) < _TOLERANCE, name


def test_adam_with_a_decay_of_its_own_is_refused(gloo: ProcessPool, tmp_path: Path) -> None:
    path, (matrices, rest) = tmp_path / "dion.ckpt", _parts(_Network())
    _before("dion", str(path))
    adam = torch.optim.Adam([{"params": matrices}, {"params": rest}], weight_decay=0.1)
    torch.save(torch.load(path) | {"optimizer_states": [adam.state_dict()]}, path)
    match = "torch.optim.Adam with weight_decay=0.1, .* set weight_decay of its param groups to 0"
    gloo.expect_error_on_all_ranks(_after, str(tmp_path), ["dion"], exception=RuntimeError, match=match, world_size=2)


def test_a_state_that_is_not_known_is_an_error_on_all_ranks(gloo: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "dion.ckpt"
    _before("dion", str(path))
    content = torch.load(path)
    content["optimizer_states"][0]["state"][0]["Q"] = torch.zeros(7, 3)
    torch.save(content, path)
    match = r"network.up.weight runs on muon here.* that of dion, has \['Q', 'momentum'\]"
    gloo.expect_error_on_all_ranks(_after, str(tmp_path), ["dion"], exception=RuntimeError, match=match, world_size=2)


def _resume_with_other_routes(folder: str, is_sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two matrices of blocks swap Muon and AdamW: their states before, after, and the warnings."""
    pl = load()
    states: list[dict[str, Tensor]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
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
    return states[0], states[1], [str(each.message) for each in caught if "moved from" in str(each.message)]


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
