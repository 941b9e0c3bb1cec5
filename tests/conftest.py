"""Fixtures of the whole suite, one thread per process, type checks of ``lightning_muon.math``, a count of programs."""

import multiprocessing
import os
import signal
import sys

# Before torch is imported: the pool runs up to four processes, often on two cores. Cards are for `make gpu`.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes and dtypes in the annotations of the maths are checked by beartype, in tests only.
install_import_hook("lightning_muon.math", "beartype.beartype")

from tests.support.processes import ProcessPool
from tests.support.programs import STARTED

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it runs in the background; programs of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything starts the fork server of this process.
multiprocessing.set_forkserver_preload(["tests.support.preloaded"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).with_name("long")):
            item.add_marker("long")


MOST_PROGRAMS = 25  # Of `make test`; tests that start more are marked `long`.


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    is_of_test = event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ  # Not a process of xdist.
    if is_of_test and Path(os.fsdecode(arguments[0])).name.startswith("python"):
        STARTED.append(" ".join(map(os.fsdecode, arguments[1])))


sys.addaudithook(_notice)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of xdist has ended."""
    STARTED.extend(getattr(node, "workeroutput", {}).get("started", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The tests that are not long fail if they have started too many programs."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["started"] = STARTED  # type: ignore[attr-defined]
    elif session.config.option.markexpr == "not long":
        sys.stdout.write(f"\n{len(STARTED)} programs were started, at most {MOST_PROGRAMS} may be\n")
        if len(STARTED) > MOST_PROGRAMS:
            sys.stdout.write("\n".join(STARTED) + "\n")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def gloo() -> Iterator[ProcessPool]:
    """The pool of gloo workers of this session; see ``tests/support/processes.py``."""
    pool = ProcessPool()
    yield pool
    pool.close()
