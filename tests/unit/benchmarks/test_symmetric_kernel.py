"""Symmetric products by the Triton kernel, in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.support.programs import ROOT

# In a process of its own: Triton reads the variable when the kernel is defined, and its interpreter uses numpy.
AGREES = """
import torch
from benchmarks.gpu.symmetric_kernel import symmetric_addmm

torch.manual_seed(0)
# The interpreter truncates where a card rounds: an error of twice the size.
tolerance = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
for dtype, bound in tolerance.items():
    for batch in ((), (3,)):
        for rows, cols in ((1, 5), (7, 13), (64, 64), (130, 70), (13, 129)):
            x = (torch.randn(*batch, rows, cols) / (rows + cols) ** 0.5).to(dtype)  # Products fit into float16.
            if rows == 130:
                x = x.mT.contiguous().mT
            guarded = torch.full((*batch, rows + 1, rows + 2), 7.0, dtype=dtype)
            gram, square, product = guarded[..., :rows, :rows], *(x.new_empty(*batch, rows, rows) for _ in range(2))
            symmetric_addmm(x, x.mT, out=gram)
            symmetric_addmm(gram, gram, out=square, bias=gram, beta=-0.5, alpha=0.25)
            symmetric_addmm(square, gram, out=product)
            whole = gram.double()
            for found, expected in (
                (gram, x.double() @ x.double().mT),
                (square, 0.25 * whole @ whole - 0.5 * whole),
                (product, square.double() @ whole),
            ):
                assert torch.equal(found, found.mT), (dtype, batch, rows, cols)
                error = (found.double() - expected).abs().max() / expected.abs().max()
                assert error <= bound, (dtype, batch, rows, cols, error)
            assert (guarded[..., rows:, :] == 7).all() and (guarded[..., rows:] == 7).all(), "beyond its end"
            if batch:  # What a matrix is batched with does not change its bits.
                alone = x.new_empty(rows, rows)
                symmetric_addmm(x[1], x[1].mT, out=alone)
                assert torch.equal(alone, gram[1])
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (pip install triton)")
def test_the_kernel_agrees_with_full_products() -> None:
    numpy, triton = (tuple(map(int, version(name).split(".")[:2])) for name in ("numpy", "triton"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("the interpreter of this Triton needs a NumPy before 2.4")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", AGREES]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr[-3000:]
