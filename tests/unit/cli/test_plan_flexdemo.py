"""What FlexDeMo is said to send, against counts by hand and the shards that torch cuts."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lightning_muon.cli.plan import WIDTH
from lightning_muon.cli.plan_flexdemo import TOP_KS, comparison, slow_links, slow_links_report, step_seconds
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, NoReplication, Random, Replicator
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes


def _parameters(*shapes: tuple[int, ...], **options: Any) -> list[ParameterShape]:
    kinds = {2: "matrix", 3: "stack", 4: "convolution"}
    return [
        ParameterShape(name=f"p{i}", shape=shape, kind=kinds.get(len(shape), "elementwise"), **options)
        for i, shape in enumerate(shapes)
    ]


def _links(config: FlexDeMoConfig, *shapes: tuple[int, ...], nodes: int = 2) -> dict[str, Any]:
    model = ModelShapes(name="m", source="", parameters=tuple(_parameters(*shapes)))
    return slow_links(model, Mesh(replicate=nodes, shard=1), config)


def _config(top_k: int = 3, **options: Any) -> FlexDeMoConfig:
    return FlexDeMoConfig(replicator=DCTTopK(top_k=top_k), **options)


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_components_and_dense_parameters_are_counted(nodes: int) -> None:
    # 130 x 70 are 3 x 2 blocks, each with 3 positions of 2 bytes and 3 values of 2 bytes: 36 bytes of each, which fill
    # 40; 10 dense values of 2 bytes fill 24.
    links = _links(_config(), (130, 70), (10,), nodes=nodes)
    assert links["rows"][0]["bytes"] == {
        "gathered": 40 + 40 + 24, "reduced": 0, "returned": 0, "message": 104, "sent": (nodes - 1) * 104
    }  # fmt: skip
    assert links["rows"][0]["bits_per_parameter"] == 8 * 104 / 9110
    assert links["all_reduce"]["bytes"]["sent"] == pytest.approx(2 * (nodes - 1) / nodes * 2 * 9110)
    # 6000 elements are 94 strips of 64, of which 4 values and positions are sent.
    strips = FlexDeMoConfig(replicator=DCTTopK(top_k=4, strips=True))
    assert _links(strips, (60, 100))["rows"][0]["bytes"]["message"] == 94 * 4 * (2 + 2)


@pytest.mark.parametrize("replicator", [DCTTopK(top_k=32), DCTTopK(chunk_size=16, top_k=32)])
def test_beyond_the_break_even_the_all_reduce_sends_less(replicator: Replicator) -> None:
    config, shapes = FlexDeMoConfig(replicator=replicator), ((512, 256), (300, 77), (40,))
    at = _links(config, *shapes)["rows"][0]["break_even_nodes"]
    assert at > 3
    for nodes, is_less in ((math.floor(at), True), (math.floor(at) + 1, False)):
        links = _links(config, *shapes, nodes=nodes)
        assert (links["rows"][0]["bytes"]["sent"] <= links["all_reduce"]["bytes"]["sent"]) == is_less
    whole = _links(_config(32), (128, 640))["rows"][0]
    assert (whole["bits_per_parameter"], whole["break_even_nodes"]) == (0.25, 32 / 0.25)


def test_local_steps_send_weights_once_per_period_or_nothing() -> None:
    diloco = _links(FlexDeMoConfig(replicator=DiLoCo(period=25)), (64, 30), (7,), nodes=4)["rows"][0]
    assert diloco["bytes"]["sent"] == pytest.approx(2 * 3 / 4 * 4 * (64 * 30 + 7) / 25)
    assert diloco["bits_per_parameter"] == pytest.approx(32 / 25)
    none = _links(FlexDeMoConfig(replicator=NoReplication()), (64, 30), nodes=4)["rows"][0]
    assert none["bytes"]["sent"] == 0


def test_frozen_parameters_do_not_count() -> None:
    trained, frozen = _parameters((70, 80)), [replace(p, name="f") for p in _parameters((90, 90), frozen=True)]
    mesh = Mesh(replicate=2, shard=2)
    model = ModelShapes(name="m", source="", parameters=tuple(trained))
    both = replace(model, parameters=(*trained, *frozen))
    assert slow_links(both, mesh, _config()) == slow_links(model, mesh, _config())
    with pytest.raises(ValueError, match="m has no parameters that are trained"):
        slow_links(replace(model, parameters=tuple(frozen)), mesh, _config())


def test_the_comparison_has_the_configured_one_first() -> None:
    found = list(comparison(_config(8, value_format="fp32", base="adamw")))
    assert found[0] == _config(8, value_format="fp32", base="adamw")
    assert len(set(map(str, found))) == len(found)
    assert {each.replicator.top_k for each in found if each.value_format == "fp32"} == set(TOP_KS)  # type: ignore[union-attr]
    formats = {each.value_format for each in found if each.replicator == DCTTopK(top_k=8)}
    assert formats == {"fp32", "bf16"}
    config = FlexDeMoConfig(base="muon", replicator=DiLoCo(period=5), momentum=0.9, nesterov=False)
    others = [each.replicator for each in comparison(config)]
    assert others == [DiLoCo(period=5), *(DCTTopK(top_k=k) for k in TOP_KS)]


def test_the_all_reduce_hides_behind_backward() -> None:
    for config, expected in ((FlexDeMoConfig(), 8.0), (None, 6.0)):
        assert step_seconds(config, 5.0, 3.0) == pytest.approx(expected)
        assert step_seconds(config, 5.0, None) == pytest.approx(5.0)


def _shipped(
    replicator: Any, name: str = "t5-small", nodes: int = 2, compute: float | None = None, **options: Any
) -> tuple[dict[str, Any], str]:
    config = FlexDeMoConfig(replicator=replicator, **options)
    links = slow_links(read_shapes(name), Mesh(replicate=nodes, shard=2), config, compute_seconds=compute)
    console = Console(width=WIDTH, file=io.StringIO())
    console.print(*slow_links_report(links, config), sep="\n")
    return links, console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_bits_bytes_break_even_and_times() -> None:
    def row(text: str, start: str) -> list[str]:
        (line,) = (line for line in text.splitlines() if line.startswith(start))
        return line.removeprefix(start).split()

    links, text = _shipped(DCTTopK(top_k=32), nodes=4)
    asked, found = row(text, "DCTTopK(64, 32) *"), links["rows"][0]
    assert asked[0] == "bf16" and asked[1] == f"{found['bits_per_parameter']:.3f}"
    assert float(asked[2]) == pytest.approx(found["bytes"]["sent"] / 1e6, abs=1e-3)
    assert float(asked[3]) == pytest.approx(found["break_even_nodes"], abs=0.1)
    # 32 (R - 1) M values and indices of 16 bits over 1 Gbit/s, in milliseconds.
    assert float(asked[6]) == pytest.approx(8 * found["bytes"]["sent"] / 1e6, abs=0.01)
    assert row(text, "HSDP, all-reduce")[:2] == ["bf16", "16.000"]
    assert "those of the exchange alone" in " ".join(text.split())
    for replicator, title in ((Random(1 / 64), "Random(1/64)"), (NoReplication(), "NoReplication()")):
        links, text = _shipped(replicator, "llama3-70b", 1000, compute=12.5)
        assert links["rows"][0]["name"] == title
        assert max(map(len, text.splitlines())) <= WIDTH and text.isascii()
    averaged = row(_shipped(DiLoCo(period=50))[1], "DiLoCo(50) *")
    assert averaged[:2] == ["fp32", "0.640"] and averaged[3] == "-"
