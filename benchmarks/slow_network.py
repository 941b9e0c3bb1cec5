"""Training steps over a slow link: time, traffic and loss for every way to keep two nodes together; needs root.

    python benchmarks/slow_network.py --ranks-per-node 1 2 --rates unlimited 1gbit 100mbit 10mbit

Two network namespaces are the nodes, a veth pair is the link, and a token bucket of the kernel (``tbf``) at both ends
limits each direction to the rate; it adds no delay. torchrun starts the ranks, one thread each, which train a T5 of 10
million parameters from random weights on generated text (forward, backward, optimizer). One contender at a time:

- HSDP (FSDP2 on a 2-D mesh) with AdamW, gradients in fp32 or bf16 on the wire, and with ParallelMuon,
- FlexDeMo with its base optimizers, and numbers of components (FSDP2 within the node),
- DeToNATION, the code of the FlexDeMo paper's authors, with ``--detonation FOLDER``: it is installed there from PyPI,
  with nothing but what it imports, and used from there as it is,
- *no exchange*: nodes that do not talk to each other, which no exchange can beat in time.

For each number of ranks and contender:

- *loss*: of held-out text after ``--loss-steps`` steps without limit, for the best of ``--lrs``, which is named. The
  data are the same for all contenders, but not for other numbers of ranks. Contenders without exchange have a loss too:
  the mean of two models, each trained on its own half of the data.
- *s per step*: median of the steps after ``--warmup`` ones, slowest rank; in parentheses how many times faster than
  HSDP + AdamW. Steps are measured for about ``--seconds``, at least 2 and at most ``--steps``.
- *MB sent*: bytes that leave a node in a step (one direction; as many arrive), from the counters of its device, so with
  headers and acknowledgements; mean over both nodes, the largest of all rates. 1 MB = 10^6 bytes.

The namespaces are removed with all that runs in them however this script ends. Where there can be none (no root, no
``ip`` or ``tc``) it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from namespaces import TwoNodes, why_not
from slow_network_contenders import BASELINE, CONTENDERS, Job

ROOT = Path(__file__).resolve().parent.parent
PEER = ("detonation==0.5.2", "einops==0.8.2", "mltiming==0.0.5")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
Rows = dict[str, dict[str, Any]]


def main() -> None:
    arguments = parse_arguments()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    names = chosen(arguments.contenders, with_peer=bool(arguments.detonation))
    if arguments.detonation:
        install(Path(arguments.detonation))
    for ranks_per_node in arguments.ranks_per_node:
        rows: Rows = {}
        for name in names:
            rows[name] = run(make_job(name, ranks_per_node, arguments), arguments.timeout)
            print(f"2 x {ranks_per_node}, {name}: {rows[name]}", file=sys.stderr, flush=True)
        print(f"\n2 nodes x {ranks_per_node}\n\n{table(rows, arguments.rates, arguments.loss_steps)}", flush=True)


def chosen(words: Sequence[str], *, with_peer: bool) -> list[str]:
    """Names of the contenders that contain one of ``words``, in their order."""
    names = [name for name in CONTENDERS if any(word.lower() in name.lower() for word in words)]
    if not names:
        raise SystemExit(
            f"--contenders {' '.join(words)}: none of these has such a word in it: {', '.join(CONTENDERS)}"
        )
    left_out = [name for name in names if name.startswith("DeToNATION") and not with_peer]
    if left_out:
        print(f"left out, since there is no --detonation FOLDER: {', '.join(left_out)}", file=sys.stderr)
    return [name for name in names if name not in left_out]


def install(folder: Path) -> None:
    """Without what they depend on: torch and numpy of this environment are what all contenders use."""
    if not (folder / "detonation").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PEER]
        subprocess.run(command, check=True)


def make_job(name: str, ranks_per_node: int, arguments: argparse.Namespace) -> Job:
    return Job(
        contender=name,
        ranks_per_node=ranks_per_node,
        rates=tuple(parse_rate(rate) for rate in arguments.rates),
        lrs=tuple(arguments.lrs),
        loss_steps=arguments.loss_steps,
        steps=arguments.steps,
        seconds=arguments.seconds,
        warmup=arguments.warmup,
        batch=arguments.batch,
        num_layers=arguments.layers,
        side_folder=str(Path(arguments.detonation).resolve()) if arguments.detonation else "",
    )


def run(job: Job, timeout: float) -> dict[str, Any]:
    """What the ranks have measured; ``{"failed": why}`` if they could not. Fresh nodes for each job."""
    with tempfile.TemporaryDirectory() as folder, TwoNodes() as nodes:
        job_file, result_file, log_file = (Path(folder, name) for name in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps(asdict(job)))
        script = Path(__file__).with_name("slow_network_worker.py")
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        with log_file.open("wb") as log:
            arguments = [str(script), str(job_file), str(result_file)]
            launchers = nodes.torchrun(arguments, job.ranks_per_node, log=log, environment=environment)
            reason = wait(launchers, timeout)
        if reason is None and result_file.exists():
            return json.loads(result_file.read_text())
        print(log_file.read_text(errors="replace")[-6000:], file=sys.stderr)
        return {"failed": reason or "no result"}


def wait(launchers: Sequence[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Until all have ended well (``None``), one has failed, or the time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [launcher.poll() for launcher in launchers]
        if any(codes):
            return f"exit status {max(abs(code) for code in codes if code)}"
        if None not in codes:
            return None
        time.sleep(0.1)
    return f"not done after {timeout:.0f} s"


def parse_rate(text: str) -> float | None:
    """``"100mbit"`` -> 1e8; ``"unlimited"`` -> ``None``."""
    if text == "unlimited":
        return None
    number, unit = text[:-4], text[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"a rate is 'unlimited' or a number with kbit, mbit or gbit as in '100mbit', got {text!r}")
    return float(number) * UNITS[unit]


def table(rows: Mapping[str, Mapping[str, Any]], rates: Sequence[str], loss_steps: int) -> str:
    heads = ["contender", *(f"s per step, {rate}" for rate in rates), "MB sent"]
    heads += [f"loss after {loss_steps} steps", "lr"] if loss_steps else []
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    base = [each["seconds"] for each in rows.get(BASELINE, {}).get("rates", [])]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | {' | '.join([row['failed']] + [''] * (len(heads) - 2))} |")
            continue
        seconds = [each["seconds"] for each in row["rates"]]
        ratios = [f" ({old / new:.1f}x)" for old, new in zip(base, seconds, strict=True)] if base else [""] * len(rates)
        times = [f"{value:.3f}{ratio}" for value, ratio in zip(seconds, ratios, strict=True)]
        cells = [name, *times, f"{max(each['sent'] for each in row['rates']) / 1e6:.2f}"]
        cells += [f"{row['loss']:.3f}", f"{row['lr']:g}"] if loss_steps else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "100mbit", "10mbit"])
    parser.add_argument("--contenders", nargs="+", default=[""], help="parts of their names; default: all")
    parser.add_argument("--detonation", metavar="FOLDER", help="install DeToNATION there, if it is not, and measure it")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="to try for the loss")
    parser.add_argument("--loss-steps", type=int, default=60, help="0: no loss, and the first of --lrs for the times")
    parser.add_argument("--steps", type=int, default=20, help="measured at each rate, at most")
    parser.add_argument("--seconds", type=float, default=30, help="measured at each rate, about")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, and of the decoder")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one contender")
    parser.add_argument("--quick", action="store_true", help="few steps, no loss, 100 Mbit/s, one rank per node")
    arguments = parser.parse_args()
    if arguments.quick:
        quick = {"ranks_per_node": [1], "rates": ["100mbit"], "loss_steps": 0, "steps": 4, "seconds": 5, "warmup": 1}
        vars(arguments).update(quick)
    for rate in arguments.rates:
        parse_rate(rate)
    return arguments


if __name__ == "__main__":
    main()
