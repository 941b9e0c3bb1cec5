"""Losses of small trainings with AdamW, Muon and its relatives, after each has got its learning rate.

    python -m benchmarks.loss --tune adamw muon --seeds 0 1 2 --out results/pretraining
    python -m benchmarks.loss --only adamw muon 'mine={"momentum": 0.9}' --text my/corpus README.md --width 256
    python -m benchmarks.loss --program t5 gpt falling_CNN --nodes 2 --tune adamw

Trains with each configuration of ``CONFIGURATIONS`` or --only, in one process with one thread per run. With --nodes 2
a batch is divided between two processes: AdamW with DDP beside FlexDeMo of two nodes, whose options --only then names.
Programs:

- gpt: a byte-level GPT on --text. The last tenth of the shuffled files is held out.
- t5: recipes/t5_summarization/demo.yaml, a docstring to its summary line, by ``lightning-muon fit``.
- CNN: with batch norms, on scanned digits, for which scikit-learn is needed; falling_CNN with a rate that falls.

--tune gives the named configurations the best rate of a grid, measured with a seed of its own: for AdamW the learning
rate of all parameters, for the others, which keep that one for AdamW's parameters, ``muon_lr_factor``. What is not
named takes the factor of "muon", or --factor and --lr. --grid instead runs all --rates and --factors.

Each run leaves a file in --out (step, held-out loss, seconds per step) and is not run again as long as that is there.
*bytes*: what nodes send as a part of the sums of float32 gradients that DDP and HSDP send.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.tables import ROOT, markdown, origin, parser_of
from lightning_muon import NonFiniteGradientError, ParallelMuon, ParallelMuonFabricStrategy
from lightning_muon.engine.options import Options

# Options of ParallelMuon; None is torch's AdamW.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "muon": {},
    "polar_express": {"ns_coefficients": "polar_express"},
    "fast": {"ns_quality": "fast"},
    **{name: {"adjust_lr_fn": name} for name in ("original", "spectral_mup")},
    "normuon": {"normuon": True},
}
TUNING_SEED = 1000
SUFFIXES = (".py", ".txt", ".rst", ".md")
# Not Python's library.
EXCLUDED = {"site-packages", "dist-packages", "pydoc_data"}
STEPS_OF_EPOCH = 160
Batch = tuple[Tensor, ...]
Rows = list[tuple[int, float, float]]  # Step, loss, seconds per step.


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    program: str
    lr: float
    settings: dict[str, Any]  # Options of the command line that the program reads.
    name: str = "adamw"
    options: dict[str, Any] | None = None
    seed: int = 0
    nodes: int = 1

    @property
    def optimizer(self) -> dict[str, Any]:
        kind = "MuonConfig" if self.nodes == 1 else "FlexDeMoConfig"
        return {"class_path": f"lightning_muon.{kind}", "init_args": self.options}

    def path(self, folder: Path) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return folder / f"{self.program}-{self.name}-{self.lr:g}-{self.seed}-{digest}.csv".replace(" ", "_")


def falling(step: int, steps: int) -> float:
    """Of the rate; it warms up over a twentieth of the steps and falls linearly to a tenth."""
    return min(20 * (step + 1) / steps, 1 - 0.9 * step / steps)


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A training by a loss of batches. Functions get the settings of the run."""

    model: Callable[[dict[str, Any]], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Callable[[dict[str, Any], torch.Generator], Iterator[Batch]]
    held_out: Callable[[dict[str, Any]], Sequence[Batch]]
    steps: int
    betas: tuple[float, float] = (0.9, 0.999)
    falls: bool = False  # Whether the rate does, and gradients are clipped.
    data_seed: int = 1000

    def train(self, run: Run, folder: Path) -> Rows:
        torch.manual_seed(run.seed)
        settings, steps = run.settings, run.settings["steps"] or self.steps
        module, strategy = self.model(settings), "auto"
        common: dict[str, Any] = {"lr": run.lr, "betas": self.betas, "weight_decay": settings["weight_decay"]}
        given: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), **common)
        if run.options is not None and run.nodes == 1:
            given = ParallelMuon(module, **common | run.options)
        elif run.options is not None:
            config = Options.from_mapping({"optimizer": run.optimizer}).optimizer
            strategy = ParallelMuonFabricStrategy(optimizer=config, replicate_size=run.nodes)
        fabric = Fabric(accelerator="cpu", devices=run.nodes, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(module, given)
        rate = partial(falling, steps=steps) if self.falls else lambda step: 1.0
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        batches = self.batches(settings, torch.Generator().manual_seed(self.data_seed + run.seed))
        rows, seconds = Rows(), [0.0]
        marks = {steps * part // settings["evaluations"] for part in range(settings["evaluations"] + 1)}
        for step in range(steps + 1):
            if step in marks:
                rows.append((step, self.held_out_loss(model, settings), median(seconds)))
            if step == steps:
                break
            batch = tuple(each.chunk(run.nodes)[fabric.global_rank] for each in next(batches))
            started = time.perf_counter()
            fabric.backward(self.loss(model, batch))
            if self.falls:
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            try:
                optimizer.step()
            except NonFiniteGradientError:
                return [*rows, (steps, math.inf, median(seconds))]
            scheduler.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        return rows

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, settings: dict[str, Any]) -> float:
        model.eval()
        loss = mean(float(self.loss(model, batch)) for batch in self.held_out(settings))
        model.train()
        return loss


class Block(nn.Module):
    """Attention and MLP behind norms, as in GPT-2, with separate projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        heads = (each(y).unflatten(-1, (-1, 32)).transpose(1, 2) for each in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Tokens ``(batch, context)`` to logits ``(batch, context, words)``; heads of 32 channels."""

    def __init__(self, *, words: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Less in layers that add to the residual stream.
                depth = 2 * layers if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def byte_model(settings: dict[str, Any]) -> GPT:
    return GPT(words=256, **{name: settings[name] for name in ("width", "layers", "context")})


@cache
def corpus(paths: tuple[str, ...], megabytes: float) -> tuple[Tensor, Tensor]:
    """Bytes for training and held-out ones of the files, or of those in the folders, shuffled."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES) if path.is_dir() else [path]
        files += [each for each in found if not EXCLUDED & set(each.relative_to(path).parts)]
    random.Random(0).shuffle(files)
    content, limit = bytearray(), int(megabytes * 2**20)
    for file in files:
        if len(content) < limit:
            content += file.read_bytes()
    whole = torch.frombuffer(content[:limit], dtype=torch.uint8)
    return whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]


def windows(data: Tensor, count: int, size: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(data) - size + 1, (count, 1), generator=generator)
    return (data[starts + torch.arange(size)].long(),)


def bytes_of(settings: dict[str, Any], generator: torch.Generator) -> Iterator[Batch]:
    data = corpus(tuple(settings["text"]), settings["megabytes"])[0]
    while True:
        yield windows(data, settings["batch"], settings["context"] + 1, generator)


def held_out_bytes(settings: dict[str, Any]) -> list[Batch]:
    data = corpus(tuple(settings["text"]), settings["megabytes"])[1]
    generator = torch.Generator().manual_seed(77)
    return [windows(data, 64, settings["context"] + 1, generator) for _ in range(4)]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 scanned digits, 8 x 8: (training images, labels, held-out images, labels)."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 4.9) / 6
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    images, labels = images[order], labels[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def image_batches(settings: dict[str, Any], generator: torch.Generator) -> Iterator[Batch]:
    """Shifted by up to a pixel, with noise, so that 1,400 images last."""
    images, labels, *_ = digits()
    while True:
        chosen = torch.randint(len(images), (64,), generator=generator)
        row, column = torch.randint(3, (2,), generator=generator).tolist()
        shifted = F.pad(images[chosen], (1, 1, 1, 1), value=-4.9 / 6)[..., row : row + 8, column : column + 8]
        yield shifted + 0.5 * torch.randn(shifted.shape, generator=generator), labels[chosen]


def held_out_images(settings: dict[str, Any]) -> list[Batch]:
    images, labels = digits()[2:]
    return [(images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(3)), labels)]


def convolutions(settings: dict[str, Any]) -> nn.Module:
    """A CNN with batch norms, 0.1 million parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 96, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


class Recipe:
    """The recipe for T5 in one process; "adamw" is Lightning's own strategy with the recipe's torch.optim.AdamW."""

    def train(self, run: Run, folder: Path) -> Rows:
        """Validation loss after each epoch, of steps of 32 rows."""
        started, place = time.perf_counter(), run.path(folder).with_suffix("").resolve()
        place.mkdir(parents=True, exist_ok=True)
        strategy = {"replicate_size": run.nodes, "shard_size": 1, "optimizer": run.optimizer}
        muon = {"class_path": "lightning_muon.ParallelMuonStrategy", "init_args": strategy}
        epochs = math.ceil(run.settings["steps"] / STEPS_OF_EPOCH) or 4
        trainer = {"devices": run.nodes, "max_epochs": epochs, "strategy": "auto" if run.options is None else muon}
        trainer |= {"enable_progress_bar": False, "enable_checkpointing": False, "callbacks": None}
        rates = {"lr": run.lr, "embedding_lr_scale": run.settings["embedding_lr"] / run.lr}
        rows = {"batch_size": 32 // run.nodes, "cache_dir": str(ROOT / "outputs/cache")}
        changed = {
            "seed_everything": run.seed,
            "trainer": trainer,
            "model": {"class_path": "recipes.t5_summarization.model.T5Summarizer", "init_args": rates},
            "data": {"class_path": "recipes.t5_summarization.data.SummarizationData", "init_args": rows},
        }
        (place / "changed.json").write_text(json.dumps(changed))
        words = ["--config", "recipes/t5_summarization/demo.yaml", "--config", str(place / "changed.json")]
        words += ["--trainer.logger.init_args.save_dir", str(place)]
        start(["lightning_muon", "fit", *words], place)
        seconds = (time.perf_counter() - started) / (epochs * STEPS_OF_EPOCH)  # Validations are in it.
        with max(place.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime).open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row.get("val_loss")]
        return [(int(row["step"]), float(row["val_loss"]), seconds) for row in found]


PROGRAMS: dict[str, Supervised | Recipe] = {
    "gpt": Supervised(
        model=byte_model,
        loss=lambda model, batch: F.cross_entropy(model(batch[0][:, :-1]).mT, batch[0][:, 1:]),
        batches=bytes_of,
        held_out=held_out_bytes,
        steps=1000,
        falls=True,
        betas=(0.9, 0.95),
        data_seed=0,
    ),
    "t5": Recipe(),
    "CNN": Supervised(
        model=convolutions,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=image_batches,
        held_out=held_out_images,
        steps=300,
    ),
}
PROGRAMS["falling_CNN"] = replace(PROGRAMS["CNN"], falls=True)
_SETTINGS = ("text", "megabytes", "width", "layers", "context", "batch", "steps", "evaluations")
_SETTINGS += ("weight_decay", "embedding_lr")


def start(words: Sequence[str], place: Path) -> None:
    """Run a module of Python with these arguments; Lightning starts further ranks. What they say is kept in a file."""
    command, environment = [sys.executable, "-m", *words], os.environ | {"OMP_NUM_THREADS": "1"}
    place.mkdir(parents=True, exist_ok=True)
    with (place / "output.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


def train(run: Run, folder: Path) -> None:
    torch.set_num_threads(1)
    path, rows = run.path(folder), PROGRAMS[run.program].train(run, folder)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with path.with_suffix(".part").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        path.with_suffix(".part").replace(path)


def train_all(runs: Sequence[Run], folder: Path) -> None:
    for run in runs:
        path = run.path(folder)
        if not path.exists():
            if run.nodes > 1 and isinstance(PROGRAMS[run.program], Supervised):
                words = ["--train", json.dumps(asdict(run)), "--out", str(folder.resolve())]
                start(["benchmarks.loss", *words], path.with_suffix(""))
            else:
                train(run, folder)
            print(f"{path.stem} {run.options or ''}: {curve(run, folder)[-1][1]:.4f}", flush=True)


def sent(run: Run, folder: Path) -> str:
    """What goes between nodes, as a part of the sums of float32 gradients; from the log of FlexDeMo."""
    log = run.path(folder).with_suffix("") / "output.txt"
    found = re.findall(r"(1/[\d.]+) of an all-reduce", log.read_text()) if log.exists() else []
    return found[-1] if found else "-"


def curve(run: Run, folder: Path) -> Rows:
    with run.path(folder).open(newline="") as file:
        return [(int(step), float(loss), float(spent)) for step, loss, spent in csv.reader(file)]


def tuned(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, Run]:
    def best(candidates: list[Run]) -> Run:
        candidates = [replace(run, seed=TUNING_SEED) for run in candidates]
        train_all(candidates, arguments.out)
        finals = [curve(run, arguments.out)[-1][1] for run in candidates]
        losses = [loss if math.isfinite(loss) else math.inf for loss in finals]
        return candidates[losses.index(min(losses))]

    if "adamw" in arguments.tune:
        lr = best([replace(runs["adamw"], lr=each) for each in arguments.rates]).lr
        runs = {name: replace(run, lr=lr) for name, run in runs.items()}
    factors: dict[str, Any] = {"muon": arguments.factor if arguments.nodes == 1 else "auto"}
    for name in arguments.tune:
        if name in runs and (options := runs[name].options) is not None:
            grid = [replace(runs[name], options=options | {"muon_lr_factor": each}) for each in arguments.factors]
            factors[name] = (best(grid).options or {})["muon_lr_factor"]
    for name, run in runs.items():
        if run.options is not None:
            factor = factors.get(name, run.options.get("muon_lr_factor", factors["muon"]))
            runs[name] = replace(run, options=run.options | {"muon_lr_factor": factor})
    return runs


def on_grid(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for lr in arguments.rates:
        for name, run in runs.items():
            for factor in arguments.factors if run.options is not None else (0,):
                options = run.options if run.options is None else run.options | {"muon_lr_factor": factor}
                found[f"{name} {lr:g} {factor:g}"] = replace(run, lr=lr, options=options)
    return found


def table(runs: dict[str, Run], arguments: argparse.Namespace) -> str:
    seeds, folder = arguments.seeds, arguments.out
    curves = {name: [curve(replace(run, seed=seed), folder) for seed in seeds] for name, run in runs.items()}
    finals = {name: [each[-1][1] for each in found] for name, found in curves.items()}
    seconds = {name: median(each[-1][2] for each in found) for name, found in curves.items()}
    rows: list[list[str]] = []
    for name, run in runs.items():
        base = next(its for its in runs if runs[its].options is None and runs[its].lr == run.lr)
        spread = f" +- {stdev(finals[name]):.4f}" if len(seeds) > 1 else ""
        goal = mean(finals[base])
        reached = [next((step for step, loss, _ in each if loss <= goal), math.inf) for each in curves[name]]
        rows.append([run.name, f"{run.lr:g}", "-" if run.options is None else str(run.options["muon_lr_factor"])])
        rows[-1] += [f"{mean(finals[name]):.4f}{spread}", f"{100 * (mean(finals[name]) / goal - 1):+.1f} %"]
        rows[-1] += [f"{mean(reached):.0f}".replace("inf", "-"), sent(replace(run, seed=seeds[0]), folder)]
        rows[-1].append(f"{seconds[name] / seconds[base]:.2f}")
    heads = ["configuration", "lr", "factor", "loss", "against AdamW", "steps to AdamW's", "bytes", "time of a step"]
    return markdown(heads, rows)


def configurations(only: list[str] | None, nodes: int) -> dict[str, dict[str, Any] | None]:
    chosen: dict[str, dict[str, Any] | None] = {"adamw": None}
    known = CONFIGURATIONS if nodes == 1 else chosen | {"flexdemo": {}}
    for entry in only or known:
        name, _, given = entry.partition("=")
        if not given and name not in known:
            raise SystemExit(f"no configuration {name!r}; there are {', '.join(known)}, or NAME=JSON")
        chosen[name] = json.loads(given) if given else known[name]
    return chosen


def parse_arguments() -> argparse.Namespace:
    sizes = {"width": 128, "layers": 4, "context": 128, "batch": 16, "evaluations": 20}
    rates = {"lr": 4e-3, "factor": 3.0, "weight-decay": 0.1, "embedding-lr": 0.16}
    parser = parser_of(__doc__, sizes | rates | {"megabytes": 20.0})
    parser.add_argument("--program", nargs="+", choices=PROGRAMS, default=["gpt"])
    text = sysconfig.get_path("stdlib")
    parser.add_argument("--text", nargs="+", default=[text], help="default: Python's library")
    parser.add_argument("--steps", type=int, default=0, help="default: as the program says")
    parser.add_argument("--tune", nargs="*", default=[], metavar="CONFIGURATION")
    parser.add_argument("--grid", action="store_true", help="all rates and factors, and no search")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", metavar="CONFIGURATION", help="names, or NAME=JSON of options")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("losses"))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)  # One node of a run.
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.train:
        logging.basicConfig(level="INFO")
        train(Run(**arguments.train), arguments.out)
        return
    chosen = configurations(arguments.only, arguments.nodes)
    for program in arguments.program:
        settings = {name: getattr(arguments, name) for name in _SETTINGS}
        common = {"program": program, "lr": arguments.lr, "settings": settings, "nodes": arguments.nodes}
        runs = {name: Run(name=name, options=options, **common) for name, options in chosen.items()}
        runs = on_grid(runs, arguments) if arguments.grid else tuned(runs, arguments)
        wanted = [replace(run, seed=seed) for seed in arguments.seeds for run in runs.values()]
        train_all(wanted, arguments.out)
        print(f"\n{program}\n\n{table(runs, arguments)}\n{origin(__spec__.name)}\n", flush=True)


if __name__ == "__main__":
    main()
