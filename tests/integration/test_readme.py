"""What README and the pages show runs as it stands: programs, files of options, commands, examples of docstrings."""

import importlib.util
import re
import shlex
import textwrap
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch import nn

import lightning_muon
from lightning_muon import FlexDeMo, Options, ParallelMuon
from lightning_muon.cli.launch import split_config
from lightning_muon.cli.main import main
from lightning_muon.params.shapes import read_shapes
from tests.support.programs import ROOT, run_program

PAGES = ["README.md", "examples/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for folder in ("docs", "recipes/*") for path in ROOT.glob(f"{folder}/*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Snippet(NamedTuple):
    name: str  # page:line
    language: str
    note: str  # Of a comment right above it: "ranks: 4", or "not run: ..." with the reason.
    text: str


def _snippets(page: str) -> list[Snippet]:
    text, found = (ROOT / page).read_text(), list[Snippet]()
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("text"))
        found.append(Snippet(f"{page}:{line}", block["language"], block["note"] or "", block["text"]))
    return found


SNIPPETS = [snippet for page in PAGES for snippet in _snippets(page)]


def _of(language: str, long: str | None = None) -> list[Any]:
    """The snippets in a language; those of pages in the folder ``long`` run in ``make test-long``."""
    found = [each for each in SNIPPETS if each.language == language]
    marks = [[pytest.mark.long] if long and each.name.startswith(long) else [] for each in found]
    return [pytest.param(each, id=each.name, marks=own) for each, own in zip(found, marks, strict=True)]


def _program(word: str) -> str:
    (found,) = {each.text for each in SNIPPETS if each.language == "python" and word in each.text}
    return found


@pytest.mark.parametrize("snippet", _of("python", long="docs/"))
def test_a_program_of_a_page_runs(tmp_path: Path, snippet: Snippet) -> None:
    if snippet.note.startswith("not run: "):
        pytest.skip(snippet.note)
    script = tmp_path / "program.py"
    script.write_text(snippet.text)
    ranks = re.fullmatch(r"ranks: (\d+)", snippet.note)
    output = run_program(script, directory=tmp_path, num_ranks=int(ranks[1]) if ranks else 2)
    # torch 2.11 says so wherever a profiler has a schedule.
    output = output.replace("UserWarning: Warning: Profiler clears events at the end of each cycle.", "")
    assert "UserWarning" not in output and "returned a view tensor" not in output, output


def test_the_plain_loop_of_the_page_is_that_of_the_examples() -> None:
    assert (ROOT / "examples" / "plain_loop.py").read_text().endswith(_program("def train(model, batches)"))


_CHECK = """
weights = [getattr(weight, "full_tensor", lambda: weight)() for weight in model.parameters()]
everyone = [None, None]
torch.distributed.all_gather_object(everyone, weights)
assert all(map(torch.equal, *everyone))
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "loop", "theirs", "ours", "check"),
    [
        ("class Largest", "init_process_group()\nnodes,", "DCTTopK(top_k=8)", "Largest(count=8)", ""),
        ("class HalfDdp", "make_mode(", '"zero2"', '"ddp_bf16"', _CHECK),
        ("def one_at_a_time", "pipeline_split=[", "pipeline_split", 'pipeline_schedule="one_at_a_time", pipeline_split',
         ""),
    ],
    ids=["replicator", "mode", "schedule"],
)  # fmt: skip
def test_what_is_written_by_oneself_trains(
    tmp_path: Path, own: str, loop: str, theirs: str, ours: str, check: str
) -> None:
    """The class or function of a page in the loop of another page, which ``check`` ends."""
    whole = _program(loop)
    changed = whole.replace(theirs, ours)
    if check:
        changed = changed.partition("torch.distributed.destroy_process_group()")[0] + check
    assert changed != whole
    script = tmp_path / "own.py"
    script.write_text(_program(own) + changed)
    run_program(script, directory=tmp_path, num_ranks=2)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
@pytest.mark.parametrize("snippet", _of("yaml"))
def test_a_file_of_options_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], snippet: Snippet) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(snippet.text)
    content = yaml.safe_load(snippet.text)
    if "trainer" in content:
        _end(["fit", "--config", str(path), "--print_config"])
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["trainer"]["strategy"]["class_path"].endswith(
            content["trainer"]["strategy"]["class_path"].split(".")[-1]
        )
    elif "distributed_type" in content:
        with split_config(str(path)) as of_accelerate:  # Ours is read in there, too.
            assert load_config_from_file(of_accelerate).num_processes == content["num_processes"]
    else:
        options = Options.from_file(path)
        assert all(getattr(options, name) != getattr(Options(), name) for name in content)


@pytest.mark.parametrize("snippet", _of("json"))
def test_a_list_of_shapes_is_read(tmp_path: Path, snippet: Snippet) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(snippet.text)
    assert read_shapes(path).parameters


def _commands() -> list[Any]:
    shells = [each.text.replace("\\\n", " ") for each in SNIPPETS if each.language in ("", "bash", "shell")]
    lines = [line for text in shells for line in text.splitlines()]
    for page in PAGES:
        lines += re.findall(r"`(lightning-muon [^`]+)`", (ROOT / page).read_text())
    pattern = re.compile(r"(lightning-muon|python|torchrun|accelerate|make) ")
    commands = [" ".join(shlex.split(line, comments=True)) for line in lines if pattern.match(line)]
    # Options in another order are the same command.
    different = {frozenset(line.split(" --")): line for line in commands}
    return [pytest.param(line, id=line[:60]) for line in different.values()]


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter:UserWarning")
@pytest.mark.parametrize("line", _commands())
def test_a_command_of_a_page_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    program, *words = line.split()
    if program == "make":
        targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in " ".join(targets).split()
    elif program != "lightning-muon":
        for before, word in zip([program, *words], words, strict=False):
            if before == "-m":
                assert importlib.util.find_spec(word)
            elif word.endswith((".py", ".yaml")) or "/" in word:
                assert (ROOT / word).exists() or "outputs/" in word
    else:
        for name in ("recipes", "examples"):
            (tmp_path / name).symlink_to(ROOT / name)
        monkeypatch.chdir(tmp_path)
        _check_command(*words)


def _check_command(name: str, *words: str) -> None:
    """Run what takes seconds and needs no files of the reader; parse the rest."""
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if name == "--help":
        _end([name])
    elif name in ("fit", "validate", "test", "predict"):
        config = str(ROOT / "recipes" / "t5_summarization" / "demo.yaml")
        _end([name, *(config if word == "FILE.yaml" else word for word in words), "--print_config"])
    elif name == "launch":
        assert set(options) - {"--its", "--arguments"} <= set(launch_command_parser()._option_string_actions)
    elif name == "plan" and ("--shapes" in words or "--config" in words):
        main([name, *words])
    else:
        parser = ArgumentParser()
        import_module(f"lightning_muon.cli.{name}").add_arguments(parser)
        assert set(options) <= set(parser._option_string_actions)
        if {"--shapes", "--config", "DIR"} & set(words):
            parser.parse_args(words)


def _end(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert not ending.value.code


@pytest.mark.parametrize("documented", [ParallelMuon, FlexDeMo, Options])
def test_the_example_of_a_class_runs(capsys: pytest.CaptureFixture[str], documented: type) -> None:
    example = textwrap.dedent(re.search(r"Example::\n\n(.*?)\n\n    Args:", documented.__doc__ or "", re.DOTALL)[1])  # type: ignore[index]
    names: dict[str, Any] = {name: getattr(lightning_muon, name) for name in lightning_muon.__all__}
    names |= {"torch": torch, "nn": nn}
    exec(example, names)
    if documented is ParallelMuon:
        assert "1.weight" in capsys.readouterr().out
    if documented is FlexDeMo:
        assert names["optimizer"].num_exchanges == 1
