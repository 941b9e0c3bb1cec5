"""Options of FlexDeMo from the command line and from YAML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_muon.cli.plan_flexdemo_options import config_from_words, config_from_yaml, muon_part
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Random


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw")),
        (["top_k=4"], FlexDeMoConfig(replicator=DCTTopK(16, 4), base="adamw")),
        (["replicator=DCTTopK", "base=muon"], FlexDeMoConfig(base="muon")),
        (
            ["value_format=int8", "delay=1"],
            FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw", value_format="int8", delay=1),
        ),
        (["rate=0.25", "replicator=Random"], FlexDeMoConfig(replicator=Random(0.25), base="adamw")),
        (["replicator=DiLoCo", "period=9"], FlexDeMoConfig(replicator=DiLoCo(period=9), base="adamw")),
    ],
)
def test_words_replace_what_they_name(words: list[str], expected: FlexDeMoConfig) -> None:
    assert config_from_words(words, FlexDeMoConfig(replicator=DCTTopK(16, 8), base="adamw")) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["top=3"], r"no key 'top' \(did you mean 'top_k'\?\); with DCTTopK there are "),
        (["rate=0.5"], r"no key 'rate'"),
        (["replicator=DCTTop"], r"no replicator 'DCTTop' \(did you mean 'DCTTopK'\?\)"),
        (["replicator=Random"], r"replicator=Random: .*'rate'"),
        (["top_k"], r"KEY=VALUE, such as top_k=8, got 'top_k'"),
        (["=8"], r"KEY=VALUE"),
        (["top_k=0"], r"top_k must be at least 1, got 0"),
        (["base=lion"], r"base must be one of .*'lion'"),
        (["lr=1"], r"no key 'lr'"),
    ],
)
def test_a_wrong_word_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_words(words, FlexDeMoConfig())


class _Namespace(SimpleNamespace):
    """Of jsonargparse, as far as it is asked."""

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


_REPLICATOR = {"class_path": "lightning_muon.flexdemo.replicators.DCTTopK", "init_args": {"top_k": 5}}


@pytest.mark.parametrize("kind", [dict, _Namespace])
def test_fields_and_class_paths_of_yaml_become_a_config(kind: Any) -> None:
    replicator = kind(**{**_REPLICATOR, "init_args": kind(**_REPLICATOR["init_args"])})  # type: ignore[arg-type]
    expected = FlexDeMoConfig(replicator=DCTTopK(top_k=5), base="adamw")
    assert config_from_yaml(kind(base="adamw", replicator=replicator)) == expected
    init_args = kind(base="adamw", replicator=replicator)
    assert config_from_yaml(kind(class_path="lightning_muon.FlexDeMoConfig", init_args=init_args)) == expected
    assert config_from_yaml(kind(class_path="lightning_muon.FlexDeMoConfig")) == FlexDeMoConfig()
    assert config_from_yaml(expected) is expected


@pytest.mark.parametrize("optimizer", [None, "auto", "keep", MuonConfig(), {"ns_steps": 3}, _Namespace(lr=1.0)])
def test_other_optimizers_are_no_flexdemo(optimizer: Any) -> None:
    assert config_from_yaml(optimizer) is None


def test_shared_options_reach_newton_schulz_and_chunks_between_nodes_do_not() -> None:
    config = FlexDeMoConfig(ns_steps=3, adamw_patterns=("head*",), fused={"qkv": 3}, chunk_bytes=123, overlap="step")
    part = muon_part(config)
    assert (part.ns_steps, part.adamw_patterns, part.fused) == (3, ("head*",), {"qkv": 3})
    assert (part.chunk_bytes, part.dedupe) == (MuonConfig.chunk_bytes, "never")
