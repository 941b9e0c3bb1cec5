"""The text of a plan: what it says, and that it fits a terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_report import WIDTH, moved, parameter_table, plan_as_dict, plan_as_text, plan_zero2
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, CompareOptions, compare_strategies
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes

_OPTIONS = CompareOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**24, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)


def _text(model: ModelShapes, replicate: int, shard: int) -> str:
    mesh = Mesh(replicate=replicate, shard=shard)
    return plan_as_text(model, mesh, _OPTIONS, compare_strategies(model, mesh, _OPTIONS))


@pytest.mark.parametrize(
    ("name", "replicate", "shard"), [("t5-base", 1, 1), ("10b", 2, 4), ("t5-base", 4, 1), ("t5-base", 2, 128)]
)
def test_every_line_fits_a_terminal(name: str, replicate: int, shard: int) -> None:
    lines = _text(read_shapes(name), replicate, shard).splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert all(line.isascii() for line in lines)


def test_all_sections_are_there() -> None:
    text = _text(read_shapes("10b"), 1, 8)
    for title in ("Parameters", "Load of Newton-Schulz", "Owners (lpt+pipeline)", "Bytes on the wire", "Predicted"):
        assert title in text
    assert "https://huggingface.co/tiiuae/Falcon3-10B-Base" in text
    assert "More ranks than matrices" not in text
    # The dearest matrix is 46080 x 3072: 2 * (2 * 46080 * 3072 + 2 * 3072 * 3072) bytes.
    assert "without the working memory of Newton-Schulz, 576 MiB for the dearest matrix in 16 bits." in text
    assert "MiB per owner on average" in text and " * " not in text.partition("Predicted")[2]


def test_what_auto_comes_to_is_said_of_the_machine_of_the_plan() -> None:
    def said(bandwidth: float, replicate: int) -> list[str]:
        options = replace(_OPTIONS, cost=replace(_OPTIONS.cost, bandwidth=(bandwidth,)))
        mesh = Mesh(replicate=replicate, shard=8)
        model = read_shapes("t5-base")
        text = plan_as_text(model, mesh, options, compare_strategies(model, mesh, options))
        return re.findall(r"overlap=auto on this machine, ([^:]*): (gathers start [a-z ]*);", " ".join(text.split()))

    in_step, early = "gathers start in the step", "gathers start during backward"
    assert said(1e12, 1) == [("lpt+pipeline", in_step)]
    assert said(1e8, 2) == [("lpt+pipeline", early), ("lpt+pipeline, owner grid", early)]


def test_owners_of_many_ranks_are_summarized() -> None:
    few = _text(read_shapes("t5-small"), 1, 4).partition("Owners (lpt+pipeline)")[2].splitlines()
    rows = [line.split() for line in few[3:7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert sum(int(row[1]) for row in rows) == 96
    many = _text(read_shapes("t5-small"), 1, 64)
    assert "busiest (0)" in many and "idlest (" in many


def test_more_ranks_than_matrices_are_reported() -> None:
    text = _text(read_shapes("t5-small"), 1, 128)
    assert "96 matrices on 128 ranks: 32 ranks own nothing" in text
    assert "Divide fused weights (--fused" in text


def test_long_names_are_shortened_in_the_middle() -> None:
    long = ParameterShape(name="encoder." + "very_long_part." * 10 + "weight", shape=(4, 4), kind="matrix")
    table = parameter_table(ModelShapes(name="m", source="", parameters=(long,)))
    row = table.splitlines()[2]
    assert len(row) <= WIDTH
    assert row.startswith("encoder.very_long_part.") and "..." in row and "part.weight " in row
    assert "(4, 4)" in row


_FEW_BYTES = replace(_OPTIONS, chunk_bytes=2**16)
_SMALL = ModelShapes(
    name="model",
    source="here",
    parameters=tuple(ParameterShape(name=f"m.{i}", shape=(64, 32), kind="matrix") for i in range(6)),
)


def test_the_dictionary_has_an_owner_for_each_matrix() -> None:
    mesh = Mesh(replicate=2, shard=2)
    outcomes = compare_strategies(_SMALL, mesh, _FEW_BYTES)
    plan = json.loads(json.dumps(plan_as_dict(_SMALL, mesh, _FEW_BYTES, outcomes)))
    assert plan["mesh"] == {"replicate": 2, "shard": 2, "ranks": 4}
    assert plan["model"]["matrices"] == [f"m.{i}" for i in range(6)]
    assert plan["model"]["parameters"][0]["algorithm"] == "muon"
    assert list(plan["strategies"]) == ["redundant", "round_robin", "lpt", PIPELINE, GRID]
    assert plan["strategies"]["redundant"]["owners"] == "all ranks"
    assert sorted(plan["strategies"][PIPELINE]["owners"]) == [0, 0, 0, 1, 1, 1]
    load = plan["strategies"][GRID]["load"]
    assert load["max_flops"] == max(load["flops_of_ranks"])
    assert load["max_over_bound"] == pytest.approx(load["max_flops"] / load["bound_flops"])


def test_bytes_by_direction_and_axis_equal_the_floor() -> None:
    outcomes = {each.name: each for each in compare_strategies(_SMALL, Mesh(replicate=2, shard=2), _FEW_BYTES)}
    grid = moved(outcomes[GRID])
    assert [(each.direction, each.axis) for each in grid] == [
        ("gather", "within a replica"),
        ("scatter", "within a replica"),
        ("scatter", "between replicas"),
    ]
    assert all(each.total == each.floor for each in grid)
    (gather,) = moved(outcomes["redundant"])
    assert gather.total == 2 * gather.floor


def test_both_ways_are_listed_with_what_leaves_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--shapes", "t5-small", "--shard", "4", "--node-ranks", "2", "--machine", "h100"]
    main([*arguments, "--json"])
    direct, hierarchical = json.loads(capsys.readouterr().out)["zero2"]
    assert (direct["way"], hierarchical["way"]) == ("direct", "hierarchical")
    assert direct["node_bytes"] == 2 * hierarchical["node_bytes"]
    assert hierarchical["is_chosen"] and not direct["is_chosen"]
    main(arguments)
    assert "hierarchical *" in capsys.readouterr().out


def test_one_node_has_nothing_to_choose() -> None:
    model, cost = read_shapes("t5-small"), PRESETS["h100"]
    assert plan_zero2(model, Mesh(replicate=2, shard=8), cost, node_ranks=8) is None
    assert plan_zero2(model, Mesh(replicate=1, shard=16), cost, node_ranks=8) is not None
