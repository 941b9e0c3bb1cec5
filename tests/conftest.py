"""Fixtures of the whole suite, one thread per process, and type checks of ``lightning_muon.math``."""

import gc
import multiprocessing
import os
import signal

# Before torch is imported: the pool runs up to four processes, often on two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes and dtypes in the annotations of the maths are checked by beartype, in tests only.
install_import_hook("lightning_muon.math", "beartype.beartype")

from tests.support.processes import ProcessPool

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it runs in the background; programs of the tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything starts the fork server of this process.
multiprocessing.set_forkserver_preload(["tests.support.preloaded"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collections leave out what is imported while tests are collected: to look through it takes 0.5 s each."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).with_name("long")):
            item.add_marker("long")


@pytest.fixture(scope="session")
def gloo() -> Iterator[ProcessPool]:
    """The pool of gloo workers of this session; see ``tests/support/processes.py``."""
    pool = ProcessPool()
    yield pool
    pool.close()
