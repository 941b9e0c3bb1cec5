"""An interpreter that has imported torch and the frameworks when it starts, for programs that start others.

``warm_python()`` is a command that takes what ``python`` takes, without ``-c``. It has a server fork a process that
runs the program with the caller's files, folder, environment and network, passes SIGINT and SIGTERM on to it, and ends
as it ends. In the program ``sys.executable`` is the same command, so that what launchers start is forked, too. What is
about imports needs ``sys.executable`` of the test.
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.programs import run_here

_COMMAND = """#!{python} -ISs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
pid = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
answer = server.recv(4)
if not answer:
    sys.exit("the server of warm_python has failed")
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def warm_python() -> str:
    """The path of the command; starts its server if there is none."""
    folder = tempfile.mkdtemp(prefix="python-")
    address, command = f"{folder}/socket", Path(folder, "python")
    context = multiprocessing.get_context("forkserver")
    server = context.Process(target=_serve, args=(address, str(command)), daemon=True)
    server.start()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    command.write_text(_COMMAND.format(python=sys.executable, address=address))
    command.chmod(0o700)
    while not os.path.exists(address):
        assert server.is_alive()
        time.sleep(0.02)
    return str(command)


def _serve(address: str, command: str) -> None:
    sys.executable, caller = command, multiprocessing.parent_process()
    assert caller is not None
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # Programs may have children.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen(64)
        os.rename(f"{address}.new", address)
        while server in wait([server, caller.sentinel]):
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _answer(connection)
            connection.close()
            while _ended():
                pass


def _ended() -> int:
    """The process id of a child that has ended, or 0."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


def _answer(connection: socket.socket) -> None:
    """Run the program in a child; ends the process."""
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        words, directory, environment = json.loads(stream.read(int.from_bytes(head, "big")))
    pid = os.fork()
    if pid == 0:
        _enter_network_of_caller(connection)
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, 1, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        run_here(words, directory, environment)
    for file in files:
        os.close(file)
    connection.sendall(pid.to_bytes(4, "big"))

    def end_with_caller() -> None:
        if not connection.recv(1):  # The caller was killed, or has its answer.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=end_with_caller, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def _enter_network_of_caller(connection: socket.socket) -> None:
    """Enter the network namespace of the process at the other end, if it has another one; that needs root."""
    if sys.platform.startswith("linux"):
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        caller = Path(f"/proc/{struct.unpack('3i', credentials)[0]}/ns/net")
        if not caller.samefile("/proc/self/ns/net"):
            with caller.open() as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, "cannot enter the caller's network"
