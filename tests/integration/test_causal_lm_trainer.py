"""The example of a Trainer: alone and with FSDP2, and its config file."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from examples.causal_lm_trainer import grouped, library_text, main, train_tokenizer
from tests.integration.integrations.transformers.runs import accelerator_of
from tests.support.processes import ProcessPool

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(directory: str, parallel: str, *words: str) -> float:
    small = {"hidden_size": 64, "num_layers": 2, "block_size": 32, "vocab_size": 300}
    quiet = {"report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 8, "save_steps": 10}
    places = {"text_file": f"{directory}/text.txt", "output_dir": f"{directory}/out"}
    options = small | quiet | places | {"use_cpu": True, "muon_lr": 1e-2, "max_steps": 20}
    with accelerator_of(parallel):
        metrics = main([*(word for name, value in options.items() for word in (f"--{name}", str(value))), *words])
    return metrics["eval_loss"]


def test_the_example_learns_goes_on_and_saves_a_model(gloo: ProcessPool, tmp_path: Path) -> None:
    Path(tmp_path, "text.txt").write_text(library_text()[:20000])
    losses = gloo.run(_run, str(tmp_path), "fsdp", world_size=2)
    # log(300) is 5.7.
    assert max(losses) < 4.5 and len(set(losses)) == 1
    resume = ("--resume_from_checkpoint", f"{tmp_path}/out/checkpoint-10")
    assert gloo.run(_run, str(tmp_path), "fsdp", *resume, world_size=2) == losses
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 2


def test_blocks_have_all_tokens_in_their_order() -> None:
    text = library_text()[:3000]
    tokenizer = train_tokenizer(text, 300)
    blocks = grouped(text, tokenizer, 16)
    tokens = [token for block in blocks for token in block["input_ids"]]
    assert text.startswith(tokenizer.decode(tokens)[:1000]) and {len(block["labels"]) for block in blocks} == {16}
