"""Kernel launches, communications and buffers of one step of ParallelMuon on CUDA, counted without a card.

    python -m benchmarks.launches --shapes llama3-8b --ranks 8 --overlap step

Runs the package on fake devices (``tests/support/fake_cuda.py``) as one of ``--ranks`` ranks and prints what it queued
in the last of three steps. Kernels per op are those of torch 2.13; a launch costs the host some 5 us.
"""

from __future__ import annotations

import argparse

from tests.support.fake_cuda import allow_fake_cuda
from tests.support.fake_training import run_fsdp, shapes_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b", help="a model that `lightning-muon plan --shapes` knows")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--overlap", default="step")
    arguments = parser.parse_args()
    allow_fake_cuda()
    simulation, optimizer = run_fsdp(
        shapes_of(arguments.shapes),
        arguments.ranks,
        replicas=arguments.replicas,
        overlap=arguments.overlap,
        races=False,
    )
    print(f"launches: {simulation.launches.total()}, by stream {dict(simulation.launches)}")
    print("by op:", ", ".join(f"{name} {count}" for name, count in simulation.ops.most_common(16) if count))
    print("communications:", dict(simulation.comms))
    print("the host waits:", dict(simulation.syncs))
    assert optimizer._planned is not None
    buffers = optimizer._planned.matrix_step._pool._buffers
    print(f"buffers: {sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
