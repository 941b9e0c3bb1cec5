"""Losses of a small GPT on real text with AdamW, Muon and its relatives, after each has got its learning rate.

    python benchmarks/loss.py --tune adamw muon --seeds 0 1 2 --workers 2 --out results/pretraining
    python benchmarks/loss.py --only adamw muon 'mine={"momentum": 0.9}' --text my/corpus README.md --width 256
    python benchmarks/loss.py --finetune --tune adamw muon --steps 300 --out results/finetuning

Trains a byte-level GPT in one process with one thread per run, with each configuration of ``CONFIGURATIONS`` or --only;
what the installed ParallelMuon has no option for is skipped. The last tenth of the shuffled files is held out. --tune
gives the named configurations the best rate of a grid, measured with a seed of its own: for AdamW the learning rate of
all parameters, for the others, which keep that one for AdamW's parameters, ``muon_lr_factor``. What is not named takes
the factor of "muon". Rates warm up over a twentieth of the steps and fall linearly to a tenth.

--finetune first trains a model with AdamW on --text, then goes on from it on other text: with all weights, and with
LoRA of rank 8 on the layers of the blocks. --first-steps and --first-lr are of the first training; "forgetting" is the
rise of the loss on the first text. Without --tune the rates are --lr and --factor.

Each run leaves a file in --out (step, held-out loss, loss on the first text, seconds per step) and is not run again as
long as that is there; ``losses.csv`` has them all. Ends with a Markdown table: the mean final loss and the standard
deviation over the seeds, the first step at which the loss is AdamW's final one, seconds per step over AdamW's.
--picture draws the losses over steps and over seconds, a line for each seed; with --finetune those of all weights.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import inspect
import json
import math
import random
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_muon import NonFiniteGradientError, ParallelMuon

# Options of ParallelMuon; None is torch's AdamW.
CONFIGURATIONS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "muon": {},
    "polar_express": {"ns_coefficients": "polar_express"},
    "fast": {"ns_quality": "fast"},
    "cautious decay": {"cautious_weight_decay": True},
    **{name: {"adjust_lr_fn": name} for name in ("original", "spectral_mup")},
    "Muon on B": {"lora": "b_only"},
    "normuon": {"normuon": True},
}
TUNING_SEED = 1000
TITLES = ["mode", "configuration", "lr", "seed", "step", "loss", "loss on the first text", "seconds per step"]
SUFFIXES = (".py", ".txt", ".rst", ".md")
# Not Python's library; pydoc_data is the text of --finetune.
EXCLUDED = {"site-packages", "dist-packages", "pydoc_data"}
LORA_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    text: tuple[str, ...]
    megabytes: float
    width: int
    layers: int
    context: int
    batch: int
    steps: int
    evaluations: int
    weight_decay: float
    init_std: float  # Of all weights; less in layers that add to the residual stream.
    lr: float
    name: str = "adamw"
    options: dict[str, Any] | None = None
    seed: int = 0
    mode: str = "all weights"
    first_text: tuple[str, ...] = ()  # Of the model that a fine-tuning begins with.
    checkpoint: str = ""  # Its weights, in --out.

    def path(self, folder: Path) -> Path:
        """Where its losses are."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return folder / f"{self.mode}-{self.name}-{self.lr:g}-{self.seed}-{digest}.csv".replace(" ", "_")


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
    """Bytes ``(batch, context)`` to logits ``(batch, context, 256)``; heads of 32 channels."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, run.width), nn.Embedding(run.context, run.width)
        self.blocks = nn.ModuleList(Block(run.width) for _ in range(run.layers))
        self.norm, self.head = nn.LayerNorm(run.width), nn.Linear(run.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                depth = 2 * run.layers if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(parameter, std=run.init_std / math.sqrt(depth))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LoRALinear(nn.Module):
    """A frozen linear layer plus B A, with the names that PEFT gives (Hu et al. 2021, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, LORA_RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(LORA_RANK, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


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


def windows(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - context, (count, 1), generator=generator)
    return data[starts + torch.arange(context + 1)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])


@torch.no_grad()
def held_out_loss(model: nn.Module, run: Run, text: tuple[str, ...]) -> float:
    data, generator = corpus(text, run.megabytes)[1], torch.Generator().manual_seed(77)
    return mean(float(loss_of(model, windows(data, 64, run.context, generator))) for _ in range(4))


def train(run: Run, folder: Path) -> None:
    """Train and leave the file of the run, and the weights of a model that others begin with."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    model, path = GPT(run), run.path(folder)
    if run.checkpoint:
        model.load_state_dict(torch.load(folder / run.checkpoint))
    if run.mode == "LoRA":
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("query", "key", "value", "out", "up", "down"):
                setattr(block, name, LoRALinear(getattr(block, name)))
    common: dict[str, Any] = {"lr": run.lr, "weight_decay": run.weight_decay, "betas": (0.9, 0.95)}
    make = torch.optim.AdamW if run.options is None else ParallelMuon
    given: Any = model.named_parameters() if run.options is None else model
    optimizer = make(given, **common | (run.options or {}))
    rate = lambda step: min(20 * (step + 1) / run.steps, 1 - 0.9 * step / run.steps)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    data, generator = corpus(run.text, run.megabytes)[0], torch.Generator().manual_seed(run.seed)
    rows: list[tuple[int, float, float, float]] = []
    seconds = [0.0]
    marks = {run.steps * part // run.evaluations for part in range(run.evaluations + 1)}
    for step in range(run.steps + 1):
        if step in marks:
            first = held_out_loss(model, run, run.first_text) if run.first_text else math.nan
            rows.append((step, held_out_loss(model, run, run.text), first, median(seconds)))
        if step == run.steps:
            break
        started = time.perf_counter()
        loss_of(model, windows(data, run.batch, run.context, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        try:
            optimizer.step()
        except NonFiniteGradientError:
            rows.append((run.steps, math.inf, math.inf, median(seconds)))
            break
        scheduler.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    if run.mode == "first":
        torch.save(model.state_dict(), path.with_suffix(".pt"))
    with path.with_suffix(".part").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    path.with_suffix(".part").replace(path)


def train_all(runs: list[Run], folder: Path, workers: int) -> None:
    """Train those that have no file yet, several at once in processes of their own."""
    missing = {run.path(folder): run for run in runs if not run.path(folder).exists()}.values()
    if workers == 1 or len(missing) < 2:
        done = ((run, train(run, folder)) for run in missing)
    else:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        pending = {pool.submit(train, run, folder): run for run in missing}
        done = ((pending[each], each.result()) for each in as_completed(pending))
    for run, _ in done:
        print(f"{run.path(folder).stem} {run.options or ''}: {curve(run, folder)[-1][1]:.4f}", flush=True)


def curve(run: Run, folder: Path) -> list[tuple[int, float, float, float]]:
    """Step, held-out loss, loss on the first text (NaN without one), seconds per step."""
    with run.path(folder).open(newline="") as file:
        return [(int(step), float(loss), float(first), float(spent)) for step, loss, first, spent in csv.reader(file)]


def tuned(runs: dict[str, Run], arguments: argparse.Namespace) -> dict[str, Run]:
    """The runs with the rates of the best of a grid."""

    def best(candidates: list[Run]) -> Run:
        candidates = [replace(run, seed=TUNING_SEED) for run in candidates]
        train_all(candidates, arguments.out, arguments.workers)
        finals = [curve(run, arguments.out)[-1][1] for run in candidates]
        losses = [loss if math.isfinite(loss) else math.inf for loss in finals]
        return candidates[losses.index(min(losses))]

    if "adamw" in arguments.tune:
        lr = best([replace(runs["adamw"], lr=each) for each in arguments.rates]).lr
        runs = {name: replace(run, lr=lr) for name, run in runs.items()}
    factors = {"muon": arguments.factor}
    for name in arguments.tune:
        if name in runs and (options := runs[name].options) is not None:
            grid = [replace(runs[name], options=options | {"muon_lr_factor": each}) for each in arguments.factors]
            factors[name] = (best(grid).options or {})["muon_lr_factor"]
    for name, run in runs.items():
        if run.options is not None:
            factor = factors.get(name, run.options.get("muon_lr_factor", factors["muon"]))
            runs[name] = replace(run, options=run.options | {"muon_lr_factor": factor})
    return runs


def table(runs: dict[str, Run], arguments: argparse.Namespace) -> str:
    """One row for each configuration, from the files of its seeds."""
    seeds, folder = arguments.seeds, arguments.out
    curves = {name: [curve(replace(run, seed=seed), folder) for seed in seeds] for name, run in runs.items()}
    finals = {name: [each[-1][1] for each in found] for name, found in curves.items()}
    seconds = {name: median(each[-1][3] for each in found) for name, found in curves.items()}
    goal = mean(finals["adamw"])
    lines = [["configuration", "lr", "factor", "loss", "steps to AdamW's", "time of a step", "forgetting"], ["---"] * 7]
    for name, run in runs.items():
        spread = f" +- {stdev(finals[name]):.4f}" if len(seeds) > 1 else ""
        reached = [next((step for step, loss, _, _ in each if loss <= goal), math.inf) for each in curves[name]]
        lines.append([name, f"{run.lr:g}", "-" if run.options is None else f"{run.options['muon_lr_factor']:g}"])
        lines[-1] += [f"{mean(finals[name]):.4f}{spread}", f"{mean(reached):.0f}".replace("inf", "-")]
        forgetting = mean(each[-1][2] - each[0][2] for each in curves[name])
        lines[-1] += [f"{seconds[name] / seconds['adamw']:.2f}", f"{forgetting:+.4f}" if run.first_text else "-"]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: dict[str, Run], arguments: argparse.Namespace) -> None:
    """The picture; seconds are steps times the median over the seeds of what a step takes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, (name, run) in enumerate(runs.items()):
        curves = [curve(replace(run, seed=seed), arguments.out)[1:] for seed in arguments.seeds]
        seconds = median(each[-1][3] for each in curves)
        for each in curves:
            steps, losses = [row[0] for row in each], [row[1] for row in each]
            look = {"color": f"C{number}", "linewidth": 1, "label": name if each is curves[0] else None}
            by_steps.plot(steps, losses, **look)
            by_seconds.plot([step * seconds for step in steps], losses, **look)
    by_steps.set(xlabel="optimizer step", ylabel="held-out loss, nats per byte")
    by_seconds.set(xlabel="seconds of training")
    by_steps.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-muon"}):
        figure.savefig(arguments.picture, metadata={"Date": None} if arguments.picture.suffix == ".svg" else None)


def configurations(only: list[str] | None) -> dict[str, dict[str, Any] | None]:
    """What the command line names, AdamW always; configurations with unknown options are left out."""
    chosen: dict[str, dict[str, Any] | None] = {"adamw": None}
    known = inspect.signature(ParallelMuon).parameters
    for entry in only or CONFIGURATIONS:
        name, _, given = entry.partition("=")
        if not given and name not in CONFIGURATIONS:
            raise SystemExit(f"no configuration {name!r}; there are {', '.join(CONFIGURATIONS)}, or NAME=JSON")
        options = json.loads(given) if given else CONFIGURATIONS[name]
        if unknown := sorted((options or {}).keys() - known.keys()):
            print(f"skipped: {name}, since ParallelMuon has no option {', '.join(unknown)}")
        else:
            chosen[name] = options
    return chosen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=[sysconfig.get_path("stdlib")], help="default: Python's library")
    parser.add_argument("--finetune", nargs="*", metavar="TEXT", help="default: Python's reference manual")
    sizes = {"width": 128, "layers": 4, "context": 128, "batch": 16, "steps": 1000, "evaluations": 20}
    rates = {"lr": 4e-3, "factor": 3.0, "weight-decay": 0.1, "first-steps": 1000, "first-lr": 4e-3}
    others = {"megabytes": 20.0, "init-std": 0.02}
    for name, value in (sizes | rates | others).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--tune", nargs="*", default=[], metavar="CONFIGURATION")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", metavar="CONFIGURATION", help="names, or NAME=JSON of options")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("losses"))
    parser.add_argument("--picture", type=Path, help="file to draw the losses into, such as losses.svg")
    return parser.parse_args()


def first_run(arguments: argparse.Namespace) -> Run:
    """AdamW's training that is compared; with --finetune the model that it begins with is trained first."""
    names = {field.name for field in fields(Run)} - {"text"}
    run = Run(text=tuple(arguments.text), **{name: each for name, each in vars(arguments).items() if name in names})
    if arguments.finetune is None:
        return run
    before = replace(run, steps=arguments.first_steps, lr=arguments.first_lr, mode="first")
    train_all([before], arguments.out, 1)
    text = arguments.finetune or [f"{sysconfig.get_path('stdlib')}/pydoc_data/topics.py"]
    checkpoint = before.path(arguments.out).with_suffix(".pt").name
    return replace(run, text=tuple(text), first_text=run.text, checkpoint=checkpoint)


def main() -> None:
    """Run what the command line names and --out does not have yet."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = configurations(arguments.only)
    rows: list[list[Any]] = [TITLES]
    first = first_run(arguments)
    for mode in ("all weights", "LoRA") if first.checkpoint else ("all weights",):
        runs = {
            name: replace(first, name=name, options=options, mode=mode)
            for name, options in chosen.items()
            if mode == "LoRA" or "lora" not in (options or {})  # All weights have no factors.
        }
        runs = tuned(runs, arguments)
        wanted = [replace(run, seed=seed) for seed in arguments.seeds for run in runs.values()]
        train_all(wanted, arguments.out, arguments.workers)
        rows += [[mode, run.name, run.lr, run.seed, *row] for run in wanted for row in curve(run, arguments.out)]
        print(f"\n{mode}\n\n{table(runs, arguments)}\n", flush=True)
        if arguments.picture and mode == "all weights":
            draw(runs, arguments)
    with (arguments.out / "losses.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
