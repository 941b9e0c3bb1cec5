"""The cosine transform against its definition in float64."""

import math

import pytest
import torch
from torch import Tensor

from lightning_muon.math.dct import add_sparse_inverse_dct_, dct
from tests.reference.flexdemo import dct as basis
from tests.support.atomics import NoAtomics

SHAPES = [(5,), (64,), (127,), (1, 1), (1, 13), (13, 7), (64, 64), (32, 127)]


def reference(blocks: Tensor) -> Tensor:
    """``C_a X C_b^T`` or ``C x`` in float64."""
    bases = [basis(size) for size in blocks.shape[1:]]
    if len(bases) == 1:
        return torch.einsum("ka,na->nk", bases[0], blocks.double())
    return torch.einsum("ka,nab,lb->nkl", bases[0], blocks.double(), bases[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_transform_is_the_definition_and_has_an_inverse(shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    # More than one group and a shorter last one for 64 x 64.
    blocks = torch.randn(67 if shape == (64, 64) else 3, *shape)
    coefficients = dct(blocks)
    # Sums of up to 127 products in float32, twice.
    assert torch.allclose(coefficients.double(), reference(blocks), atol=2e-5)
    assert torch.allclose(dct(coefficients, inverse=True), blocks, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", ["one", "few", "all", "more"])
def test_the_sparse_inverse_is_the_dense_one(shape: tuple[int, ...], density: str) -> None:
    torch.manual_seed(sum(shape))
    numel = math.prod(shape)
    few = {"one": 1, "few": max(1, numel // 8), "all": numel, "more": numel + 3}[density]
    indices, values = torch.randint(numel, (35, few)), torch.randn(35, few)
    # Of several values at a position all but one are zero.
    for row, places in zip(values, indices.tolist(), strict=True):
        first = {place: index for index, place in reversed([*enumerate(places)])}
        row[[index for index, place in enumerate(places) if first[place] != index]] = 0
    expected = dct(torch.zeros(35, numel).scatter_add_(1, indices, values).view(35, *shape), inverse=True)
    found, rest = torch.zeros_like(expected), expected.clone()
    with NoAtomics():
        add_sparse_inverse_dct_(found, values, indices)
        add_sparse_inverse_dct_(rest, values, indices, alpha=-1)
    # Other orders of summation in float32.
    assert torch.allclose(found, expected, atol=1e-4)
    assert rest.abs().max() < 1e-4
