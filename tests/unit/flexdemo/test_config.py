"""Options of FlexDeMo: defaults, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, FlexDeMoConfig, NoReplication
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig as Config


def test_options_of_muon_have_its_names_and_defaults() -> None:
    ours, muon = Config(), MuonConfig()
    shared = {field.name for field in fields(Config)} & {field.name for field in fields(MuonConfig)}
    # Plain SGD decays nothing; buckets of nodes and the overlap between them are others than those of Muon.
    own = {"weight_decay", "chunk_bytes", "overlap"}
    assert {name for name in shared if getattr(ours, name) != getattr(muon, name)} <= own
    assert {"ns_steps", "betas", "fused", "max_skipped_steps"} <= shared


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"base": "adam"}, r"base must be one of \('sgd', 'adamw', 'muon'\), got 'adam'"),
        ({"merge": "sum"}, r"merge must be one of \('contributors', 'mean'\), got 'sum'"),
        ({"value_format": "fp8"}, r"value_format must be one of \('fp32', 'bf16', 'int8', 'sign'\), got 'fp8'"),
        ({"overlap": "off"}, r"overlap must be one of \('auto', 'backward', 'step'\), got 'off'"),
        ({"dense_below": -1}, "dense_below must be an integer of at least 0, got -1"),
        ({"check_every": True}, "check_every must be an integer of at least 0, got True"),
        ({"chunk_bytes": 3}, "chunk_bytes must be an integer of at least 4, got 3"),
        ({"delay": 2}, "delay must be 0 or 1 steps, got 2"),
        ({"sign": "never"}, "sign must be True, False or 'auto', got 'never'"),
        ({"decay": 1.01}, r"decay must be in \[0, 1\], got 1.01"),
        ({"decay": float("nan")}, r"decay must be in \[0, 1\], got nan"),
        ({"decay": "0.9"}, "decay must be a number, got '0.9'"),
        ({"replicator": "dct"}, r"replicator must be a Replicator, such as DCTTopK\(top_k=8\), got 'dct'"),
        ({"replicator": DCTTopK}, "replicator must be a Replicator, .* got "),
        ({"lr": -1.0}, "lr must be finite and >= 0, got -1.0"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_with_the_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        FlexDeMoConfig(**options)


def test_signs_are_taken_for_sgd_unless_said_otherwise() -> None:
    assert [FlexDeMoConfig(base=base).takes_sign for base in ("sgd", "adamw", "muon")] == [True, False, False]
    assert not FlexDeMoConfig(base="sgd", sign=False).takes_sign and FlexDeMoConfig(base="adamw", sign=True).takes_sign


@pytest.mark.parametrize("replicator", [DiLoCo(period=4), NoReplication()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("options", [{"delay": 1}, {"value_format": "int8"}], ids=str)
def test_what_means_nothing_for_nodes_by_themselves_is_refused(replicator: Any, options: dict[str, Any]) -> None:
    (key,) = options
    with pytest.raises(ValueError, match=f"{key}=.* means nothing with {type(replicator).__name__}.* remove it"):
        FlexDeMoConfig(replicator=replicator, **options)
    FlexDeMoConfig(replicator=replicator, base="adamw")


@pytest.mark.parametrize("options", [{}, {"base": "muon"}, {"base": "adamw", "replicator": DiLoCo(period=2)}], ids=str)
@pytest.mark.parametrize("key", ["momentum", "nesterov"])
def test_an_inner_momentum_needs_muon_in_independent_nodes(options: dict[str, Any], key: str) -> None:
    value = {"momentum": 0.9, "nesterov": False}[key]
    for replicator in (DiLoCo(period=2), NoReplication()):
        assert FlexDeMoConfig(base="muon", replicator=replicator, **{key: value}).has_inner_momentum
    with pytest.raises(ValueError, match=rf"{key}={value} is of base='muon' .*decay=\.\.\., remove it"):
        FlexDeMoConfig(**options, **{key: value})


def test_a_wrong_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^FlexDeMoConfig: .*'decy'; did you mean 'decay'"):
        FlexDeMoConfig(decy=0.9)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "kind", [FlexDeMoConfig, partial(FlexDeMo, [nn.Parameter(torch.ones(1))])], ids=["config", "optimizer"]
)
def test_compat_is_an_error_that_says_what_replaces_it(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"no option 'compat'; it belongs to other .*DCTTopK\(strips=True\)"):
        kind(compat="detonation")
