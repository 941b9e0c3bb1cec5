import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Makes two nodes, starts a process in one of them, says so, and ends in the given way.
PROGRAM = """
import os, signal, sys, time
from namespaces import TwoNodes
signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells start background jobs without it.
with TwoNodes() as nodes:
    inner = nodes.start(1, ["sleep", "600"])
    print(*nodes.names, inner.pid, flush=True)
    if sys.argv[1] == "error":
        raise RuntimeError("crash")
    if sys.argv[1] != "return":
        time.sleep(60)
"""


@pytest.fixture(scope="module")
def namespaces() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import namespaces
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    return namespaces


def _names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("how", ["return", "error", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_program_ends_its_nodes_are_gone(namespaces, how) -> None:
    command = [sys.executable, "-c", PROGRAM, str(how)]
    program = subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    *names, inner = program.stdout.readline().decode().split()
    if isinstance(how, signal.Signals):
        assert all(name in _names() for name in names)
        program.send_signal(how)
    program.communicate(timeout=20)
    # A killed program does not wait for the removal.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (any(name in _names() for name in names) or _runs(int(inner))):
        time.sleep(0.05)
    assert not any(name in _names() for name in names)
    assert not _runs(int(inner))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
