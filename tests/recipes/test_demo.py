"""The demo from its command line to its report, on a few rows."""

from pathlib import Path

import pytest

from recipes.t5_summarization.demo import run
from recipes.t5_summarization.plot import read_metric
from tests.recipes.rows import write_csv
from tests.support.programs import ROOT, run_program


def arguments(folder: Path) -> list[str]:
    options = {
        "trainer.strategy": "auto",
        "trainer.devices": "1",
        "trainer.max_epochs": "2",
        "trainer.log_every_n_steps": "1",
        "trainer.logger.init_args.save_dir": str(folder),
        "model.init_args.rouge_batches": "1",
        "model.init_args.max_new_tokens": "5",
        "data.init_args.source": str(write_csv(folder)),
        "data.init_args.vocab_size": "400",
        "data.init_args.validation_share": "0.2",
        "data.init_args.cache_dir": str(folder / "cache"),
    }
    return [f"--{name}={value}" for name, value in options.items()]


def test_a_fit_on_a_local_file_ends_with_the_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["demo"])  # LightningCLI warns if there are arguments there too
    run(arguments(tmp_path))
    printed = capsys.readouterr().out
    report = printed[printed.index("What ran on which optimizer") :]
    for part in ("untrained model", "unigram entropy", "trained model", "ROUGE-1", "ROUGE-2", "ROUGE-L"):
        assert part in report
    assert report.count("target     How to ") == 3
    assert report.count("generated  ") == 3
    files = {line.split("  ")[0]: Path(line.split()[-1]) for line in report.splitlines()[-3:]}
    assert set(files) == {"checkpoint", "CSV log", "plot"}
    assert all(path.exists() for path in files.values())
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    _, losses = read_metric(files["CSV log"], "val_loss")
    assert len(losses) == 2
    assert losses[1] < losses[0]
    untrained = next(line for line in report.splitlines() if line.startswith("untrained model"))
    assert losses[1] < float(untrained.split()[-1])


@pytest.mark.long
def test_two_processes_end_with_a_table_of_what_ran_on_muon(tmp_path: Path) -> None:
    options = [each for each in arguments(tmp_path) if not each.startswith("--trainer.strategy")]
    options += ["--trainer.devices=2", "--trainer.max_epochs=1", "--trainer.strategy.init_args.replicate_size=1"]
    text = run_program("-m", "recipes.t5_summarization.demo", *options, directory=ROOT, num_ranks=2, timeout=170.0)
    report = text[text.index("What ran on which optimizer") :]
    assert "Muon: 36 tensors" in report
    assert "embedding, tied to model.lm_head.weight" in report
    assert report.count("generated  ") == 3
    checkpoint = next(line.split()[-1] for line in report.splitlines() if line.startswith("checkpoint"))
    assert Path(checkpoint).is_file(), "one file, as it is small"
