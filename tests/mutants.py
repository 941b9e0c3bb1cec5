"""Mistakes that the tests must find, one planted at a time, each in a copy of the repository: ``make mutants``.

``python -m tests.mutants`` plants all of them, ``python -m tests.mutants zero2 cli`` those whose room or file has one
of these words. The tests of its room run until one fails; with all that takes about 40 minutes on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_FOUND = 41
SECONDS = 900  # For the tests of one.
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site")
# Room of the package -> its tests, the quickest first; patterns are those of Path.glob.
TESTS: dict[str, Sequence[str]] = {
    "math": ["tests/unit/math"],
    "schedule": ["tests/unit/schedule"],
    "schedule/pipeline": ["tests/unit/schedule/pipeline"],
    "params": ["tests/unit/params", "tests/unit/optim", "tests/distributed/test_*.py", "tests/matrix"],
    "comm": ["tests/distributed/comm", "tests/distributed/test_*.py", "tests/distributed/sharding", "tests/matrix"],
    "sharding": ["tests/unit/sharding", "tests/distributed/sharding", "tests/matrix"],
    "optim": ["tests/unit/optim", "tests/distributed/test_*.py", "tests/matrix"],
    "flexdemo": ["tests/unit/flexdemo", "tests/distributed/flexdemo", "tests/matrix"],
    "pipeline": ["tests/unit/pipeline", "tests/distributed/pipeline", "tests/matrix"],
    "engine": ["tests/unit/engine", "tests/integration/engine", "tests/integration/test_*.py", "tests/matrix"],
    "checkpoint": ["tests/integration/checkpoint", "tests/matrix"],
    "monitor": [
        "tests/unit/monitor",
        "tests/distributed/monitor",
        "tests/integration/test_muon_monitor.py",
        "tests/integration/test_signals.py",
    ],
    "integrations": [
        "tests/unit/integrations",
        "tests/integration/test_mid_epoch.py",
        "tests/integration/test_misuse.py",
        "tests/integration/test_loops.py",
        "tests/integration/integrations",
        "tests/matrix",
    ],
    "cli": ["tests/unit/cli", "tests/integration/checkpoint/test_damage.py"],
}


# File of the package -> mistakes: what it is, and the text, which occurs there once, before and after.
MISTAKES: dict[str, list[tuple[str, str, str]]] = {
    "math/newton_schulz.py": [
        ("the rate of a matrix with swapped axes", "cols / rows if is_transposed", "cols / rows if not is_transposed"),
        ("rounding is thought to grow too slowly", "noise *= a * a", "noise *= a"),
    ],
    "math/dct.py": [("cosines of neighbours", "(2 * numbers + 1)", "(2 * numbers)")],
    "schedule/exchange.py": [
        ("the heap of loads is stale", "(*loads[rank], rank))", "(load_flops, load_bytes, rank))"),
        ("a bucket is closed one matrix early", "sizes[matrix] > least", "sizes[matrix] >= least"),
        ("an owner's own piece counts as sent", "to_owners[owner] -= own", "to_owners[owner] -= 0"),
    ],
    "schedule/pipeline/play.py": [
        ("messages of one link run at the same time", "self._link_free.get(link, 0.0))", "0.0)"),
        ("the memory limit is off by one", "if held > pipeline.memory_limit:", "if held > pipeline.memory_limit + 1:"),
    ],
    "schedule/pipeline/lower.py": [("forwards hold no memory", "memory=int(holds)", "memory=0")],
    "params/layout.py": [
        ("boxes of uneven shards are too small", "-(-shape[dim] // mesh_shape[0])", "shape[dim] // mesh_shape[0]")
    ],
    "params/routing.py": [
        ("fused matrices are cut along the other axis", '"fused_inputs") != routes', '"fused_inputs") == routes'),
        ("a matrix that is tied to an embedding runs on Muon", "elif blocking is not None:", "elif blocking is None:"),
    ],
    "comm/collectives.py": [
        ("buckets in the order of forward", "key=lambda group: -group[-1]", "key=lambda group: group[-1]"),
        ("a group of one's own is shared", "group=_made().make(", "group=_made().share("),
    ],
    "comm/agreement.py": [
        (
            "errors of other ranks than the first are not raised",
            "if message is not None:\n            raise",
            "if message is not None and rank == 0:\n            raise",
        )
    ],
    "sharding/zero2.py": [("sums of gradients are not divided", "if divisor != 1:", "if divisor == 1:")],
    "sharding/clipping.py": [
        (
            "elements on several ranks count several times in the norm",
            'axes = sharded_axes(placements, shape, f"a parameter {tuple(parameter.shape)}")',
            "axes = tuple(axis for axis, size in enumerate(shape) if size > 1)",
        )
    ],
    "sharding/ddp.py": [
        ("gradients that come late are lost", "self._launch(index, left_over,", "self._launch(index, (),")
    ],
    "optim/matrix_step.py": [
        ("no weight decay of matrices", "decay_(views, lr * weight_decay)", "decay_(views, 0.0)"),
        (
            "the learning rate of the first step stays",
            "lr = shared_lr * factor",
            'lr = vars(self).setdefault("lr", shared_lr * factor)',
        ),
        ("weights of a moving average the wrong way round", "mean(-1), 1 - beta2)", "mean(-1), beta2)"),
        ("second moments of NorMuon are not saved", "if matrix.owner == axes.rank:", "if matrix.owner == -1:"),
    ],
    "optim/parallel_muon.py": [("a plan forgets NorMuon", "self._write_second_moments()\n        self._c", "self._c")],
    "flexdemo/bucket.py": [
        ("sums over the nodes are no means", "self._received.float().div_(self._num_nodes)", "self._received.float()")
    ],
    "flexdemo/replicators.py": [
        ("what was sent is added to the residual", "components.indices, alpha=-1)", "components.indices, alpha=1)")
    ],
    "flexdemo/sync.py": [
        ("nodes average one step too early", "if num_steps %", "if (num_steps + 1) %"),
        ("other nodes get the sum of what was saved", ".mean(0)", ".sum(0)"),
    ],
    "pipeline/batch_run.py": [
        ("gradients of tied weights are not summed", "for stage in sorted(found)]).sum(0)", "for stage in found])[0]"),
        ("the same dropout in each micro-batch", "dist.get_rank(), stage, microbatch))", "dist.get_rank(), stage))"),
        ("weights beside the way to the inputs get no gradient", "starts += self.roots", "starts += []"),
    ],
    "engine/training.py": [
        ("tokens are counted as if no micro-batches were accumulated", "divisor(loss_divided_by)", "divisor(1)"),
        ("a step with NaN in the gradients is taken", "parameter.grad = None", "parameter.grad = parameter.grad"),
        ("weights of before the step stay whole", "self.weights_have_changed()\n            for guard", "for guard"),
    ],
    "engine/conversion.py": [
        ("the next training begins with the learning rate of the last one", "_copy_rates(optimizer, used)", "pass")
    ],
    "checkpoint/manifest.py": [
        (
            "hashes are not compared",
            'return None if sha256.hexdigest() == entry["sha256"] else',
            "return None if sha256.hexdigest() else",
        ),
        ("no rank reads the first file", "names[part::num_parts]", "names[part + 1 :: num_parts]"),
    ],
    "checkpoint/loading.py": [("the oldest checkpoint comes first", "sorted(found, reverse=True)", "sorted(found)")],
    "monitor/watchdog.py": [("ranks are ended after one look", "min(a.beat, b.beat) < 2", "min(a.beat, b.beat) < 0")],
    "monitor/step_monitor.py": [("times are summed over the ranks", "key: value / len(rows) for", "key: value for")],
    "monitor/signals.py": [("a signal counts only if all ranks have got it", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN")],
    "integrations/lightning/resuming.py": [
        ("batches that were read are counted in the size of now", "num_ranks * now)", "num_ranks * then)"),
        ("random states are not restored", "set_random_state(now)", "set_random_state(random_state())"),
    ],
    "integrations/accelerate/accelerator.py": [
        ("accumulated losses count as whole ones", "=self.gradient_accumulation_steps", "=1")
    ],
    "cli/verify.py": [("the last checkpoint decides alone", "is_good = is_good and bad == []", "is_good = bad == []")],
    "cli/plan_fit.py": [
        ("the bubble is one micro-batch too long", "(way.passes + way.pipeline - 1)", "(way.passes + way.pipeline)")
    ],
    "cli/convert.py": [
        ("a damaged checkpoint is converted", "suffix != _SAFETENSORS and (bad", "suffix == _SAFETENSORS and (bad")
    ],
}


@dataclass(frozen=True)
class Mutant:
    """A mistake in a file."""

    file: str
    mistake: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        """The file, from the root of the repository."""
        return Path("lightning_muon", self.file)

    @property
    def room(self) -> str:
        """The one whose tests must find it."""
        return max((room for room in TESTS if self.file.startswith(f"{room}/")), key=len)


MUTANTS = [Mutant(file, *mistake) for file, mistakes in MISTAKES.items() for mistake in mistakes]


def found_by(mutant: Mutant) -> str:
    """The test that fails with the mutant and not without it; else in parentheses what has happened."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT, copy := Path(folder, "copy"), ignore=_NOT_COPIED)
        tests = [str(found.relative_to(copy)) for pattern in TESTS[mutant.room] for found in sorted(copy.glob(pattern))]
        path = copy / mutant.path
        right = path.read_text()
        path.write_text(right.replace(mutant.old, mutant.new))
        failed, text = _run(copy, tests)
        if failed:
            path.write_text(right)
            os.utime(path, (0, 0))  # Or Python takes the compiled mutant.
            failed_before, _ = _run(copy, [failed])
            return f"({failed} fails without it)" if failed_before else failed.removeprefix("tests/")
        return text


def _run(copy: Path, tests: Sequence[str]) -> tuple[str, str]:
    """The first test that fails; what else has happened, in parentheses."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "TMPDIR": str(copy.parent)}
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    with (copy.parent / "output").open("w+") as output:
        running = subprocess.Popen(
            pytest, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return "", f"(no test failed in {SECONDS} s)"
        finally:
            with suppress(ProcessLookupError):  # What tests have left running.
                os.killpg(running.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    if code == 1 and failed:  # Other codes say that pytest itself has failed.
        return failed[1], ""
    return "", "" if code == 0 else f"(pytest ended with {code}) {text[-500:]}"


def main() -> None:
    """Plant the chosen mutants, and print a line for each."""
    words = sys.argv[1:]
    mutants = [each for each in MUTANTS if not words or any(word in each.file for word in words)]
    num_found = 0
    with ThreadPoolExecutor(2) as threads:
        for mutant, test in zip(mutants, threads.map(found_by, mutants), strict=True):
            is_found = bool(test) and not test.startswith("(")
            num_found += is_found
            place = f"{mutant.file}: {mutant.mistake}"
            print(f"{'found' if is_found else 'NOT FOUND':10}{place:95}{test}", flush=True)  # noqa: T201
    least = min(LEAST_FOUND, len(mutants))
    print(f"{num_found} of {len(mutants)} mutants found, at least {least} must be")  # noqa: T201
    sys.exit(num_found < least)


if __name__ == "__main__":
    main()
