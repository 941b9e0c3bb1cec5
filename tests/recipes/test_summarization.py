"""The recipe for summarization on two ranks, against the model that it exports."""

import csv
import json
from pathlib import Path

import pytest
import transformers

from recipes.t5_summarization.data import SummarizationData
from recipes.t5_summarization.model import T5Summarizer
from tests.integration.training import load as load_package
from tests.integration.training import trainer
from tests.recipes.rows import write_csv
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, fit


def _fit_and_predict(folder: str, articles: str) -> None:
    package = load_package()
    package.seed_everything(0)
    data = SummarizationData(
        source=str(Path(folder, "rows.csv")),
        predict_source=articles,
        vocab_size=300,
        max_source_tokens=20,
        max_target_tokens=8,
        batch_size=2,
        cache_dir=f"{folder}/cache",
    )
    sizes = TINY | {"vocab_size": 300}
    model = T5Summarizer(
        architecture=sizes, lr=0.02, rouge_batches=1, max_new_tokens=6, predictions=f"{folder}/predictions.jsonl"
    )
    logger = package.loggers.CSVLogger(folder, name="", version="run")
    fitter = trainer(package, max_steps=6, limit_val_batches=1, val_check_interval=3, logger=logger)
    fitter.fit(model, datamodule=data)
    fitter.save_checkpoint(f"{folder}/run/checkpoints/last.ckpt")
    fitter.predict(model, datamodule=data)
    model.hparams.predictions = f"{folder}/rows.csv/predictions.jsonl"
    kind, text = (OSError, "") if fitter.is_global_zero else (RuntimeError, "rank 0 of the group failed.*")
    with pytest.raises(kind, match=rf"{text}rows\.csv"):
        fitter.predict(model, datamodule=data)


def test_predictions_of_several_ranks_are_those_of_the_exported_model(gloo: ProcessPool, tmp_path: Path) -> None:
    """Five rows for two ranks with batches of two: the sampler gives one row to both."""
    write_csv(tmp_path)
    texts = ["Put an egg on the table.", "Draw a map, and wait.", "", "Fold the letter.", "Mend a sock."]
    with (tmp_path / "articles.csv").open("w", newline="") as file:
        rows = [("id", text, "How to Draw" if number == 1 else "") for number, text in enumerate(texts)]
        csv.writer(file).writerows([("id", "text", "title"), *rows])
    gloo.run(_fit_and_predict, str(tmp_path), str(tmp_path / "articles.csv"), world_size=2)
    T5Summarizer.load_from_checkpoint(tmp_path / "run/checkpoints/last.ckpt").model.save_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/tokenizer")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    expected = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=20, return_tensors="pt")
        ids = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False)
        expected.append({"source": text, "prediction": tokenizer.decode(ids[0], skip_special_tokens=True).strip()})
    expected[1]["target"] = "How to Draw"
    assert len({each["prediction"] for each in expected}) > 1
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected
    samples = json.loads((tmp_path / "run/samples.json").read_text())
    assert [each["step"] for each in samples] == [6, 6, 3, 3]
    assert samples[0].keys() == {"step", "source", "target", "text"}


TINY = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


@pytest.mark.parametrize("name", ["demo", "wikihow"])
def test_a_config_trains_on_a_local_file(tmp_path: Path, name: str) -> None:
    options = {
        "trainer.max_epochs": 2,
        "trainer.logger.init_args.save_dir": tmp_path,
        "trainer.strategy.init_args.replicate_size": 1,
        "trainer.strategy.init_args.shard_size": 2,
        "model.init_args.architecture": json.dumps(TINY | {"vocab_size": 400}),
        "model.init_args.max_new_tokens": 5,
        "data.init_args.source": write_csv(tmp_path),
        "data.init_args.tokenizer": "bpe",
        "data.init_args.vocab_size": 400,
        "data.init_args.num_workers": 0,
        "data.init_args.cache_dir": tmp_path / "cache",
    }
    printed = fit(ROOT / "recipes" / "t5_summarization" / f"{name}.yaml", options)
    assert "embedding, tied to model.lm_head.weight" in printed
    (metrics,) = tmp_path.glob("*/version_0/metrics.csv")
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[-1] < losses[0] and all(0 <= float(row["rougeL"]) <= 1 for row in rows[-2:])
