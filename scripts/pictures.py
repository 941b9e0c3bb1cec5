"""Makes the pictures of docs/how-it-works.md from runs on this machine, in minutes: ``python -m scripts.pictures``.

- ``singular-values.svg``: what AdamW and Muon make of the same momentum, that of a small network which AdamW trains.
- ``step.svg``: an optimizer step on the parameters of T5-small on two ranks, by ``benchmarks/plan_accuracy.py``.
- ``pipeline-1f1b.svg``, ``pipeline-zb_h1.svg``: a training step over two stages, as the simulator has it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_muon import MuonConfig
from lightning_muon.math.newton_schulz import orthogonalize, steps_of
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import Pipeline, StageCosts, add_reduce_grad, build_program, make_order
from lightning_muon.schedule.simulate import simulate
from scripts.source_files import ROOT

NUM_STEPS = 200


def trained_layer() -> tuple[Tensor, Tensor]:
    """AdamW's two moments of a 256 x 256 weight, after it has learnt the bytes of a module of Python for a while."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text.unfold(0, 17, 1)
    model = nn.Sequential(
        *(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.GELU()),
        *(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        rows = windows[torch.randint(len(windows), (256,))]
        nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model[4].weight]
    return state["exp_avg"], state["exp_avg_sq"]


def draw_singular_values(path: Path) -> None:
    """Left: momentum and both updates, divided by their largest singular values. Right: Newton-Schulz, step by step."""
    momentum, squares = trained_layer()
    adamw = (momentum / (1 - 0.9**NUM_STEPS)) / ((squares / (1 - 0.999**NUM_STEPS)).sqrt() + 1e-8)

    def after(num_steps: int) -> Tensor:
        steps = steps_of(MuonConfig.ns_coefficients, num_steps)
        return orthogonalize(momentum, steps=steps, eps=MuonConfig.eps, compute_dtype=torch.float32)

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, matrix in {"momentum": momentum, "AdamW's update": adamw, "Muon's update": after(5)}.items():
        values = torch.linalg.svdvals(matrix)
        left.plot(values / values[0], label=name)
    left.set(yscale="log", ylim=(1e-4, 2), xlabel="singular value, from the largest", ylabel="of the largest")
    left.legend()
    for num_steps in range(6):
        matrix = after(num_steps) if num_steps else momentum / momentum.norm()
        right.plot(torch.linalg.svdvals(matrix), color=f"C{num_steps}", label=f"{num_steps} steps")
    right.axhline(1.0, color="0.8", linewidth=1, zorder=0)
    right.set(xlabel="singular value, from the largest", ylabel="value after Newton-Schulz")
    right.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-muon"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_singular_values(out / "singular-values.svg")
    with tempfile.TemporaryDirectory() as folder:
        words = f"-m benchmarks.plan_accuracy --shapes t5-small --ranks 2 --rounds 1 --out {folder}"
        subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
        shutil.copyfile(Path(folder, "timeline.svg"), out / "step.svg")
    passes = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0.01)
    costs = StageCosts(**passes, communication=0.0005, reduce_grad=0.005)
    pipeline = Pipeline(num_ranks=2, num_microbatches=6, costs=costs)
    for name in ("1f1b", "zb_h1"):
        program = add_reduce_grad(build_program(make_order(name, pipeline), pipeline))
        timeline = simulate(program, pipeline.costs)
        draw_timelines({name: timeline}, out / f"pipeline-{name}.svg", title=f"{name} on 2 ranks, 6 micro-batches")


if __name__ == "__main__":
    main()
