"""Newton-Schulz against torch's own and against the singular value decomposition."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.config import MuonConfig, NsMethod
from lightning_muon.math.newton_schulz import (
    FAST,
    POLAR_EXPRESS,
    Arithmetic,
    NewtonSchulz,
    NewtonSchulzOptions,
    lr_scale,
    orthogonalize,
    steps_of,
    worth_batching,
)
from tests.reference.muon import orthogonalized
from tests.reference.polar_express import polar_express

OPTIONS = {"steps": (MuonConfig.ns_coefficients,) * 5, "eps": 1e-7}
SHAPES = [(13, 7), (64, 64), (3, 200), (1, 9), (200, 3), (1, 1)]
# From a short side of 512 on symmetric products are computed by panels of 192 rows; the last one may be lower.
PANELED = [(512, 512), (600, 512), (512, 640), (577, 700), (900, 769)]
STEPS = {
    "jordan": steps_of("jordan", 5),
    "polar_express": steps_of("polar_express", 5),
    "longer": steps_of("polar_express", 8),
    "fast": FAST,
}
METHODS: tuple[NsMethod, ...] = ("plain", "gram")
# How far singular values of at least 0.01 are from those of exact arithmetic, and their vectors from theirs.
ROUNDING = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


# bfloat16 takes seconds for the larger ones on CPUs without units for it.
@pytest.mark.parametrize("shape", [*SHAPES, *PANELED[:4]], ids=str)
def test_one_matrix_in_bfloat16_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    grad = torch.randn(shape)
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = grad
    # From zero weights, with no momentum and lr 1, torch.optim.Muon leaves just the negative update.
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    expected = torch.zeros(shape).add_(orthogonalize(grad, compute_dtype=torch.bfloat16, **OPTIONS), alpha=-scale)
    assert torch.equal(weight.detach(), expected)


@pytest.mark.parametrize("shape", [*SHAPES, (511, 600), *PANELED], ids=str)
def test_float32_agrees_with_the_reference_bit_for_bit(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    matrix = torch.randn(shape)
    assert torch.equal(orthogonalize(matrix, compute_dtype=torch.float32, **OPTIONS), orthogonalized(matrix))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_batch_gives_each_matrix_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sides = torch.randint(32, 257, (20,)).tolist()
    for short, longer, size in zip(sides[::2], sides[1::2], [1, 2, 3, 5, 8] * 2, strict=True):
        for rows, cols in ((short, longer), (longer, short)):
            assert worth_batching(rows, cols, "cpu")
            batch = torch.randn(size, rows, cols)
            result = orthogonalize(batch, compute_dtype=dtype, **OPTIONS)
            alone = [orthogonalize(matrix, compute_dtype=dtype, **OPTIONS) for matrix in batch]
            assert torch.equal(result, torch.stack(alone)), (size, rows, cols)


def test_fast_takes_the_method_with_fewer_flops() -> None:
    fast, reference = (NewtonSchulzOptions(each, (2.0, -1.5, 0.5), 3) for each in ("fast", "reference"))
    for device_type, dtype, shapes in (
        ("cpu", torch.bfloat16, {"plain": [(256, 256), (256, 384), (512, 605)], "gram": [(256, 385), (606, 512)]}),
        ("cuda", torch.float32, {"plain": [(512, 605), (4096, 4840)], "gram": [(1024, 256), (4096, 4841)]}),
    ):
        arithmetic = Arithmetic(device_type, dtype)
        for method, of_method in shapes.items():
            for shape in of_method:
                assert fast.choice(*shape, arithmetic) == NewtonSchulz(FAST, dtype, method)  # type: ignore[arg-type]
        assert reference.choice(256, 1024, arithmetic) == NewtonSchulz(((2.0, -1.5, 0.5),) * 3, dtype)
    group = {"ns_quality": "fast", "ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 3}
    assert NewtonSchulzOptions.of(group) == fast  # Lists, as files have them.


def _exact(values: Tensor, steps: Any) -> Tensor:
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("preset", STEPS)
def test_gram_has_the_singular_values_of_plain(preset: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    steps = STEPS[preset]
    for rows, cols, num_decades in ((48, 48, 1), (24, 96, 3), (96, 24, 0), (13, 7, 2)):
        short = min(rows, cols)
        left, right = (torch.linalg.qr(torch.randn(size, short, dtype=torch.float64))[0] for size in (rows, cols))
        singular = torch.logspace(0, -num_decades, short, dtype=torch.float64)
        singular = singular / singular.norm()
        matrix = (left * singular @ right.T).float()
        found = orthogonalize(matrix, steps=steps, eps=1e-7, compute_dtype=dtype, method="gram").double()
        is_large = singular >= 0.01
        turned = left.T @ found @ right
        exact = _exact(singular, steps)
        torch.testing.assert_close(turned.diag()[is_large], exact[is_large], rtol=0, atol=ROUNDING[dtype])
        assert (turned - turned.diag().diag()).norm() / short**0.5 < ROUNDING[dtype]


@pytest.mark.parametrize("shape", [(64, 200), (200, 64), (600, 700)], ids=str)
def test_gram_in_panels_and_batches_agrees_with_plain(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    batch, options = torch.randn(3, *shape), {"steps": steps_of("polar_express", 5), "eps": 1e-7}
    plain = orthogonalize(batch, compute_dtype=torch.float32, **options)
    whole = orthogonalize(batch, compute_dtype=torch.float32, method="gram", **options)
    alone = [orthogonalize(each, compute_dtype=torch.float32, method="gram", **options) for each in batch]
    torch.testing.assert_close(whole, plain, rtol=0, atol=2e-4)
    torch.testing.assert_close(torch.stack(alone), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", STEPS)
def test_odd_matrices_are_as_documented(preset: str, method: NsMethod, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    way = NewtonSchulz(STEPS[preset], dtype, method)

    def result(matrix: Tensor) -> Tensor:
        return way.orthogonalize(matrix, eps=1e-7)

    assert not result(torch.zeros(5, 9)).any()
    like = torch.randn(13, 7)
    before = like.clone()
    result(like)
    assert torch.equal(like, before)
    for bad in (torch.nan, torch.inf):
        spoiled = like.clone()
        spoiled[4, 2] = bad
        assert result(spoiled).isnan().all()
    # Far below eps nothing is left that would matter.
    assert result(like * 1e-30).abs().max().item() < 1e-15
    huge = result(like * 1e30)
    if dtype == torch.float16:
        torch.testing.assert_close(huge, result(like), rtol=0, atol=0.03)
        pair = torch.stack([like * 1e30, like * 1e-30])  # Each is divided by its own largest entry.
        torch.testing.assert_close(result(pair), torch.stack([*map(result, pair)]), rtol=0, atol=0.03)
    else:
        assert not huge.any()
    band = _exact(torch.linspace(0.9, 1.008, 1001, dtype=torch.float64), way.steps)
    of_rank_one = [torch.randn(6, 1) @ torch.randn(1, 4), *map(torch.randn, ((1, 9), (9, 1), (1, 100_000)))]
    for matrix in (*of_rank_one, *(torch.ones(size, 2 * size) / 3 for size in (1, 3, 6, 11, 24))):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        # Negative if the update points away.
        value = u[:, 0] @ result(matrix).float() @ vh[0]
        assert band.min() - 0.08 <= value <= band.max() + 0.08, matrix.shape


def test_steps_are_those_that_the_algorithm_of_polar_express_computes() -> None:
    # LAPACK may round in another way elsewhere.
    for steps, least in ((POLAR_EXPRESS, 1e-3), (FAST, 0.01)):
        computed = polar_express(len(steps), least)
        torch.testing.assert_close(torch.tensor(steps).double(), torch.tensor(computed).double(), rtol=1e-9, atol=0)
    # What is left is so near 1 that the step is the Pade approximation.
    assert steps_of("polar_express", 12) == POLAR_EXPRESS + ((1.875, -1.25, 0.375),) * 2


def test_fast_keeps_its_promise() -> None:
    singular = torch.logspace(-6, 0, 20_001, dtype=torch.float64)
    found = _exact(singular, FAST)
    assert found[singular >= 0.01].min() >= 0.70
    assert found.max() <= 1.28  # Nothing is promised of small ones, but they do no harm.


@pytest.mark.parametrize("rows_and_cols", [(64, 64), (200, 8), (8, 200)], ids=str)
def test_a_rule_gives_the_size_that_it_is_named_after(rows_and_cols: tuple[int, int]) -> None:
    rows, cols = rows_and_cols
    u, _, v = torch.linalg.svd(torch.randn(rows, cols, generator=torch.Generator().manual_seed(2)), full_matrices=False)
    orthogonal = u @ v
    rms = orthogonal.square().mean().sqrt()
    # The table of docs/family.md.
    assert float(rms) * lr_scale(rows, cols, "match_rms_adamw") == pytest.approx(0.2, rel=1e-4)
    assert float(rms) * lr_scale(rows, cols, "original") == pytest.approx(1 / math.sqrt(cols), rel=1e-4)
    for is_transposed, ratio in ((False, rows / cols), (True, cols / rows)):
        norm = torch.linalg.matrix_norm(orthogonal, ord=2) * lr_scale(
            rows, cols, "spectral_mup", is_transposed=is_transposed
        )
        assert float(norm) == pytest.approx(math.sqrt(ratio), rel=1e-4)
