"""A plan as text and as a dictionary."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_report import WIDTH, parameter_table, plan_as_dict, plan_as_text, zero2_ways
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, CompareOptions, compare_strategies
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes

_OPTIONS = CompareOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**24, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)


def _text(name: str, replicate: int, shard: int, options: CompareOptions = _OPTIONS) -> str:
    model, mesh = read_shapes(name), Mesh(replicate=replicate, shard=shard)
    outcomes = compare_strategies(model, mesh, options)
    return plan_as_text(plan_as_dict(model, mesh, options, outcomes), model, outcomes)


def test_all_sections_are_there_and_every_line_fits_a_terminal() -> None:
    text, many = _text("10b", 1, 8), _text("t5-base", 2, 128)
    for plan in (text, many, _text("t5-base", 1, 1)):
        for title in ("Parameters", "Load of Newton-Schulz", "Owners (lpt+pipeline)", "Bytes on the wire", "Predicted"):
            assert title in plan
        assert max(map(len, plan.splitlines())) <= WIDTH
        assert plan.isascii()
    assert "https://huggingface.co/tiiuae/Falcon3-10B-Base" in text
    assert "More ranks than matrices" not in text
    # The dearest matrix is 46080 x 3072: 2 * (2 * 46080 * 3072 + 2 * 3072 * 3072) bytes.
    assert "without the working memory of Newton-Schulz, 576 MiB for the dearest matrix in 16 bits." in text
    assert "MiB per owner on average" in text and " * " not in text.partition("Predicted")[2]


def test_what_auto_comes_to_is_said_of_the_machine() -> None:
    def said(bandwidth: float, replicate: int) -> list[str]:
        options = replace(_OPTIONS, cost=replace(_OPTIONS.cost, bandwidth=(bandwidth,)))
        text = " ".join(_text("t5-base", replicate, 8, options).split())
        return re.findall(r"overlap=auto on this machine, ([^:]*): (gathers start [a-z ]*);", text)

    in_step, early = "gathers start in the step", "gathers start during backward"
    assert said(1e12, 1) == [("lpt+pipeline", in_step)]
    assert said(1e8, 2) == [("lpt+pipeline", early), ("lpt+pipeline, owner grid", early)]


def test_owners_of_many_ranks_are_summarized() -> None:
    few = _text("t5-small", 1, 4).partition("Owners (lpt+pipeline)")[2].splitlines()
    rows = [line.split() for line in few[3:7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert sum(int(row[1]) for row in rows) == 96
    many = _text("t5-small", 1, 128)
    assert "busiest (0)" in many and "idlest (" in many
    assert "96 matrices on 128 ranks: 32 ranks own nothing" in many
    assert "Divide fused weights (--fused" in many


def test_long_names_are_shortened_in_the_middle() -> None:
    long = ParameterShape(name="encoder." + "very_long_part." * 10 + "weight", shape=(4, 4), kind="matrix")
    row = parameter_table(ModelShapes(name="m", source="", parameters=(long,))).splitlines()[2]
    assert len(row) <= WIDTH
    assert row.startswith("encoder.very_long_part.") and "..." in row and "part.weight " in row
    assert "(4, 4)" in row


def test_the_dictionary_has_owners_loads_and_bytes() -> None:
    matrices = tuple(ParameterShape(name=f"m.{i}", shape=(64, 32), kind="matrix") for i in range(6))
    model, mesh = ModelShapes(name="model", source="here", parameters=matrices), Mesh(replicate=2, shard=2)
    options = replace(_OPTIONS, chunk_bytes=2**16)
    outcomes = compare_strategies(model, mesh, options)
    plan = json.loads(json.dumps(plan_as_dict(model, mesh, options, outcomes)))
    assert plan["mesh"] == {"replicate": 2, "shard": 2, "ranks": 4}
    assert plan["model"]["matrices"] == [f"m.{i}" for i in range(6)]
    assert plan["model"]["parameters"][0]["algorithm"] == "muon"
    assert list(plan["strategies"]) == ["redundant", "round_robin", "lpt", PIPELINE, GRID]
    assert plan["strategies"]["redundant"]["owners"] == "all ranks"
    assert sorted(plan["strategies"][PIPELINE]["owners"]) == [0, 0, 0, 1, 1, 1]
    load = plan["strategies"][GRID]["load"]
    assert load["max_flops"] == max(load["flops_of_ranks"])
    assert load["max_over_bound"] == pytest.approx(load["max_flops"] / load["bound_flops"])

    def bytes_of(strategy: str) -> list[dict[str, Any]]:
        return plan["strategies"][strategy]["bytes"]

    within, between = "within a replica", "between replicas"
    directions = [("gather", within), ("scatter", within), ("scatter", between)]
    assert [(each["direction"], each["axis"]) for each in bytes_of(GRID)] == directions
    assert all(each["total"] == each["floor"] for each in bytes_of(GRID))
    (gather,) = bytes_of("redundant")
    assert gather["total"] == 2 * gather["floor"]


def test_the_ways_of_zero2_name_what_leaves_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--shapes", "t5-small", "--shard", "4", "--node-ranks", "2", "--machine", "h100"]
    main([*arguments, "--json"])
    direct, hierarchical = json.loads(capsys.readouterr().out)["zero2"]
    assert (direct["way"], hierarchical["way"]) == ("direct", "hierarchical")
    assert direct["node_bytes"] == 2 * hierarchical["node_bytes"]
    assert hierarchical["is_chosen"] and not direct["is_chosen"]
    main(arguments)
    assert "hierarchical *" in capsys.readouterr().out
    # On one node there is nothing to choose.
    model, cost = read_shapes("t5-small"), PRESETS["h100"]
    assert not zero2_ways(model, Mesh(replicate=2, shard=8), cost, node_ranks=8)
    assert zero2_ways(model, Mesh(replicate=1, shard=16), cost, node_ranks=8)
