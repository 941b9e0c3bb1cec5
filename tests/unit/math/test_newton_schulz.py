"""Newton-Schulz against torch's own and against the singular value decomposition."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_muon.config import MuonConfig, NsMethod
from lightning_muon.math import symmetric
from lightning_muon.math.newton_schulz import newton_schulz_flops, orthogonalize, worth_batching
from tests.reference.muon import orthogonalized

OPTIONS = {"steps": (MuonConfig.ns_coefficients,) * 5, "eps": 1e-7}
SHAPES = [(13, 7), (64, 64), (3, 200), (1, 9), (200, 3), (1, 1)]
# From a short side of 512 on symmetric products are computed by panels of 192 rows; the last one may be lower.
PANELED = [(512, 512), (600, 512), (512, 640), (577, 700), (900, 769)]


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


@pytest.mark.parametrize("shape", [(40, 40), (20, 90), (90, 20)], ids=str)
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    rank = min(shape)
    singular = torch.linspace(0.05, 1.0, rank)
    result = orthogonalize(u @ singular.diag() @ vh, compute_dtype=torch.float32, **OPTIONS)
    found = u.T @ result @ vh.T
    # Off-diagonal entries are rounding only; the polynomial maps [0.01, 1] into [0.68, 1.21] after five steps.
    assert (found - found.diag().diag()).abs().max() < 1e-4
    assert found.diag().min() > 0.65 and found.diag().max() < 1.25


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


def test_a_batch_of_small_matrices_gives_each_its_own_result() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 8, 5)
    result = orthogonalize(batch, compute_dtype=torch.float32, **OPTIONS)
    assert not worth_batching(8, 5, "cpu")
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)):
        alone = orthogonalize(batch[tuple(index)], compute_dtype=torch.float32, **OPTIONS)
        # The batched product of matrices as small as these adds in another order.
        torch.testing.assert_close(result[tuple(index)], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "cols", "device_type", "expected"),
    [
        (128, 128, "cpu", True),
        (4096, 256, "cpu", True),
        (512, 512, "cpu", False),
        (1024, 4096, "cuda", True),
        (2048, 2048, "cuda", False),
        (128, 128, "mps", False),
    ],
)
def test_small_matrices_are_worth_batching(rows: int, cols: int, device_type: str, expected: bool) -> None:
    assert worth_batching(rows, cols, device_type) == worth_batching(cols, rows, device_type) == expected


def test_a_zero_matrix_stays_zero_and_the_input_is_not_changed() -> None:
    zero = torch.zeros(4, 6)
    assert not orthogonalize(zero, compute_dtype=torch.float32, **OPTIONS).any()
    matrix = torch.randn(4, 6)
    before = matrix.clone()
    orthogonalize(matrix, compute_dtype=torch.float32, **OPTIONS)
    assert torch.equal(matrix, before)


def test_flops_are_counted_per_product() -> None:
    # rows 2, cols 3: gram 2*2*2*3, square 2*2*2*2, last product 2*2*2*3, once.
    assert newton_schulz_flops(2, 3, 1) == newton_schulz_flops(3, 2, 1) == 24 + 16 + 24
    assert newton_schulz_flops(2, 3, 5) == 5 * 64


class _NewMemory(TorchDispatchMode):
    """Counts tensors whose memory is that of none of the arguments."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {each.untyped_storage().data_ptr() for each in tree_leaves(tree) if isinstance(each, Tensor)}
            for tree in ((args, kwargs), result)
        )
        self.count += len(made - given)
        return result


@pytest.mark.parametrize("method", ["plain", "gram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 40, 24), (130, 150), (150, 130)], ids=str)
def test_the_loop_allocates_nothing(shape: tuple[int, ...], dtype: torch.dtype, method: NsMethod) -> None:
    matrix = torch.randn(shape)
    with mock.patch.dict(symmetric._LEAST_PANELED, cpu=128), mock.patch.dict(symmetric._PANEL_ROWS, cpu=48):
        for a, b, c in (MuonConfig.ns_coefficients, (1.5, -0.5, 0.0)):
            counts: list[int] = []
            for num_steps in (1, 3, 8):
                with _NewMemory() as memory:
                    orthogonalize(matrix, steps=((a, b, c),) * num_steps, eps=1e-7, compute_dtype=dtype, method=method)
                counts.append(memory.count)
            assert counts[0] == counts[1] == counts[2] > 3, "tensors for 1, 3 and 8 steps"
