"""Print the pip option for PyTorch's index of CPU wheels, if that index can be reached.

On Linux the wheels of torch on PyPI carry CUDA, gigabytes that a CPU machine has no use for. pip itself would wait for
an index that does not answer once per package, so it is asked here, once and briefly.
"""

from __future__ import annotations

import sys
import urllib.request


def reachable(url: str, seconds: float = 5.0) -> bool:
    """Whether ``url`` answers with success in time."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def main(index: str) -> str:
    """The option, or an empty string."""
    return f"--extra-index-url {index}" if index and reachable(f"{index.rstrip('/')}/torch/") else ""


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else ""))
