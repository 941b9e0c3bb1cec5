"""The section on slow links: what it says, and that it fits a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_muon.cli.plan_flexdemo import LINKS, SlowLinks, slow_links
from lightning_muon.cli.plan_flexdemo_report import exchange_name, slow_links_as_dict, slow_links_as_text
from lightning_muon.cli.plan_report import WIDTH
from lightning_muon.cli.plan_specs import Mesh
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, NoReplication, Random
from lightning_muon.schedule.shapes import read_shapes


def _links(
    replicator: Any, name: str = "t5-small", nodes: int = 2, compute: float | None = None, **options: Any
) -> SlowLinks:
    config = FlexDeMoConfig(replicator=replicator, **options)
    return slow_links(read_shapes(name), Mesh(replicate=nodes, shard=2), config, compute_seconds=compute)


def _row(text: str, start: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line.removeprefix(start).split()


@pytest.mark.parametrize("name", ["t5-small", "llama3-70b", "deepseek-v3"])
@pytest.mark.parametrize("nodes", [1, 2, 1000])
@pytest.mark.parametrize("replicator", [DCTTopK(), Random(1 / 64), DiLoCo(period=500), NoReplication()], ids=str)
def test_every_line_fits_a_terminal(name: str, nodes: int, replicator: Any) -> None:
    text = slow_links_as_text(_links(replicator, name, nodes, compute=12.5))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii()


def test_the_table_shows_bits_bytes_break_even_and_times() -> None:
    links = _links(DCTTopK(top_k=32), nodes=4)
    text = slow_links_as_text(links)
    asked, traffic = _row(text, "DCTTopK(64, 32) *"), links.rows[0].traffic
    assert asked[0] == "bf16" and asked[1] == f"{links.rows[0].bits_per_parameter:.3f}"
    assert float(asked[4]) == pytest.approx(traffic.sent / 1e6, abs=1e-3)
    assert float(asked[6]) == pytest.approx(traffic.break_even(links.all_reduce.traffic) or 0, abs=0.1)
    # 32 (R - 1) M values and indices of 16 bits over 1 Gbit/s, in milliseconds.
    assert float(asked[9]) == pytest.approx(8 * traffic.sent / 1e6, abs=0.01)
    reference = _row(text, "HSDP, all-reduce")
    assert reference[:2] == ["bf16", "16.000"] and float(reference[5]) == 1
    assert "Times are those of the exchange alone" in text and "C / 3" not in text


def test_times_with_arithmetic_say_how_they_overlap() -> None:
    text = slow_links_as_text(_links(DCTTopK(), compute=3.0, delay=1))
    assert "3.00 s of forward and backward" in text and "C / 3 + max(2 C / 3, E)" in text
    assert "1 step late" in text and _row(text, "DCTTopK(64, 32) *")[7:9] == ["3.00", "s"]


def test_weights_that_are_averaged_travel_in_float32_and_never_break_even() -> None:
    row = _row(slow_links_as_text(_links(DiLoCo(period=50))), "DiLoCo(50) *")
    assert row[:2] == ["fp32", "0.640"] and row[6] == "never"


@pytest.mark.parametrize(
    ("replicator", "name"),
    [(DCTTopK(16, 4), "DCTTopK(16, 4)"), (Random(1 / 3), "Random(1/3)"), (NoReplication(), "NoReplication()")],
)
def test_replicators_are_named_with_the_options_that_count(replicator: Any, name: str) -> None:
    assert exchange_name(_links(replicator).rows[0]) == name


def test_the_dictionary_has_all_numbers_and_survives_json() -> None:
    links = _links(DCTTopK(top_k=8), nodes=3, compute=0.5)
    found = json.loads(json.dumps(slow_links_as_dict(links)))
    assert (found["nodes"], found["base"], found["compute_seconds"]) == (3, "sgd", 0.5)
    assert len(found["rows"]) == len(links.rows)
    first = found["rows"][0]
    assert first["is_asked"] and not found["rows"][1]["is_asked"]
    assert first["bytes"]["sent"] == 2 * first["bytes"]["message"] == 2 * links.rows[0].traffic.gathered
    assert first["exchange_seconds"] == {
        name: pytest.approx(8 * first["bytes"]["sent"] / rate) for name, rate in LINKS.items()
    }
    assert found["all_reduce"]["break_even_nodes"] is None
    assert found["compressed"]["elements"] + found["dense"]["elements"] == 60_506_624
