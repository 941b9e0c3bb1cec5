"""``lightning-muon report`` on what a real monitor has written, parsed, and opened in a browser if there is one."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from lightning_muon.cli import main
from lightning_muon.cli.logged_run import LoggedRun
from lightning_muon.cli.report import write_report
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
        ("metrics.csv", b"\xff\xfe\x00", "UnicodeDecodeError"),
    ],
)
def test_a_file_that_no_run_writes_is_named(tmp_path: Path, name: str, text: str | bytes, what: str) -> None:
    (tmp_path / "muon_monitor").mkdir()
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"{name} is not what a run writes: .*{what}"):
        LoggedRun.read(tmp_path)


def test_half_a_timeline_is_named(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder, tmp_path / "run")
    part = run / "muon_monitor" / "timeline-1.json"
    part.write_text(part.read_text()[:300])
    with pytest.raises(ValueError, match=r"timeline-1\.json is not what a run writes: JSONDecodeError: "):
        write_report([run])
    part.write_text('{"step": 1}')
    with pytest.raises(ValueError, match=r"timeline-1\.json is not what a run writes: KeyError: 'spans'"):
        write_report([run])


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("metrics.csv", " \n", "metrics.csv is empty"),
        ("metrics.csv", "epoch,step,loss\n", "metrics.csv has a first line with names and no other lines"),
        ("metrics.csv", "Dear reader,\na letter.\n", "is no table of metrics: its first line, 'Dear reader,', names"),
        ("metrics.csv", "step,loss\n1,\n2,a lot\n", "metrics.csv has no numbers beside step and epoch"),
        ("trainer_state.json", '{"log_history": []}', "log_history in .*trainer_state.json is empty"),
        ("muon_monitor/steps.jsonl", '{"step', "has no metrics.csv of a CSVLogger and no trainer_state.json"),
    ],
)
def test_a_run_without_anything_to_draw_is_refused(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=f"lightning-muon report: .*{what}.* wait until it has logged something"):
        main.main(["report", str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


def _write_monitor(folder: Path, seconds: dict[int, float]) -> None:
    """Write what a monitor writes that has measured these steps at these times."""
    (folder / "muon_monitor").mkdir(parents=True)
    lines = [{"step": step, "seconds": at, "values": {"optimizer_ms/total": 1.5}} for step, at in seconds.items()]
    (folder / "muon_monitor/steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _write_history(folder: Path, losses: dict[int, float]) -> None:
    """Write what a Trainer of transformers writes into a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": step, "loss": loss, "epoch": 0.5} for step, loss in losses.items()]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_transformers_have_loss_and_monitor_on_one_page(tmp_path: Path) -> None:
    _write_monitor(tmp_path, {2: 1.0, 4: 2.0})
    assert "no loss is drawn, since" in write_report([tmp_path]).read_text(), "before the first checkpoint"
    _write_history(tmp_path / "checkpoint-8", {2: 3.0, 4: 2.0})
    _write_history(tmp_path / "checkpoint-16", {2: 3.0, 4: 1.0})
    (tmp_path / "checkpoint-24").mkdir()  # Is being written.
    for folder, last in (("", 1.0), ("checkpoint-16", 1.0), ("checkpoint-8", 2.0)):
        run = LoggedRun.read(tmp_path / folder)
        assert run.curves["loss"] == [(2.0, 3.0), (4.0, last)], folder
        assert run.over_seconds(run.curves["loss"]) == [(1.0, 3.0), (2.0, last)], folder
        text = write_report([tmp_path / folder], tmp_path / "report.html").read_text()
        assert f"loss: {last:.5g} at 2 seconds of training</title>" in text and "Parts of a step, bytes" in text
    _write_history(tmp_path, {2: 3.0, 4: 0.5})  # By save_state.
    assert LoggedRun.read(tmp_path).curves["loss"][-1] == (4.0, 0.5)


def test_values_that_are_not_finite_are_said_to_be_so(tmp_path: Path) -> None:
    rows = ["step,loss,val_loss,norm,speed", "1,2,nan,1,2", "2,nan,,inf,", "3,nan,,2,", "4,inf,nan,nan,3", "5,nan,,1,"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    text = write_report([tmp_path]).read_text()
    loss, rates = re.findall("<h2>(?:Loss|Rates and other metrics)</h2>(.*?)</section>", text)
    assert re.findall("<p>(.*?)</p>", loss) == [
        "loss: not finite from step 2 on",
        "val_loss: not finite from step 1 on",
    ]
    assert re.findall("<p>(.*?)</p>", rates) == ["norm: not finite at steps 2, 4"]
    name = f"{tmp_path.parent.name}/{tmp_path.name}"
    assert f"<p>{name} loss: not finite from step 2 on</p>" in write_report([tmp_path, tmp_path]).read_text()


def test_a_section_without_content_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,speed\n1,2\n2,3\n")
    (tmp_path / "muon_monitor").mkdir()
    line = {"step": 2, "seconds": 1.0, "values": {}, "newton_schulz_gflop": [0.0], "newton_schulz_ms": [0.0]}
    (tmp_path / "muon_monitor/steps.jsonl").write_text(json.dumps(line) + "\n")
    text = write_report([tmp_path]).read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == ["Loss", "Rates and other metrics", "Last values"]
    assert "<h2>Loss</h2><p>no loss is drawn, since no metric has &quot;loss&quot; in its name</p></section>" in text


def test_the_later_row_of_a_step_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["step,loss,seconds", "1,5,1", "2,4,2", "3,3,3", "4,9,4", "2,2.5,1", "3,2,2"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    run = LoggedRun.read(tmp_path)
    assert run.curves["loss"] == [(1.0, 5.0), (2.0, 2.5), (3.0, 2.0), (4.0, 9.0)]
    assert run.times == [(1.0, 1.0), (2.0, 5.0), (3.0, 6.0)], "four seconds had gone when it was resumed"
    main.main(["report", str(tmp_path)])
    said = f"{tmp_path / 'metrics.csv'} goes back from step 4 to step 2, as that of a resumed run does; of steps "
    said += "that are there twice the later values are drawn, and those after step 3 are of the run before"
    assert capsys.readouterr().out == f"{said}\nwrote {tmp_path / 'report.html'}\n"
    assert f"<h2>Notes</h2><p>{said}</p>" in (tmp_path / "report.html").read_text()


def test_a_clock_that_went_on_is_taken_as_it_is(tmp_path: Path) -> None:
    rows = ["step,loss,seconds", "1,5,1", "2,4,2", "3,3,3", "2,2.5,4", "3,2,5"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    assert LoggedRun.read(tmp_path).times == [(1.0, 1.0), (2.0, 4.0), (3.0, 5.0)]


def test_the_history_with_the_latest_step_counts(tmp_path: Path) -> None:
    for folder, step in ((tmp_path, 3), (tmp_path / "checkpoint-4", 4)):
        folder.mkdir(exist_ok=True)
        history = [{"step": number, "loss": 1.0} for number in range(1, step + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
    assert LoggedRun.read(tmp_path).curves["loss"][-1] == (4.0, 1.0)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 5, "log_history": history[:1]}))
    assert LoggedRun.read(tmp_path).curves["loss"] == [(1.0, 1.0)]


@pytest.mark.parametrize("file", ["metrics.csv", "muon_monitor/steps.jsonl"])
def test_a_version_that_has_just_begun_hides_no_other(tmp_path: Path, file: str) -> None:
    for version in (0, 1):
        (tmp_path / f"version_{version}/muon_monitor").mkdir(parents=True)
    (tmp_path / "version_0/metrics.csv").write_text("step,loss\n1,2\n")
    (tmp_path / "version_1" / file).touch()
    run = LoggedRun.read(tmp_path)
    assert run.folder.name == "version_0"
    assert "version_1" in run.notes[0]
    assert "nothing that can be drawn has been written there yet" in run.notes[0]


def test_the_clock_of_a_resumed_monitor_goes_on(tmp_path: Path) -> None:
    _write_monitor(tmp_path, {2: 1.0, 4: 2.0, 6: 0.5, 8: 1.5})  # Was resumed from step 4.
    assert LoggedRun.read(tmp_path).times == [(2.0, 1.0), (4.0, 2.0), (6.0, 2.5), (8.0, 3.5)]


def test_other_versions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "run_a" / "lightning_logs"
    for number in (1, 2, 10):
        (runs / f"version_{number}").mkdir(parents=True)
        (runs / f"version_{number}" / "metrics.csv").write_text(f"step,loss\n{number},1\n")
    (runs / "version_11").mkdir()  # Has logged nothing.
    said = f"{runs / 'version_10'} is the newest run in {runs}; left out: version_1, version_2. To draw runs in "
    said += f"the same pictures, name them: lightning-muon report {runs / 'version_2'} {runs / 'version_10'}"
    later = f"version_11 in {runs}: nothing that can be drawn has been written there yet"
    for folder in (runs, tmp_path / "run_a"):  # The latter is the save_dir of a CSVLogger.
        main.main(["report", str(folder)])
        assert capsys.readouterr().out == f"{said}\n{later}\nwrote {folder / 'report.html'}\n"
        assert f"<h2>Notes</h2><p>{said}</p><p>{later}</p>" in (folder / "report.html").read_text()
    main.main(["report", str(runs / "version_2"), str(runs / "version_10")])
    assert capsys.readouterr().out == f"wrote {runs / 'version_2' / 'report.html'}\n"
    shutil.copytree(runs, tmp_path / "run_a" / "other")
    with pytest.raises(FileNotFoundError, match=f"several folders; .* report {runs} {tmp_path / 'run_a' / 'other'}$"):
        LoggedRun.read(tmp_path / "run_a")


def test_a_run_is_reported_while_it_writes(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"epoch,loss,step\r\n0,3.5,8\r\n0,2.5,9\r\n0,1.5,1")  # Of step 10.
    assert LoggedRun.read(tmp_path).curves["loss"] == [(8.0, 3.5), (9.0, 2.5)]
    _write_monitor(tmp_path, {10: 1.0})
    (tmp_path / "metrics.csv").write_text("epoch,loss,step\r\n")
    text = write_report([tmp_path]).read_text()
    assert "no loss is drawn, since" in text and "has a first line with names and no other lines" in text


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
