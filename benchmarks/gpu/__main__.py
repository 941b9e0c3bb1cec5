"""The first minutes on a CUDA card: what the package promises there, checked and measured, in about three minutes.

    make gpu                                                       # one card, no network
    python -m benchmarks.gpu --parts newton_schulz waiting         # some parts
    python -m benchmarks.gpu --device cpu --small                  # tries this program itself, without a card

Each part runs in a process of its own with a time limit, so that one that hangs or breaks the device does not end the
others. Writes ``NAME-OF-CARD.json`` and prints a table in Markdown; ends with 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, run_part
from benchmarks.tables import ROOT, markdown, origin, parser_of


def main() -> int:
    arguments = parse_arguments()
    if arguments.part:
        print(json.dumps(run_part(arguments.part, device=arguments.device, is_small=arguments.small)))
        return 0
    result = run_all(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{re.sub(r'[^A-Za-z0-9.]+', '-', result['card']).strip('-')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['card']}, {result['date']}:\n\n{table(result)}\n{origin(__spec__.name)}\n\nwritten to {path}")
    return 1 if broken(result) else 0


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, {})
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder of the JSON file")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"card": "unknown", "date": time.strftime("%Y-%m-%d"), "parts": {}}
    for name in arguments.parts:
        start = time.monotonic()
        outcome = run_process(name, arguments, PARTS[name][1])
        outcome["seconds"] = round(time.monotonic() - start, 1)
        result["parts"][name] = outcome
        result["card"] = outcome.get("card", result["card"])
        print(f"{name}: {outcome['seconds']} s {outcome.get('log', '')}", flush=True)
    return result


def run_process(name: str, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", arguments.device]
    command += ["--small"] if arguments.small else []
    with tempfile.TemporaryFile("w+") as log:
        part = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, start_new_session=True
        )
        try:
            said, _ = part.communicate(timeout=limit)
            return json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit:.0f} s"
        except (IndexError, json.JSONDecodeError):
            problem = f"ended with {part.returncode}"
        finally:
            # Also what the part has started; it is the leader of a group of its own.
            with suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)
            part.wait()
        log.seek(0)
        return {"error": problem, "log": log.read()[-3000:]}


def broken(result: dict[str, Any]) -> list[str]:
    """What was promised and did not hold, and the parts that did not end."""
    found: list[str] = []
    for name, outcome in result["parts"].items():
        found += [f"{name}: {row['what']}" for row in outcome.get("rows", []) if row["held"] is False]
        found += [f"{name}: {outcome['error']}"] if "error" in outcome else []
    return found


def table(result: dict[str, Any]) -> str:
    promises = {True: "kept", False: "**broken**", None: ""}
    rows: list[list[str]] = []
    for name, outcome in result["parts"].items():
        rows += [[name, row["what"], row["figure"], promises[row["held"]]] for row in outcome.get("rows", [])]
        rows += [[name, "", outcome["error"], "**not done**"]] if "error" in outcome else []
    return markdown(["part", "what", "measured", "promise"], rows)


if __name__ == "__main__":
    sys.exit(main())
