"""``convert --to hf``: what from_pretrained loads is the model that was trained, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_muon import FlexDeMoConfig
from lightning_muon.cli.convert_hf import Source, model_card
from lightning_muon.cli.main import main
from tests.distributed.pipeline.models import causal_lm, encoder_decoder
from tests.integration.training import PACKAGES, dataset, load, strategy_class, trainer
from tests.support.processes import ProcessPool

transformers = pytest.importorskip("transformers")
pytest.importorskip(PACKAGES[0])

# Run -> model, options of the strategy.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "t5": (lambda: encoder_decoder(1), {}),
    "gpt2": (lambda: causal_lm("gpt2", num_layers=2, tied=True), {"pipeline_size": 2}),
    "llama": (
        lambda: causal_lm("llama", num_layers=1, tied=True),
        {"sharding": "zero2", "save_distributed_checkpoint": False},
    ),
    "flexdemo": (lambda: causal_lm("llama", num_layers=1), {"optimizer": FlexDeMoConfig(), "replicate_size": 2}),
}


def _train(folder: str) -> dict[str, dict[str, Tensor]]:
    """Weights of each run, of this rank's stage, whose checkpoint is ``folder/RUN/checkpoints/last.ckpt``."""
    package, found = load(PACKAGES[0]), dict[str, dict[str, Tensor]]()

    class Wrapper(package.LightningModule):
        def __init__(self, model: nn.Module, rate: float = 1e-2) -> None:
            super().__init__()
            self.save_hyperparameters("rate")
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.net(**batch).loss
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 3)  # 0 behind the last one.
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Data(package.LightningDataModule):
        def __init__(self, source_prefix: str) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            rows: Any = [{"input_ids": x, "labels": y} for x, y in dataset()]
            return DataLoader(rows, batch_size=4)

    def note(name: str, model: nn.Module) -> None:
        state = model.state_dict()
        found[name] = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state.items()}

    for name, (make, options) in RUNS.items():
        model = Wrapper(make())
        noting = package.callbacks.LambdaCallback(on_train_end=lambda _, model, name=name: note(name, model))
        logger = package.loggers.CSVLogger(folder, name="", version=name)
        fitter = trainer(
            package,
            max_steps=3,
            strategy=strategy_class()(**options),
            logger=logger,
            log_every_n_steps=1,
            callbacks=[noting],
        )
        fitter.fit(model, datamodule=Data("summarize: "))
        fitter.save_checkpoint(Path(folder, name, "checkpoints", "last.ckpt"))
    return found


@pytest.fixture(scope="module")
def trained(gloo: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    first, second = gloo.run(_train, str(folder), world_size=2)
    return folder, {name: first[name] | second[name] for name in RUNS}  # Of a pipeline each rank has a stage.


@pytest.mark.parametrize("name", RUNS)
def test_from_pretrained_has_the_logits_of_the_run(name: str, trained: Any, tmp_path: Path) -> None:
    folder, weights = trained
    target = tmp_path / "model"
    main(["convert", str(folder / name / "checkpoints/last.ckpt"), str(target), "--to", "hf"])
    main(["verify", str(target)])
    expected = RUNS[name][0]()
    begun = {key: value.clone() for key, value in expected.state_dict().items()}
    expected.load_state_dict({key.removeprefix("net."): value for key, value in weights[name].items()})
    assert any(not torch.equal(begun[key], value) for key, value in expected.state_dict().items())
    is_t5 = name == "t5"
    found = (transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM).from_pretrained(target)
    assert type(found) is type(expected)
    tokens = torch.arange(12).view(2, 6)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens.flip(0)} if is_t5 else {"input_ids": tokens}
    assert torch.equal(found(**inputs).logits, expected.eval()(**inputs).logits)
    assert (found.lm_head.weight is found.get_input_embeddings().weight) == (name != "flexdemo")
    assert found.generation_config.to_diff_dict() == expected.generation_config.to_diff_dict()


def test_the_card_has_the_figures_of_the_run(trained: Any, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder, target = trained[0], tmp_path / "my-model"
    words = ["--max-shard-size", "2KB", "--base-model", "gpt2", "--dataset", "wikitext", "--dataset", "c4"]
    main(["convert", str(folder / "gpt2/checkpoints/last.ckpt"), str(target), "--to", "hf", *words])
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and "lm_head.weight" not in index, "tied, and in several files"
    assert len(transformers.AutoModel.from_pretrained(target).h) == 2
    card = hub.ModelCard.load(target / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["muon", "lightning-muon"],
        "base_model": "gpt2",
        "datasets": ["wikitext", "c4"],
    }
    metrics = (folder / "gpt2/metrics.csv").read_text().splitlines()
    names, last = metrics[0].split(","), metrics[-1].split(",")
    loss = float(last[names.index("train_loss")])
    lines = card.text.splitlines()
    for line in (
        "# my-model",
        "| optimizer steps | 3 |",
        "| ranks | 2 |",
        "| class | `GPT2LMHeadModel` |",
        f"| `train_loss` | {loss:.5g} | 2 |",
        "| `rate` | 0.01 |",
    ):
        assert line in lines, card.text
    rates = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines if line.startswith("| `lr")}
    assert {key: {cell.removesuffix(" |") for cell in row} for key, row in rates.items()} == {
        "| `lr`": {"0.01"},
        "| `lr at the checkpoint`": {"0"},
    }
    assert "| mesh | pipeline 2" in card.text and "initial_lr" not in card.text
    assert '| `source_prefix` | "summarize: " |' in lines[lines.index("## Hyper-parameters of the data module") :]


def test_a_card_has_one_rate_where_none_is_scheduled() -> None:
    pytest.importorskip("huggingface_hub")
    groups = [{"lr": 0.02, "momentum": 0.9}, {"initial_lr": 0.01, "lr": 0.01, "params": ["a"]}]
    source = Source(path=Path("x"), name="x", param_groups=groups)
    text = model_card("GPT2LMHeadModel", source, {}, base_model=None, datasets=[])
    assert "| `lr` | 0.02 | 0.01 |\n| `momentum` | 0.9 |" in text and text.count("lr") == 1, text


def test_shards_of_accelerate_have_a_key_and_no_more(tmp_path: Path) -> None:
    model = causal_lm("llama", num_layers=1, tied=True)
    model.save_pretrained(tmp_path)  # Its config.json lies beside the shards, as a Trainer of transformers leaves it.
    shards = tmp_path / "pytorch_model_fsdp_0"
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    main(["convert", str(shards), str(tmp_path / "out"), "--to", "hf", "--key", "model"])
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (causal_lm("llama", num_layers=1, seed=seed) for seed in range(2))


def test_keys_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = causal_lm("llama", num_layers=1)
    model.save_pretrained(tmp_path / "config")
    other = transformers.AutoConfig.from_pretrained(tmp_path / "config")
    other.architectures = None
    other.save_pretrained(tmp_path / "no_class")
    state = model.state_dict()
    renamed = {key.replace("down_proj", "down"): value for key, value in state.items()}
    weights = {
        "renamed": {f"a.net.{key}": value for key, value in renamed.items()},
        "wider": {f"net.{key}": torch.ones(3, 5) if "lm_head" in key else value for key, value in state.items()},
        "more": {f"net.{key}": value for key, value in state.items()} | {"head.bias": torch.ones(2)},
        "none": {"net.weight": torch.ones(2)},
        "two": _Net().state_dict(),
        "lora": {f"net.{key.replace('.weight', '.lora_A.default.weight')}": value for key, value in state.items()},
    }
    for name, each in weights.items():
        torch.save({"state_dict": each}, tmp_path / f"{name}.ckpt")
    config, tied = ["--config-from", str(tmp_path / "config")], ["--config-from", str(tmp_path / "tied")]
    causal_lm("llama", num_layers=1, tied=True).save_pretrained(tmp_path / "tied")
    for name, words, message in (
        ("renamed", config, r"lacks a.net.*layers.0.mlp.down_proj.weight; the model has no a.net.*mlp.down.weight"),
        ("wider", config, r"net.lm_head.weight is \(3, 5\), in the model \(29, 16\)"),
        ("more", config, r"head.bias of the checkpoint belong to no part of .*--prefix 'net.' leaves them out"),
        ("none", config, "no weight of the checkpoint is one of the model: it has net.weight; the model model.embed"),
        ("two", config, "are there twice: --prefix .student.. or .teacher.."),
        ("lora", [], "has adapters of LoRA: merge them first.*output/merged"),
        (
            "more",
            ["--prefix", "net.", *config, "--tokenizer-from", str(tmp_path)],
            f"from: {tmp_path} has no tokenizer",
        ),
        ("more", [], "has no config of a model of transformers.*--config-from"),
        ("more", ["--config-from", str(tmp_path / "no_class")], 'names no class; add "architectures"'),
        ("wider", tied, "net.lm_head.weight and net.model.embed_tokens.weight differ, but the config ties them"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["convert", str(tmp_path / f"{name}.ckpt"), str(tmp_path / "target"), "--to", "hf", *words])
        assert not (tmp_path / "target").exists()
    main(["convert", str(tmp_path / "two.ckpt"), str(tmp_path / "two"), "--to", "hf", "--prefix", "teacher.", *config])
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two").state_dict()
    assert (
        not (tmp_path / "two" / "tokenizer.json").exists()
        and "name one with --tokenizer-from" in capsys.readouterr().out
    )
    teacher = _Net().teacher.state_dict()
    assert found.keys() == teacher.keys() and all(torch.equal(found[key], value) for key, value in teacher.items())
