"""Time of the cosine transform, of the choice of the largest coefficients, and of the way back, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/codec.py
    OMP_NUM_THREADS=1 python benchmarks/codec.py --blocks 512 --top-k 8 32

The first table has the parts for the transform of all coefficients, in groups that fit a cache and at once; the second
encodes and decodes by the number of coefficients of a block, and compares the two ways back: the sum of a few products
(``sparse``) and the transform of a block full of zeros (``dense``), between which ``add_sparse_inverse_dct_`` chooses.
Times are processor time, the least of several runs, since other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import torch

from lightning_muon.flexdemo.replicators import Components, DCTTopK, ExchangeStep, largest
from lightning_muon.math import dct as codec

TURN = ExchangeStep(step=0, part=0)


def main() -> None:
    arguments = parse_arguments()
    side = arguments.side
    blocks = torch.randn(arguments.blocks, side, side)
    print(f"{arguments.blocks} blocks of {side} x {side}, {torch.get_num_threads()} threads\n")
    grouped = milliseconds(lambda: codec.dct(blocks))
    with mock.patch.dict(codec._GROUP_NUMEL, cpu=blocks.numel()):
        at_once = milliseconds(lambda: codec.dct(blocks))
    flops = 4 * side * blocks.numel()
    print(f"transform {grouped:.1f} ms ({flops / grouped / 1e6:.0f} GFLOP/s), all at once {at_once:.1f} ms\n")
    print("| coefficients | encode ms | torch.topk ms | largest ms | decode ms | sparse ms | dense ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for top_k in arguments.top_k:
        print(row(blocks, top_k), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2441, help="10 million elements with 64 x 64")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--top-k", type=int, nargs="+", default=[8, 32, 64, 128, 256])
    return parser.parse_args()


def milliseconds(call: Callable[[], object], repetitions: int = 5) -> float:
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def row(blocks: torch.Tensor, top_k: int) -> str:
    replicator, shape = DCTTopK(chunk_size=blocks.size(1), top_k=top_k), tuple(blocks.shape[1:])
    components = replicator.encode(blocks, TURN)
    coefficients, groups = codec.dct(blocks).flatten(1), list(codec.groups(blocks))
    times = [
        milliseconds(lambda: replicator.encode(blocks, TURN)),
        milliseconds(lambda: [coefficients[group].abs().topk(top_k, sorted=False) for group in groups]),
        milliseconds(lambda: [largest(coefficients[group], top_k) for group in groups]),
        milliseconds(lambda: replicator.decode(components, shape, TURN)),
        milliseconds(lambda: inverse(components, blocks, codec._add_products_)),
        milliseconds(lambda: inverse(components, blocks, codec._add_dense_inverse_)),
    ]
    return f"| {top_k} | " + " | ".join(f"{value:.1f}" for value in times) + " |"


def inverse(components: Components, blocks: torch.Tensor, way: Callable[..., None]) -> None:
    out = torch.zeros_like(blocks)
    for group in codec.groups(blocks):
        way(out[group], components.values[group], components.indices[group], 1)


if __name__ == "__main__":
    main()
