"""Methods of orthogonalization: the same singular values, and the cheapest one for each shape."""

import pytest
import torch

from lightning_muon.math.coefficients import band, polar_express, steps_of
from lightning_muon.math.methods import Arithmetic, NewtonSchulz, NewtonSchulzOptions, candidates
from lightning_muon.math.newton_schulz import gram_restarts, newton_schulz_flops, orthogonalize
from lightning_muon.math.product_costs import product_flops

_SAFE = [("jordan", 5), ("you", 5), ("polar_express", 5), ("polar_express", 8), ("cubic", 5), ("deepseek_v4", 10)]
# How far singular values of at least 0.01 are from those of exact arithmetic, and their vectors from theirs.
_ROUNDING = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


@pytest.mark.parametrize("dtype", _ROUNDING, ids=str)
@pytest.mark.parametrize("preset", _SAFE, ids=str)
def test_gram_has_the_singular_values_of_plain(preset: tuple[str, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for rows, cols, num_decades in ((48, 48, 1), (24, 96, 3), (96, 24, 0), (13, 7, 2)):
        short = min(rows, cols)
        left, right = (torch.linalg.qr(torch.randn(size, short, dtype=torch.float64))[0] for size in (rows, cols))
        singular = torch.logspace(0, -num_decades, short, dtype=torch.float64)
        singular = singular / singular.norm()
        exact = singular
        for a, b, c in steps_of(*preset):
            exact = a * exact + b * exact**3 + c * exact**5
        matrix = (left * singular @ right.T).float()
        found = orthogonalize(matrix, steps=steps_of(*preset), eps=1e-7, compute_dtype=dtype, method="gram").double()
        is_large = singular >= 0.01
        turned = left.T @ found @ right
        torch.testing.assert_close(turned.diag()[is_large], exact[is_large], rtol=0, atol=_ROUNDING[dtype])
        assert (turned - turned.diag().diag()).norm() / short**0.5 < _ROUNDING[dtype]


@pytest.mark.parametrize("shape", [(64, 200), (200, 64), (600, 700)], ids=str)
def test_gram_in_panels_and_batches_agrees_with_plain(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    batch, steps = torch.randn(3, *shape), steps_of("polar_express", 5)
    plain = orthogonalize(batch, steps=steps, eps=1e-7, compute_dtype=torch.float32)
    whole = orthogonalize(batch, steps=steps, eps=1e-7, compute_dtype=torch.float32, method="gram")
    alone = [orthogonalize(each, steps=steps, eps=1e-7, compute_dtype=torch.float32, method="gram") for each in batch]
    torch.testing.assert_close(whole, plain, rtol=0, atol=2e-4)
    torch.testing.assert_close(torch.stack(alone), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", _ROUNDING, ids=str)
@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("preset", [*_SAFE, ("cans", 5)], ids=str)
def test_odd_matrices_are_as_documented(preset: tuple[str, int], method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    way = NewtonSchulz(steps_of(*preset), dtype, method)  # pyright: ignore[reportArgumentType]

    def result(matrix: torch.Tensor) -> torch.Tensor:
        return way.orthogonalize(matrix, eps=1e-7)

    assert not result(torch.zeros(5, 9)).any()
    like = torch.randn(13, 7)
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
    low, high = band(way.steps, 0.9, 1.008)
    if (preset[0], method, dtype) == ("cans", "gram", torch.bfloat16):
        low = 0.3  # Rounding takes some values below the band.
    of_rank_one = [torch.randn(6, 1) @ torch.randn(1, 4), *map(torch.randn, ((1, 9), (9, 1), (1, 100_000)))]
    for matrix in (*of_rank_one, *(torch.ones(size, 2 * size) / 3 for size in (1, 3, 6, 11, 24))):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        # Negative if the update points away.
        value = u[:, 0] @ result(matrix).float() @ vh[0]
        assert low - 0.08 <= value <= high + 0.08, matrix.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_least_norm_near_zero_keeps_small_matrices(dtype: torch.dtype) -> None:
    way, like = NewtonSchulz(steps_of("jordan", 5), dtype), torch.randn(4, 6)
    scales = (1e-15, 1e15) if dtype == torch.float32 else (1e-30, 1e30)
    small, large = (way.orthogonalize(like * scale, eps=1e-38) for scale in scales)
    torch.testing.assert_close(small, large, rtol=0, atol=1e-3 if dtype == torch.float32 else 0.03)


def test_restarts_come_where_rounding_grows() -> None:
    jordan, express = steps_of("jordan", 5), steps_of("polar_express", 5)
    assert gram_restarts(jordan, torch.float32) == gram_restarts(express, torch.float32) == ()
    assert gram_restarts(jordan, torch.float16) == (3,)
    assert gram_restarts(express, torch.float16) == (2,)
    assert gram_restarts(express, torch.bfloat16) == (1, 3)


def test_flops_are_those_of_the_products() -> None:
    jordan, cubic, dtype = steps_of("jordan", 5), steps_of("cubic", 5), torch.float16
    unit = 2 * 100**3
    for cols, counts in ((100, (15, 18, 10, 13)), (400, (45, 30, 40, 25))):
        ways = [NewtonSchulz(steps, dtype, method) for steps in (jordan, cubic) for method in ("plain", "gram")]
        assert [way.flops(100, cols) / unit for way in ways] == list(counts)
    assert NewtonSchulz(jordan, dtype).flops(30, 20) == newton_schulz_flops(30, 20, 5)
    # With symmetric products by half.
    halved = product_flops(100, 400, symmetric=0.5)
    assert NewtonSchulz(jordan, dtype).cost(halved) / unit == 32.5
    assert NewtonSchulz(jordan, dtype, "gram").cost(halved) / unit == 19


@pytest.mark.parametrize("dtype", _ROUNDING, ids=str)
@pytest.mark.parametrize("allowed", [(0.65, 1.35), (0.95, 1.05)], ids=str)
def test_every_candidate_keeps_the_promise(allowed: tuple[float, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ways, rounding = candidates(allowed, dtype), _ROUNDING[dtype]
    assert {way.method for way in ways} == {"plain", "gram"} and len(ways) >= 6
    for num_decades in (0, 2, 4, 6):
        left, right = (torch.linalg.qr(torch.randn(size, 20, dtype=torch.float64))[0] for size in (20, 70))
        singular = torch.logspace(0, -num_decades, 20, dtype=torch.float64)
        singular = singular / singular.norm()
        matrix = (left * singular @ right.T).float()
        for way in ways:
            found = (left.T @ way.orthogonalize(matrix, eps=1e-7).double() @ right).diag()
            large = found[singular >= 0.01]
            assert allowed[0] - rounding <= large.min() and large.max() <= allowed[1] + rounding, way
            assert found.abs().max() < 1.4, way  # Nothing is promised of small ones, but they do no harm.


def test_quality_chooses_the_cheapest_that_keeps_it() -> None:
    fast, on_cpu = NewtonSchulzOptions("fast", (3.4445, -4.7750, 2.0315), 5), Arithmetic("cpu", torch.float32)
    # For singular values from 0.01 on three steps do, where the published ones need five.
    three, four = (polar_express(num_steps, 0.01) for num_steps in (3, 4))
    assert fast.choice(256, 256, on_cpu) == NewtonSchulz(three, torch.float32, "plain")
    assert fast.choice(1024, 256, on_cpu) == NewtonSchulz(three, torch.float32, "gram")
    narrow = NewtonSchulzOptions((0.95, 1.05), (3.4445, -4.7750, 2.0315), 5)
    assert narrow.choice(256, 1024, Arithmetic("cuda", torch.float32)) == NewtonSchulz(four, torch.float32, "gram")
    of_file = {"ns_quality": [0.95, 1.05], "ns_coefficients": [1.0, 2.0, 3.0], "ns_steps": 5}
    options = NewtonSchulzOptions.of({**of_file, "muon_eq": "R", "muon_plus": "row"})
    assert options == NewtonSchulzOptions((0.95, 1.05), (1.0, 2.0, 3.0), 5, "R", "row")
    choice = options.choice(256, 1024, on_cpu)
    assert (choice.steps, choice.muon_eq, choice.muon_plus) == (four, "R", "row")
    as_given = NewtonSchulzOptions("reference", (2.0, -1.5, 0.5), 3)
    assert as_given.choice(256, 1024, on_cpu) == NewtonSchulz(((2.0, -1.5, 0.5),) * 3, torch.float32)
