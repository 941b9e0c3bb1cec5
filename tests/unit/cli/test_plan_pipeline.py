"""``lightning-muon plan --pipeline``, run through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.cli.main import main


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, int], dict[str, Any]]:
    main(["plan", "--pipeline", "4", *arguments, "--json"])
    return {(each["schedule"], each["stages_per_rank"]): each for each in json.loads(capsys.readouterr().out)}


def test_schedules_are_compared_for_the_same_layers(capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(capsys, "--microbatches", "12")
    assert found["1f1b", 1]["step"] == 3 * (12 + 3) and found["1f1b", 1]["memory"] == 4
    assert found["zb_v", 2]["bubble"] == 0 and found["zb_v", 2]["memory"] == 4
    assert found["v_min", 2]["memory"] == 2
    steps = [each["step"] for each in found.values()]
    assert steps == sorted(steps) and min(found["auto", 1]["step"], found["auto", 2]["step"]) == steps[0]


def test_what_needs_too_much_memory_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(capsys, "--memory-limit", "3.5", "--stage-costs", "1,1,1,0.1,2,3")
    assert ("v_half", 2) in found and ("1f1b", 1) not in found
    assert all(each["memory"] <= 3.5 for each in found.values())


def test_a_picture_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    main(["plan", "--pipeline", "2", "--microbatches", "4", "--draw", str(picture)])
    assert "interleaved_1f1b" in capsys.readouterr().out
    assert "dual_pipe_v, 2 stages per rank" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--stage-costs", "1,2"), "it takes 4 to 6 numbers"),
        (("--stage-costs", "1,2,3,x"), "could not convert"),
        (("--stage-costs=1,2,-3,0",), "backward_weight must be finite"),
        (("--stage-costs=0,0,0,1",), "forward and backward take no time"),
        (("--memory-limit", "0.5"), "memory_limit=0.5 holds less than one micro-batch"),
        (("--shapes", "10b"), "not allowed with"),
    ],
)
def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str], arguments: Any, match: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--pipeline", "4", *arguments])
    assert match in f"{capsys.readouterr().err} {caught.value}"
