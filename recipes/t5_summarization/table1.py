"""Table 1 of the FlexDeMo paper (arXiv:2502.06728): loss and traffic of AdamW, FlexDeMo and DiLoCo after equal steps.

    python -m recipes.t5_summarization.table1                                  # the grid; more than an hour on 2 cores
    python -m recipes.t5_summarization.table1 --rows adamw strip8 --seeds 0 --set trainer.max_epochs=1    # a part of it
    python -m recipes.t5_summarization.table1 --report-only                    # the table of what is stored

Each row and seed is a training of its own, started as ``--train ROW SEED``, that ends with a line in ``results.jsonl``.
A line belongs to its settings: the grid goes on where it stopped, and other settings (--set, --size) are other runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_muon import DCTTopK, DiLoCo, FlexDeMoConfig, MuonConfig, ParallelMuonStrategy
from recipes.t5_summarization.data import SummarizationData
from recipes.t5_summarization.model import T5Summarizer

RESULTS = "results.jsonl"
LOSSES = ("train_loss", "val_loss")  # Of the last epoch, nats per token.
_PAPER: dict[str, Any] = {"decay": 0.999, "merge": "contributors", "value_format": "bf16", "muon_lr_factor": 1.0}


def sparse(top_k: int, *, strips: bool = False, base: Any = "sgd", **options: Any) -> FlexDeMoConfig:
    """FlexDeMo with ``top_k`` components of a chunk of 64, or of 64 x 64; with SGD the sign of the merged update."""
    replicator = DCTTopK(chunk_size=64, top_k=top_k, strips=strips)
    return FlexDeMoConfig(base=base, sign=base == "sgd", replicator=replicator, **_PAPER | options)


def diloco(period: int, base: Any) -> FlexDeMoConfig:
    """A whole optimizer inside each node, and an average after every ``period`` steps."""
    replicator = DiLoCo(period=period, outer_lr=0.9, outer_momentum=0.5, nesterov=True)
    return FlexDeMoConfig(base=base, sign=False, replicator=replicator, **_PAPER)


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    label: str
    optimizer: Any  # Of ParallelMuonStrategy.
    factor: float = 1.0  # Learning rate of all but the token embedding, as a multiple of AdamW's; tuned for "demo".


KS = (1, 2, 4, 8, 16, 32)
ROWS = {
    "adamw": Row("AdamW (HSDP)", "keep"),
    **{f"strip{k}": Row(f"k = {k} of strips of 64", sparse(k, strips=True), 2.0) for k in KS},
    "strip4_muon": Row("k = 4 of strips of 64, base Muon", sparse(4, strips=True, base="muon"), 16.0),
    "strip8_muon": Row("k = 8 of strips of 64, base Muon", sparse(8, strips=True, base="muon"), 16.0),
    **{f"k{k}": Row(f"k = {k} of 64 x 64", sparse(k), 2.0) for k in KS},
    "k32_fp32": Row("k = 32 of 64 x 64, fp32 values", sparse(32, value_format="fp32"), 2.0),
    "k32_adamw": Row("k = 32 of 64 x 64, base AdamW", sparse(32, base="adamw")),
    "k32_muon": Row("k = 32 of 64 x 64, base Muon", sparse(32, base="muon"), 16.0),
    "diloco": Row("DiLoCo, period 10, AdamW inside", diloco(10, "adamw")),
    "diloco_muon": Row("DiLoCo, period 10, Muon inside", diloco(10, "muon"), 8.0),
    "diloco30": Row("DiLoCo, period 30, AdamW inside", diloco(30, "adamw"), 2.0),
    "diloco30_muon": Row("DiLoCo, period 30, Muon inside", diloco(30, "muon"), 8.0),
    # Newton-Schulz within each node, so that nothing but gradients travels between nodes.
    "muon": Row("ParallelMuon (HSDP)", MuonConfig(dedupe="never", muon_lr_factor=1.0), 16.0),
}
GRID = [name for name in ROWS if name not in ("k1", "k2", "k4", "k8", "k16", "muon")]
SEEDS = (0, 1)

# Arguments of Trainer and strategy, and what differs for T5Summarizer and SummarizationData from the file of the size.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "demo": {  # 120 steps of 128 samples on 2 nodes of 2 ranks.
        "trainer": {"accelerator": "cpu", "devices": 4, "max_epochs": 4, "limit_train_batches": 30},
        "strategy": {"replicate_size": 2, "shard_size": 2},
        "model": {"lr": 1.25e-3, "embedding_lr_scale": 256.0, "weight_decay": 0.0, "rouge_batches": 0},
        "data": {"batch_size": 32, "train_rows": 15360},
    },
    "wikihow": {  # The training of the paper, for GPUs.
        "trainer": {"accelerator": "gpu", "devices": "auto", "precision": "bf16-mixed", "max_epochs": 10},
        "strategy": {"replicate_size": 2},
        "model": {"weight_decay": 0.0, "rouge_batches": 0, "paper_loss": True},
        "data": {"pad_to_max_length": True},
    },
}


def settings_of(size: str, changes: Sequence[str]) -> dict[str, Any]:
    """Those of a size with ``section.key=value`` changed; values are JSON, or text."""
    settings, file = deepcopy(SIZES[size]), yaml.safe_load(Path(__file__).with_name(f"{size}.yaml").read_text())
    for section in ("model", "data"):
        settings[section] = file[section]["init_args"] | settings[section]
    for change in changes:
        path, _, text = change.partition("=")
        *sections, key = path.split(".")
        place = settings
        for section in sections:
            if not isinstance(place.get(section), dict):
                raise ValueError(f"--set {change}: there is no section {section!r}; there are {', '.join(settings)}")
            place = place[section]
        try:
            place[key] = json.loads(text)
        except json.JSONDecodeError:
            place[key] = text
    return settings


@dataclass(frozen=True)
class Grid:
    """Trainings that differ in row and seed alone."""

    size: str
    settings: dict[str, Any]
    folder: Path

    def factor(self, name: str) -> float:
        """Of the learning rate of a row."""
        return ROWS[name].factor if self.size == "demo" else 1.0

    def key(self, name: str, seed: int) -> str:
        """Equal for equal trainings alone."""
        content = [name, seed, self.settings, self.factor(name), str(ROWS[name].optimizer)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def stored(self) -> dict[str, dict[str, Any]]:
        """Key -> result of all trainings that have ended, those with other settings too."""
        path = self.folder / RESULTS
        results = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return {result["key"]: result for result in results}

    def missing(self, rows: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
        """The trainings that have not ended yet, seed by seed, so that a whole table is there early."""
        stored = self.stored()
        return [(name, seed) for seed in seeds for name in rows if self.key(name, seed) not in stored]

    def table(self, seeds: Sequence[int]) -> str:
        """Means over those of the seeds that are stored, and half of the range of the validation loss."""
        lines = ["| row | MB per step | train loss | validation loss | against AdamW | factor | seeds |"]
        lines.append(f"| --- |{' ---: |' * 6}")
        stored, adamw = self.stored(), None
        for name, row in ROWS.items():
            found = [stored[key] for seed in seeds if (key := self.key(name, seed)) in stored]
            if not found:
                continue
            megabytes, train_loss, loss = (fmean(each[key] for each in found) for key in ("megabytes", *LOSSES))
            adamw = loss if name == "adamw" else adamw
            losses = [each["val_loss"] for each in found]
            spread = f" +- {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
            cells = [row.label, f"{megabytes:.3f}", f"{train_loss:.3f}", f"{loss:.3f}{spread}"]
            cells += ["" if adamw is None else f"{loss / adamw - 1:+.1%}", f"{self.factor(name):g}", str(len(losses))]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


class Traffic(Callback):
    """Notes the nodes, and what the optimizer has sent."""

    def __init__(self) -> None:
        self.sent_bytes: float | None = None  # Per step of all ranks of a node; only FlexDeMo counts.
        self.world = (1, 1)  # (nodes, ranks per node)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up what the ranks of a node sent. Collective over all ranks; every rank must call it."""
        mesh = pl_module.device_mesh
        self.world = mesh["replicate"].size(), mesh["shard"].size()
        counts = [getattr(optimizer, "sent_bytes_per_step", None) for optimizer in trainer.optimizers]
        if None not in counts:
            mean = trainer.strategy.reduce(torch.tensor(float(sum(counts)), dtype=torch.float64), reduce_op="mean")
            self.sent_bytes = float(mean) * self.world[1]


def train(grid: Grid, name: str, seed: int) -> None:
    """One training; rank 0 stores its result. Collective over all ranks; every rank must call it."""
    settings, factor, traffic = grid.settings, grid.factor(name), Traffic()
    seed_everything(seed, verbose=False)
    embedding = settings["model"].get("embedding_lr_scale", 1.0)  # Its own rate stays.
    rates = {"lr": settings["model"]["lr"] * factor, "embedding_lr_scale": embedding / factor}
    model, data = T5Summarizer(**settings["model"] | rates), SummarizationData(**settings["data"])
    size = sum(parameter.numel() for parameter in model.parameters())
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = ParallelMuonStrategy(**settings["strategy"], optimizer=ROWS[name].optimizer)
    trainer = Trainer(**settings["trainer"], **quiet, strategy=strategy, callbacks=[traffic], num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)
    if not trainer.is_global_zero:
        return
    # Without FlexDeMo: a ring all-reduce of float32 gradients between the nodes, however many ranks divide them.
    nodes, sent = traffic.world[0], traffic.sent_bytes
    sent = 2 * (nodes - 1) / nodes * size * 4 if sent is None else sent
    result = {"key": grid.key(name, seed), "row": name, "seed": seed, "megabytes": sent / 1e6, "nodes": nodes}
    result |= {key: float(trainer.callback_metrics[key]) for key in LOSSES} | {"steps": trainer.global_step}
    grid.folder.mkdir(parents=True, exist_ok=True)
    with (grid.folder / RESULTS).open("a") as file:
        file.write(json.dumps(result) + "\n")


def start(words: Sequence[str], log: Path) -> int:
    """Run this program on its own; its exit status. Lightning starts the further ranks."""
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    command = [sys.executable, "-m", "recipes.t5_summarization.table1", *words]
    with log.open("w") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def run_grid(grid: Grid, options: argparse.Namespace) -> bool:
    """Train what is not stored yet; whether a training has failed, which does not keep others from running."""
    words = ["--size", options.size, "--out", str(options.out), *(["--set", *options.set] if options.set else [])]
    missing, failed = grid.missing(options.rows, options.seeds), False
    for number, (name, seed) in enumerate(missing, start=1):
        log = grid.folder / "logs" / f"{name}-{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        status = start(["--train", name, str(seed), *words], log)
        result = grid.stored().get(grid.key(name, seed))
        failed |= status != 0 or result is None
        said = f"failed with status {status}, see {log}" if result is None else f"loss {result['val_loss']:.3f}"
        print(f"[{number}/{len(missing)}] {name} seed {seed}: {said}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid and print the table; 1 if a training has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=GRID, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings, such as model.lr=1e-3")
    parser.add_argument("--out", type=Path, default=Path("outputs/table1"), help="folder of results and logs")
    parser.add_argument("--report-only", action="store_true", help="the table of what is stored")
    parser.add_argument("--train", nargs=2, metavar=("ROW", "SEED"), help="one training, on each of its ranks")
    options = parser.parse_args(arguments)
    grid = Grid(options.size, settings_of(options.size, options.set), options.out / options.size)
    if options.train:
        train(grid, options.train[0], int(options.train[1]))
        return 0
    failed = not options.report_only and run_grid(grid, options)
    print(grid.table(options.seeds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
