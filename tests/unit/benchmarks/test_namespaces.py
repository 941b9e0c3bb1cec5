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


def test_a_failed_creation_leaves_nothing_behind(namespaces, monkeypatch) -> None:
    monkeypatch.setattr(namespaces, "ADDRESSES", ("10.77.0.1", "not an address"))
    nodes = namespaces.TwoNodes()
    with pytest.raises(RuntimeError, match="not an address"):
        nodes.__enter__()
    assert not any(name in _names() for name in nodes.names)


# Sends so many bytes to an address, and prints the bytes that its own node has sent and the seconds that it took.
SENDER = """
import socket, sys, time
from namespaces import sent_bytes, set_rate
address, num_bytes, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
set_rate(rate)
sender = socket.create_connection((address, 4000))
before, started = sent_bytes(), time.monotonic()
sender.sendall(bytes(num_bytes))
sender.shutdown(socket.SHUT_WR)
assert sender.recv(1) == b"x"
print(sent_bytes() - before, time.monotonic() - started)
"""
RECEIVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
connection, _ = listener.accept()
while connection.recv(65536):
    pass
connection.send(b"x")
"""


def _send(namespaces, *, to: int, num_bytes: int, rate: float) -> tuple[int, float]:
    """From node 0; bytes that it sent and seconds."""
    address = namespaces.ADDRESSES[to]
    options = {"stdout": subprocess.PIPE, "cwd": BENCHMARKS}
    with namespaces.TwoNodes() as nodes:
        receiver = nodes.start(to, [sys.executable, "-c", RECEIVER, address], **options)
        assert receiver.stdout.readline()
        sender = nodes.start(0, [sys.executable, "-c", SENDER, address, str(num_bytes), str(rate)], **options)
        sent, seconds = sender.communicate(timeout=30)[0].decode().split()
        receiver.communicate(timeout=30)
    return int(sent), float(seconds)


def test_what_crosses_the_line_is_slow_and_counted(namespaces) -> None:
    num_bytes, rate = 200_000, 4e6
    sent, seconds = _send(namespaces, to=1, num_bytes=num_bytes, rate=rate)
    # Headers are 66 of each 1514 bytes; more than a tenth would be bytes that were dropped and sent again.
    assert num_bytes <= sent < 1.1 * num_bytes
    # What fits into the bucket (16 kB) passes at once. A busy machine only makes it longer.
    assert seconds > (num_bytes - 16_000) * 8 / rate
    assert _send(namespaces, to=0, num_bytes=num_bytes, rate=rate)[0] == 0, "it has crossed no line"
