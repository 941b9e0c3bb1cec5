"""FlexDeMo on 1 to 4 ranks against the float64 reference, with drawn gradients of odd shapes."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from lightning_muon import DCTTopK, Full, Random, Replicator, Slicing, Striding
from lightning_muon.flexdemo.replicators import ExchangeStep
from tests.distributed.flexdemo.setup import (
    MATRICES,
    MESHES,
    SHAPES,
    SMALL,
    Case,
    assert_close,
    assert_mostly_close,
    reference,
    train,
)
from tests.reference.flexdemo import Choice, ReferenceFlexDeMo, Rules
from tests.reference.muon import muon_plus
from tests.support import family
from tests.support.processes import ProcessPool

# float32 against float64: a coefficient is a sum of up to 64 products of size 3, off by 64 * 3 * 2^-24 = 1e-5 at most
# and 1e-6 typically; the residual keeps such errors for some steps, and a step moves weights by lr = 0.01 of an update.
EXACT = 1e-5
TOP_K: dict[str, Any] = {"chunk_size": 8, "top_k": 5}
PERIOD = 4
OF_CASE = ("missing", "missing_from", "frozen", "dtype", "plain", "num_steps", "seed")
OF_RULES = ("base", "sign", "merge", "decay", "weight_decay", "value_format", "lr")


def _case(mesh_shape: tuple[int, int], **options: Any) -> Case:
    fields = {key: options.pop(key) for key in OF_CASE if key in options}
    defaults = {"replicator": DCTTopK(**TOP_K), "value_format": "fp32", "sign": False}
    return Case(mesh_shape=mesh_shape, options=SMALL | defaults | options, **fields)


def _reference(case: Case, *, rules: dict[str, Any] | None = None, **options: Any) -> ReferenceFlexDeMo:
    """The reference for the same options; ``rules`` says what the replicator is."""
    shared = {key: case.options[key] for key in OF_RULES if key in case.options}
    num_nodes, ranks_per_node = case.mesh_shape
    own = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node, "dense_below": 16}
    return reference(case, Rules(**(own | shared | (TOP_K if rules is None else rules))), **options)


def _check(
    gloo: ProcessPool, case: Case, expected: ReferenceFlexDeMo, close: Callable[..., None] | None = None
) -> None:
    """Weights and every node's residuals."""
    close = close or (lambda found, wanted: assert_close(found, wanted, EXACT))
    trained = [name for name in expected.weights if name not in case.frozen]
    for weights, residuals in gloo.run(train, case, world_size=case.world_size):
        close(weights, expected.weights)
        for node in range(case.mesh_shape[0]):
            # Not multiplied by lr, so that an error shows a hundred times larger.
            close(
                {name: residuals[name][node] for name in trained},
                {name: expected.residual(name, node) for name in trained},
            )


@pytest.mark.parametrize(
    ("mesh_shape", "merge"), list(zip(MESHES, cycle(["contributors", "mean"]), strict=False)), ids=str
)
def test_largest_coefficients_train_as_the_reference(
    gloo: ProcessPool, mesh_shape: tuple[int, int], merge: str
) -> None:
    case = _case(mesh_shape, merge=merge, weight_decay=0.1, seed=1)
    _check(gloo, case, _reference(case))


MISSING = {1: ("odd", "bias", "scalar"), 2: ("odd", "prime")}
UNUSED = dict.fromkeys(range(3), ("odd", "bias"))


@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [
        ((2, 2), {"sign": True}),
        ((3, 1), {"base": "adamw"}),
        ((2, 2), {"decay": 0.5}),
        ((3, 1), {"plain": True}),
        ((2, 2), {"frozen": ("prime", "scalar"), "missing": UNUSED, "missing_from": 1}),
        # A gradient of some nodes is zero on the others.
        ((2, 2), {"merge": "mean", "missing": MISSING}),
        ((3, 1), {"merge": "contributors", "missing": MISSING}),
        ((2, 2), {"merge": "contributors", "missing": MISSING, "missing_from": 1}),
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_one_process(
    gloo: ProcessPool, mesh_shape: tuple[int, int], options: dict[str, Any]
) -> None:
    case = _case(mesh_shape, weight_decay=0.1, seed=2, **options)
    _check(gloo, case, _reference(case))


@pytest.mark.filterwarnings("ignore:.*routed to Muon by their shape")
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 1)], ids=str)
def test_muon_orthogonalizes_whole_merged_matrices(gloo: ProcessPool, mesh_shape: tuple[int, int]) -> None:
    options = {"base": "muon", "compute_dtype": "float32", "wire_dtype": "float32"}
    case = _case(mesh_shape, weight_decay=0.1, seed=3, **options)
    _check(gloo, case, _reference(case, matrices=MATRICES))
    case = _case(mesh_shape, weight_decay=0.1, seed=4, orthogonalize=family.muon_plus, **options)
    _check(gloo, case, _reference(case, rules=TOP_K | {"orthogonalization": muon_plus}, matrices=MATRICES))


def test_blocks_of_64_cover_weights_of_prime_sizes(gloo: ProcessPool) -> None:
    case = _case((2, 2), replicator=DCTTopK(chunk_size=64, top_k=32), seed=4)
    _check(gloo, case, _reference(case, rules={"chunk_size": 64, "top_k": 32}))


@pytest.mark.parametrize(
    ("mesh_shape", "value_format"), [((2, 2), "bf16"), ((3, 1), "int8"), ((2, 2), "sign")], ids=str
)
def test_the_residual_keeps_what_rounding_lost(
    gloo: ProcessPool, mesh_shape: tuple[int, int], value_format: str
) -> None:
    case = _case(mesh_shape, value_format=value_format, seed=5)

    def close(found: Any, expected: Any) -> None:
        # A value that lies between two roundings, to 2^-24, may go one way in float32 and the other in float64: then
        # the elements of its block are off by up to 2^-8 of a coefficient of size 10.
        assert_mostly_close(found, expected, EXACT, bound=0.05)

    _check(gloo, case, _reference(case), close)


def _drawn(numel: int, step: int, part: int) -> list[int]:
    """Which elements Random draws; that all nodes draw the same, and all elements, is tested elsewhere."""
    elements = torch.arange(numel, dtype=torch.float32)[None]
    return Random(rate=1 / PERIOD, seed=3).encode(elements, ExchangeStep(step, part)).values[0].long().tolist()


FLAT: list[tuple[Replicator, Choice]] = [
    (Random(rate=1 / PERIOD, seed=3), _drawn),
    (Striding(rate=1 / PERIOD), lambda numel, step, part: range(step % PERIOD, numel, PERIOD)),
    (
        Slicing(rate=1 / PERIOD),
        lambda numel, step, part: range(step % PERIOD * numel // PERIOD, (step % PERIOD + 1) * numel // PERIOD),
    ),
    (Full(), lambda numel, step, part: range(numel)),
]


@pytest.mark.parametrize(
    ("mesh_shape", "replicator", "choose"),
    [(mesh_shape, *flat) for mesh_shape, flat in zip([(2, 2), (4, 1), (3, 1), (2, 2)], FLAT, strict=True)],
    ids=lambda value: type(value).__name__ if isinstance(value, Replicator) else "",
)
def test_shared_indices_train_as_the_reference(
    gloo: ProcessPool, mesh_shape: tuple[int, int], replicator: Replicator, choose: Choice
) -> None:
    case = _case(mesh_shape, replicator=replicator, num_steps=5, seed=6)
    # One buffer for all, in the order in which backward finishes them.
    travel = [name for name in reversed(SHAPES) if len(SHAPES[name]) > 1 and torch.Size(SHAPES[name]).numel() >= 16]
    _check(gloo, case, _reference(case, rules={"choose": choose}, parts=[travel]))


def test_weights_in_bfloat16_have_exact_residuals(gloo: ProcessPool) -> None:
    case = _case((2, 2), dtype=torch.bfloat16, lr=1.0, seed=10)
    expected = _reference(case)
    for weights, residuals in gloo.run(train, case, world_size=case.world_size):
        for node in range(2):
            found = {name: residual[node] for name, residual in residuals.items()}
            assert_close(found, {name: expected.residual(name, node) for name in found}, EXACT)
        # Weights and updates of up to 16 are rounded to 8 bits, three times: 3 * 2 * 2^-5.
        assert_close(weights, expected.weights, 0.19)
