"""MuonEq and Muon+ against their formulas in float64."""

import math

import pytest
import torch
from torch import Tensor

from lightning_muon.config import AdjustLr, MuonEq, MuonPlus
from lightning_muon.math.newton_schulz import lr_scale
from lightning_muon.math.normalize import equilibrated, normalized
from tests.reference import muon as reference


def _matrix(rows: int = 13, cols: int = 7) -> Tensor:
    """Rows and columns of very unequal lengths, among them a zero row."""
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    matrix = matrix * torch.logspace(-2, 1, rows)[:, None] * torch.logspace(1, -1, cols)
    matrix[3] = 0
    return matrix


@pytest.mark.parametrize("variant", ["R", "C", "RC"])
def test_equilibrated_is_the_formula_at_any_size(variant: MuonEq) -> None:
    matrix = _matrix()
    expected = reference.equilibrated(matrix, variant)
    for factor in (1.0, 1e-20, 1e25):  # Squares of these are 0 and infinite in float32.
        # Two roundings of each factor.
        torch.testing.assert_close(equilibrated(matrix * factor, variant), expected, rtol=1e-5, atol=1e-7)
    # 1e-8 against squares of 1: rows a hundred times as short as others still get their length.
    lengths = {side: torch.linalg.vector_norm(expected, dim=dim) for side, dim in (("R", 1), ("C", 0))}
    if variant != "RC":
        lengths = {"kept": lengths[variant][lengths[variant] > 0]}
        torch.testing.assert_close(lengths["kept"], torch.ones_like(lengths["kept"]), rtol=0.02, atol=0)
    assert (expected[3] == 0).all()
    assert torch.equal(equilibrated(torch.zeros(2, 3), variant), torch.zeros(2, 3))
    assert equilibrated(torch.tensor([[1.0, math.nan], [1.0, 1.0]]), variant).isnan().all()


@pytest.mark.parametrize("variant", ["row", "col", "row_col", "col_row"])
def test_normalized_ends_with_unit_vectors(variant: MuonPlus) -> None:
    update = reference.orthogonalized(_matrix())
    found = normalized(update, variant)
    torch.testing.assert_close(found, reference.normalized(update, variant), rtol=1e-5, atol=1e-7)
    lengths = torch.linalg.vector_norm(found, dim=1 if variant.endswith("row") else 0)
    assert (found[3] == 0).all() and torch.allclose(lengths[lengths > 0], torch.ones(()), atol=1e-3)
    assert normalized(update.bfloat16(), variant).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 13, 7), (2, 64, 40), (4, 5, 200)], ids=str)
def test_a_batch_and_a_transposed_matrix_give_the_same(shape: tuple[int, ...]) -> None:
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    eq: tuple[MuonEq, ...] = ("none", "R", "C", "RC")
    plus: tuple[MuonPlus, ...] = ("none", "row", "col", "row_col", "col_row")
    for function, variants in ((equilibrated, eq), (normalized, plus)):
        for variant in variants:
            found = function(batch, variant)  # type: ignore[arg-type]
            # Ranks may batch a matrix with others: bit for bit.
            assert all(torch.equal(one, function(each, variant)) for one, each in zip(found, batch, strict=True))  # type: ignore[arg-type]
            transposed = function(batch.mT.contiguous(), variant, is_transposed=True)  # type: ignore[arg-type]
            torch.testing.assert_close(transposed.mT, found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows_and_cols", [(64, 64), (200, 8), (8, 200)], ids=str)
def test_a_rule_gives_the_size_that_it_is_named_after(rows_and_cols: tuple[int, int]) -> None:
    rows, cols = rows_and_cols
    u, _, v = torch.linalg.svd(torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)), full_matrices=False)
    orthogonal = u @ v

    def scaled(rule: AdjustLr, plus: MuonPlus, *, is_transposed: bool = False) -> Tensor:
        update = normalized(orthogonal, plus, is_transposed=is_transposed)
        return update * lr_scale(rows, cols, rule, muon_plus=plus, is_transposed=is_transposed)

    for plus in ("none", "row", "col", "row_col", "col_row"):
        for is_transposed in (False, True):
            rms = scaled("match_rms_adamw", plus, is_transposed=is_transposed).square().mean().sqrt()
            assert float(rms) == pytest.approx(0.2, rel=1e-3)
    for is_transposed, ratio in ((False, rows / cols), (True, cols / rows)):
        norm = torch.linalg.matrix_norm(scaled("spectral_mup", "none", is_transposed=is_transposed), ord=2)
        assert float(norm) == pytest.approx(math.sqrt(ratio), rel=1e-4)
    # The table of docs/family.md.
    assert float(scaled("original", "none").square().mean().sqrt()) == pytest.approx(1 / math.sqrt(cols), rel=1e-4)
