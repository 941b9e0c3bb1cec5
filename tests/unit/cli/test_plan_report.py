"""A plan as text and as a dictionary."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan import WIDTH


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    def text(name: str, replicate: int, shard: int, *words: str) -> str:
        main(["plan", "--shapes", name, "--replicate-size", str(replicate), "--shard-size", str(shard), *words])
        return capsys.readouterr().out

    return text


def test_all_sections_are_there_and_every_line_fits_a_terminal(shown: Any) -> None:
    text, many = shown("10b", 1, 8), shown("t5-base", 2, 128)
    for plan in (text, many, shown("t5-base", 1, 1)):
        for title in ("Parameters", "Owners (lpt+pipeline)", "Bytes on the wire", "Predicted"):
            assert title in plan
        assert max(map(len, plan.splitlines())) <= WIDTH
        assert plan.isascii()
    # Names are whole, and nothing is frozen.
    names = shown("t5-small", 1, 8).partition("Owners")[0]
    assert "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight " in names and "frozen" not in names
    assert "https://huggingface.co/tiiuae/Falcon3-10B-Base" in text and "machine reference: 150 TFLOP/s" in text
    assert "that own nothing" not in text
    # The dearest matrix is 46080 x 3072: 2 * (2 * 46080 * 3072 + 2 * 3072 * 3072) bytes.
    assert "without the working memory of Newton-Schulz, 576 MiB for the dearest matrix in 16 bits." in text
    assert "MiB per owner on average" in text and " * " not in text.partition("Predicted")[2]


def test_what_auto_comes_to_is_said_of_the_machine(shown: Any) -> None:
    def said(bandwidth: str, replicate: int) -> list[str]:
        text = " ".join(shown("t5-base", replicate, 8, "--bandwidth", bandwidth).split())
        return re.findall(r"overlap=auto on this machine, ([^:]*): (gathers start [a-z ]*);", text)

    in_step, early = "gathers start in the step", "gathers start during backward"
    assert said("1e12", 1) == [("lpt+pipeline", in_step)]
    assert said("1e8", 2) == [("lpt+pipeline", early), ("lpt+pipeline, owner grid", early)]


def test_owners_of_many_ranks_are_summarized(shown: Any) -> None:
    few = shown("t5-small", 1, 4).partition("Owners (lpt+pipeline)")[2].splitlines()
    rows = [line.split() for line in few[3:7]]
    assert [row[:2] for row in rows] == [["rank", str(rank)] for rank in range(4)]
    assert sum(int(row[2]) for row in rows) == 96
    many = shown("t5-small", 1, 128)
    assert "busiest rank" in many and "idlest rank" in many
    assert "Ranks that own nothing: divide fused weights (--fused" in many


def test_the_ways_of_zero2_name_what_leaves_a_node(shown: Any) -> None:
    words = ("--node-ranks", "2", "--machine", "h100")
    direct, hierarchical = json.loads(shown("t5-small", 1, 4, *words, "--json"))["zero2"]
    assert (direct["grid"], hierarchical["grid"]) == ([], [[0, 1], [2, 3]])
    assert direct["node_bytes"] == 2 * hierarchical["node_bytes"]
    assert "hierarchical *" in shown("t5-small", 1, 4, *words)
    assert "zero2" not in shown("t5-small", 2, 4, "--node-ranks", "4"), "on one node there is nothing to choose"
