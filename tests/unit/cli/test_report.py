"""``lightning-muon report`` on what a real monitor has written, parsed, and opened in a browser if there is one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from lightning_muon.cli import main
from lightning_muon.cli.report import LoggedRun, write_report
from lightning_muon.monitor.html import Bar, Lane, curves, ticks, timeline_svg
from tests.distributed.monitor.test_step_monitor import EVERY, MATRICES, _train
from tests.support.browser import BROWSER, PHONE, probe_page
from tests.support.processes import ProcessPool


class _Page(HTMLParser):
    """Tags with their attributes, and the texts of titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    @override
    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    @override
    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


@pytest.fixture(scope="module")
def folder(gloo: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose steps a monitor has measured, and whose losses a logger has written."""
    run = tmp_path_factory.mktemp("runs") / "version_3"
    gloo.run(_train, (2,), str(run), world_size=2)
    rows = ["epoch,step,val_loss,loss,lr-AdamW", *(f"0,{step},,{3 / (step + 1)},0.1" for step in range(6)), "0,5,0.7,,"]
    (run / "metrics.csv").write_text("\n".join(rows))
    (run / "samples.json").write_text(json.dumps([{"hidden": "R_t_rn <b>", "right": "Return <b>"}]))
    return run


def test_the_page_is_whole_and_names_matrices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["report", str(folder.parent), "--out", str(folder / "page.html")])
    assert capsys.readouterr().out == f"wrote {folder / 'page.html'}\n"
    text = (folder / "page.html").read_text()
    page = _Page(text)
    assert (
        page.open == []
        and ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    )
    links = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert links == ["data:,"] and "url(" not in text and "http" not in text and "@import" not in text
    headings = re.findall("<h2>(.*?)</h2>", text)
    named = ("Loss", "Rates", "Parts of a step", "Balance", f"Timeline of step {2 * EVERY}", "Samples", "Last values")
    assert [heading.startswith(name) for heading, name in zip(headings, named, strict=True)] == [True] * len(named)
    assert "Return &lt;b&gt;" in text and "<b>" not in text
    for name in MATRICES:
        ops = [title for title in page.titles if title.startswith("newton_schulz") and name in title.split("\n")]
        assert len(ops) == 2, "measured and planned, at one owner"


def test_losses_are_drawn_over_the_seconds_of_the_monitor(folder: Path) -> None:
    run = LoggedRun.read(folder)
    assert run.curves["loss"][:2] == [(0.0, 3.0), (1.0, 1.5)] and run.curves["val_loss"] == [(5.0, 0.7)]
    # Step 3 of the monitor is step 2 of the logger, since that counts from 0.
    (early, first), (late, last) = run.times
    assert (early, late) == (EVERY - 1, 2 * EVERY - 1)
    seconds = [second for second, _ in run.over_seconds(run.curves["loss"])]
    assert seconds[2] == first and seconds[5] == last and seconds[4] == pytest.approx(first + (last - first) * 2 / 3)


def test_runs_are_drawn_in_the_same_pictures(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]})
    )
    text = write_report([folder, tmp_path]).read_text()
    assert f"{tmp_path.name}: 2 at 2 step</title>" in text and "/version_3: 0.5 at 5 step</title>" in text
    with pytest.raises(FileNotFoundError, match=r"has no metrics\.csv, trainer_state\.json, muon_monitor"):
        write_report([tmp_path.parent / "nothing"])
    (tmp_path / "muon_monitor").mkdir()
    lines = tmp_path / "muon_monitor" / "steps.jsonl"
    # Half a line, of a process that was killed, is left out.
    lines.write_text('{"step": 1, "seconds": 1, "values": {"a\u2028b": 1}}\n{"step', encoding="utf-8")
    assert [line["step"] for line in LoggedRun.read(tmp_path).measured] == [1]


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("muon_monitor/steps.jsonl", '{"step\n', "line 1: Unterminated string"),
        ("muon_monitor/steps.jsonl", '{"step": 1}\n', "KeyError: 'seconds'"),
        ("trainer_state.json", '{"a": 1}', "KeyError: 'log_history'"),
        ("samples.json", "[1, 2]", "'int' object is not iterable"),
    ],
)
def test_a_file_that_no_run_writes_is_named(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / "muon_monitor").mkdir()
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is not what a run writes: .*{what}"):
        LoggedRun.read(tmp_path)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it_on_a_phone(folder: Path, tmp_path: Path) -> None:
    text = write_report([folder], tmp_path / "report.html").read_text()
    probe = probe_page(text, tmp_path)
    assert probe["loaded"] == []
    assert probe["scrolled"] <= probe["width"] == PHONE
    assert probe["smallest"] >= 7
    for name in MATRICES:
        assert any(title.startswith("newton_schulz") and name in title.split("\n") for title in probe["shown"])


def test_pictures_have_round_ticks_and_escape_names() -> None:
    assert ticks(0, 13.7) == [0, 2, 4, 6, 8, 10, 12] and ticks(5, 5) == [5]
    svg = timeline_svg(
        [Lane(name="a<b", boxes=[Bar(0, 0.5, "G[0]", "gather & wait", "#fff"), Bar(0.5, 1, "x", "y", "#000")])]
    )
    assert "a&lt;b" in svg and "gather &amp; wait" in svg
    assert re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', svg) == [("130.00", "410.00"), ("540.00", "410.00")]
    assert curves("none", {"a": [(0, float("nan"))]}, "step") == ""
