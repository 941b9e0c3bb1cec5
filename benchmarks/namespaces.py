"""Two network namespaces as nodes, joined by a veth pair whose rate can be limited; Linux, root, ``ip`` and ``tc``.

Packets between the nodes cross a real kernel device with a token bucket (``tbf``) at either end. Processes of one node
talk over ``lo``, so the counters of the device have the bytes between the nodes and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

DEVICE = "slow0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29500  # Nothing else listens in a namespace of our own.


class TwoNodes:
    """Context manager: two joined namespaces, which are gone with all of their processes when it is left.

    Their names have the number of this process in them, and nothing else is touched.
    """

    def __init__(self) -> None:
        self.names = (f"slow-{os.getpid()}-a", f"slow-{os.getpid()}-b")

    def __enter__(self) -> TwoNodes:
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        quiet: dict[str, Any] = {"check": False, "stderr": subprocess.DEVNULL}
        for name in self.names:
            # A process in the kernel may stay a while. A namespace takes its device with it.
            for _ in range(100):
                found = subprocess.run(["ip", "netns", "pids", name], stdout=subprocess.PIPE, text=True, **quiet)
                if not found.stdout.split():
                    break
                subprocess.run(["kill", "-KILL", *found.stdout.split()], **quiet)
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "del", name], **quiet)

    def _create(self) -> None:
        first, second = self.names
        for name in self.names:
            call("ip", "netns", "add", name)
        call(*f"ip link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}".split())
        for name, address in zip(self.names, ADDRESSES, strict=True):
            # Neighbour discovery would be counted as traffic.
            quiet = "for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $file; done"
            subprocess.run(["ip", "netns", "exec", name, "sh", "-c", quiet], check=False, stderr=subprocess.DEVNULL)
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                call("ip", "-n", name, "link", "set", device, "up")

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start ``command`` in the namespace of ``node`` (0 or 1), out of reach of Ctrl-C."""
        command = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(command, start_new_session=True, **options)

    def torchrun(
        self, arguments: Sequence[str], ranks_per_node: int, *, log: IO[bytes], environment: Mapping[str, str]
    ) -> list[subprocess.Popen[bytes]]:
        """Start torchrun in both nodes on the script and options in ``arguments``; gloo uses the slow device."""
        options = f"--nnodes 2 --nproc-per-node {ranks_per_node} --master-addr {ADDRESSES[0]} --master-port {_PORT}"
        launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
        variables = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        how = {"env": variables, "stdout": log, "stderr": subprocess.STDOUT}
        return [
            self.start(node, [*launcher, "--node-rank", str(node), "--local-addr", address, *arguments], **how)
            for node, address in enumerate(ADDRESSES)
        ]


def why_not() -> str | None:
    """Why there can be no :class:`TwoNodes` here; ``None`` if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    try:
        with TwoNodes() as nodes:
            call("ip", "netns", "exec", nodes.names[0], *tbf(10**8))
    except RuntimeError as error:
        return f"{error}"
    return None


def set_rate(bits_per_second: float | None) -> None:
    """Limit what leaves the node of this process; ``None``: no limit. One process of each node calls it."""
    subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], check=False, stderr=subprocess.DEVNULL)
    if bits_per_second is not None:
        call(*tbf(bits_per_second))


def tbf(bits_per_second: float) -> list[str]:
    """The command that limits the device.

    The bucket holds 2 ms of the rate (but ten packets at least), so that what it lets through at once at the begin of
    each exchange does not count. The queue is longer than what gloo's sockets have on their way, so nothing is dropped.
    """
    burst = max(16_000, round(bits_per_second / 8 * 2e-3))
    return f"tc qdisc add dev {DEVICE} root tbf rate {round(bits_per_second)}bit burst {burst} limit 16000000".split()


def sent_bytes() -> int:
    """Bytes that have left the node of this process, headers included."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def call(*command: str) -> None:
    """Run ``command``.

    Raises:
        RuntimeError: If it fails; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
