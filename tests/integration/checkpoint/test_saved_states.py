"""A run goes on with states of torch.optim.Muon, and with those of options that are gone or have changed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

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
from tests.support.tensors import whole

# Sums of float32 in another order, 1 - mu in float32, and an eps in another place, through Newton-Schulz.
_TOLERANCE = 2e-5


def _torch_muon(module: nn.Module) -> torch.optim.Optimizer:
    """Of the matrices; nothing else is trained."""
    return torch.optim.Muon([each for each in module.parameters() if each.ndim == 2], lr=0.02, momentum=0.9)


def _float32(matrix: Tensor, coefficients: Any, ns_steps: int, eps: float) -> Tensor:
    return orthogonalized(matrix, steps=(coefficients,) * ns_steps, eps=eps)


def _fit(strategy: str, epochs: int, path: str, *, resumes: bool = False) -> dict[str, Tensor]:
    """Weights at the end; what is saved is as Lightning writes it."""
    pl = load()
    used = strategy_class()(optimizer=EXACT) if strategy == "ours" else strategy
    model, fitter = language_model(pl, configure=_torch_muon), trainer(pl, strategy=used, max_epochs=epochs)
    # In bfloat16 the order of sums would show in the third digit.
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _float32):
        fitter.fit(model, loader(), ckpt_path=path if resumes else None, weights_only=False)
    if not resumes:
        fitter.save_checkpoint(path)
    return full_weights(model)


def test_the_next_steps_are_those_of_torchs_muon(gloo: ProcessPool, tmp_path: Path) -> None:
    """Whose files do not say which parameter a state is of."""
    plain = "ddp_find_unused_parameters_true"
    for epochs in (1, 2):
        (expected,) = gloo.run(_fit, plain, epochs, f"{tmp_path}/{epochs}.ckpt", world_size=1)
    found, _ = gloo.run(_fit, "ours", 2, f"{tmp_path}/1.ckpt", resumes=True, world_size=2)
    assert max_difference(found, expected) < _TOLERANCE


# What version 0.1 has in param groups, of which some are gone.
_OF_VERSION_0_1 = {"hyperball": True, "muon_eq": "none", "ns_coefficients": "you"}


def _resume_with_others(folder: str, is_sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Two matrices of blocks swap Muon and AdamW, NorMuon begins, and options are gone: states, and warnings."""
    pl = load()
    states: list[dict[str, Tensor]] = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for on_adamw in (0, 1):
            model = language_model(pl)
            config = MuonConfig(adamw_patterns=(f"*blocks.{on_adamw}.up.weight",), normuon=on_adamw == 1)
            strategy = strategy_class()(optimizer=config, save_distributed_checkpoint=is_sharded)
            fitter = trainer(pl, strategy=strategy, max_steps=2)
            fitter.fit(model, loader(), ckpt_path=f"{folder}/one.ckpt" if on_adamw else None, weights_only=False)
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
