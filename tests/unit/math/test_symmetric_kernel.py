"""Symmetric products by the Triton kernel, in Triton's interpreter and compiled for cards that need not be there."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

from tests.support.programs import ROOT

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton (pip install triton)")

# In a process of its own: Triton reads the variable when the kernel is defined, and its interpreter uses numpy.
AGREES = """
import sys
import torch
from lightning_muon.math.coefficients import steps_of
from lightning_muon.math.newton_schulz import orthogonalize
from lightning_muon.math.symmetric import add_square, gram_matrix, halves_of, symmetric_product

torch.manual_seed(0)
torch.set_default_device(sys.argv[1])
# The interpreter truncates where a card rounds: an error of twice the size.
tolerance = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
for dtype, bound in tolerance.items():
    for batch in ((), (3,)):
        for rows, cols in ((1, 5), (7, 13), (64, 64), (130, 70), (13, 129)):
            x = (torch.randn(*batch, rows, cols) / (rows + cols) ** 0.5).to(dtype)  # Products fit into float16.
            if rows == 130:
                x = x.mT.contiguous().mT
            kernel = halves_of(x, by_kernel=True)
            guarded = torch.full((*batch, rows + 1, rows + 2), 7.0, dtype=dtype)
            gram, square, product = guarded[..., :rows, :rows], *(x.new_empty(*batch, rows, rows) for _ in range(2))
            gram_matrix(x, kernel, out=gram)
            add_square(gram, -0.5, 0.25, kernel, out=square)
            symmetric_product(square, gram, kernel, out=product)
            exact = x.double() @ x.double().mT
            whole = gram.double()
            for found, expected in (
                (gram, exact),
                (square, 0.25 * whole @ whole - 0.5 * whole),
                (product, square.double() @ whole),
            ):
                assert torch.equal(found, found.mT), (dtype, batch, rows, cols)
                error = (found.double() - expected).abs().max() / expected.abs().max()
                assert error <= bound, (dtype, batch, rows, cols, error)
            assert (guarded[..., rows:, :] == 7).all() and (guarded[..., rows:] == 7).all(), "beyond its end"
            if batch:  # What a matrix is batched with does not change its bits.
                alone = x.new_empty(rows, rows)
                gram_matrix(x[1], kernel, out=alone)
                assert torch.equal(alone, gram[1])
spoiled = torch.randn(70, 90)
spoiled[3, 4] = torch.nan
options = {"steps": steps_of("jordan", 5), "eps": 1e-7, "compute_dtype": torch.float32}
assert orthogonalize(spoiled, by_kernel=True, **options).isnan().all()
for method in ("plain", "gram"):
    for shape in ((2, 70, 90), (90, 33)):
        x = torch.randn(shape)
        found, expected = (orthogonalize(x, method=method, by_kernel=each, **options) for each in (True, False))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
"""

# Code for a card can be made without one, by the compiler that Triton brings.
COMPILED = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_muon.math import symmetric_kernel as kernel

dtype, name, card = getattr(torch, sys.argv[1]), sys.argv[2], int(sys.argv[3])
tile, terms, warps = kernel._TILES[dtype]
kinds = dict.fromkeys(("left", "right", "bias", "out"), "*" + name) | dict.fromkeys(("alpha", "beta"), "fp32")
signature = {each: kinds.get(each, "constexpr" if each.isupper() else "i32") for each in kernel._triangle.arg_names}
constants = {"HAS_BIAS": True, "WIDENS": False, "TILE": tile, "TERMS": terms}
made = triton.compile(
    ASTSource(fn=kernel._triangle, signature=signature, constexprs=constants),
    target=GPUTarget("cuda", card, 32),
    options={"num_warps": warps, "num_stages": 3},
)
assert made.metadata.shared <= 65536 + 1024, made.metadata.shared
assert ("mma" in made.asm["ptx"]) is (dtype != torch.float32), "tensor cores, but not for float32"
assert made.asm["cubin"]
"""


def _run(program: str, *arguments: str, **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@needs_triton
def test_the_kernel_agrees_with_full_products() -> None:
    numpy, triton = (tuple(map(int, version(name).split(".")[:2])) for name in ("numpy", "triton"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("the interpreter of this Triton needs a NumPy before 2.4")
    _run(AGREES, "cpu", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_the_kernel_compiles_for_a_card(dtype: str, name: str, tmp_path) -> None:
    _run(COMPILED, dtype, name, "80", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
def test_on_a_card_it_agrees_with_full_products() -> None:
    _run(AGREES, "cuda")
