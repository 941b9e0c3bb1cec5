"""The examples of a Trainer of transformers and of Accelerate, a few rows long."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

from examples.causal_lm_trainer import library_text, main
from tests.integration.integrations.accelerate.loop import run_script
from tests.integration.integrations.transformers.runs import accelerator_of
from tests.recipes.rows import write_csv
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, run_program


def _run_trainer(directory: str, parallel: str, *words: str) -> float:
    small = {"hidden_size": 64, "num_layers": 2, "block_size": 32, "vocab_size": 300}
    quiet = {"report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 8, "save_steps": 10}
    places = {"text_file": f"{directory}/text.txt", "output_dir": f"{directory}/out"}
    options = small | quiet | places | {"use_cpu": True, "muon_lr": 1e-2, "max_steps": 20}
    with accelerator_of(parallel):
        metrics = main([*(word for name, value in options.items() for word in (f"--{name}", str(value))), *words])
    return metrics["eval_loss"]


def test_the_example_learns_goes_on_and_saves_a_model(gloo: ProcessPool, tmp_path: Path) -> None:
    Path(tmp_path, "text.txt").write_text(library_text()[:20000])
    losses = gloo.run(_run_trainer, str(tmp_path), "fsdp", world_size=2)
    # log(300) is 5.7.
    assert max(losses) < 4.5 and len(set(losses)) == 1
    resume = ("--resume_from_checkpoint", f"{tmp_path}/out/checkpoint-10")
    assert gloo.run(_run_trainer, str(tmp_path), "fsdp", *resume, world_size=2) == losses
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 2


_EXAMPLES = ROOT / "examples"
_SMALL = {"epochs": 2, "width": 16, "layers": 1, "vocabulary": 400, "batch": 2, "rows": 24, "validation-rows": 8}


def _losses(printed: str) -> dict[str, float]:
    lines = (line.split(": validation loss ") for line in printed.splitlines() if "validation loss" in line)
    return {what: float(loss) for what, loss in lines}


def test_the_example_learns_saves_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options: dict[str, Any] = _SMALL | {"source": write_csv(tmp_path), "cache": tmp_path, "output": tmp_path / "out"}
    arguments = [f"--{key}={value}" for key, value in options.items()]

    def run(*more: str) -> dict[str, float]:
        words = [*arguments, *more]
        return _losses(gloo.run(run_script, _EXAMPLES / "accelerate_t5.py", words, world_size=2, timeout=170.0)[0])

    losses = run()
    assert losses.keys() == {"untrained", "epoch 1", "epoch 2"}
    assert losses["epoch 2"] < losses["untrained"]
    # The epochs are over: what is printed first is the loss of the weights that were loaded.
    assert run("--resume") == {"untrained": losses["epoch 2"]}
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "out" / "model")
    assert model.get_input_embeddings().weight.shape == (400, 16)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", ["auto", "keep"])
def test_the_first_run_reports_loss_and_speed(tmp_path: Path, optimizer: str) -> None:
    printed = run_program(_EXAMPLES / "first_run.py", optimizer, directory=tmp_path, num_ranks=2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+), [\d.]+ s per step, [\d,]+ tokens/s", printed)]
    # log(256) is 5.5.
    assert len(losses) == 2 and losses[1] < losses[0] < 5.5
