"""The text of a plan: what it says, and that it fits a terminal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_muon.cli.plan_report import WIDTH, parameter_table, plan_as_text
from lightning_muon.cli.plan_specs import Mesh
from lightning_muon.cli.plan_strategies import PlanOptions, compare_strategies
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes

_OPTIONS = PlanOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**24, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)


def _text(model: ModelShapes, replicate: int, shard: int) -> str:
    mesh = Mesh(replicate=replicate, shard=shard)
    return plan_as_text(model, mesh, _OPTIONS, compare_strategies(model, mesh, _OPTIONS))


@pytest.mark.parametrize("name", ["10b", "t5-base"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 8), (2, 4), (4, 1), (2, 128), (1, 4096)])
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


def test_owners_are_listed_for_few_ranks_and_summarized_for_many() -> None:
    few = _text(read_shapes("t5-small"), 1, 4).partition("Owners (lpt+pipeline)")[2].splitlines()
    rows = [line.split() for line in few[3:7]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert sum(int(row[1]) for row in rows) == 96
    many = _text(read_shapes("t5-small"), 1, 64)
    assert "busiest (0)" in many and "idlest (" in many


def test_more_ranks_than_matrices_are_reported_with_what_can_be_done() -> None:
    text = _text(read_shapes("t5-small"), 1, 128)
    assert "96 matrices on 128 ranks: 32 ranks own nothing" in text
    assert "Gram variant" in text and "groups of 1" in text


def test_long_names_are_shortened_in_the_middle() -> None:
    long = ParameterShape(name="encoder." + "very_long_part." * 10 + "weight", shape=(4, 4), kind="matrix")
    table = parameter_table(ModelShapes(name="m", source="", parameters=(long,)))
    row = table.splitlines()[2]
    assert len(row) <= WIDTH
    assert row.startswith("encoder.very_long_part.") and "..." in row and "part.weight " in row
    assert "(4, 4)" in row


def test_short_tables_stay_as_they_are() -> None:
    short = ParameterShape(name="weight", shape=(4, 4), kind="matrix", reason="Linear weight")
    row = parameter_table(ModelShapes(name="m", source="", parameters=(short,))).splitlines()[2]
    assert row.split() == ["weight", "(4,", "4)", "Muon", "Linear", "weight"]
