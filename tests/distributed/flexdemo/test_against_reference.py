"""FlexDeMo on 1 to 4 ranks against the float64 reference, with drawn gradients of odd shapes."""

from itertools import cycle
from typing import Any

import pytest
import torch

from lightning_muon import DCTTopK, Full, Random, Slicing, Striding
from lightning_muon.flexdemo.replicators import ExchangeStep
from tests.distributed.flexdemo.setup import MATRICES, SHAPES, Case, assert_close, assert_mostly_close, reference, train
from tests.reference.flexdemo import Choice, ReferenceFlexDeMo, Rules
from tests.reference.muon import muon_plus
from tests.support import family
from tests.support.processes import ProcessPool

# float32 against float64: a coefficient is a sum of up to 64 products of size 3, off by 64 * 3 * 2^-24 = 1e-5 at most
# and 1e-6 typically; the residual keeps such errors for some steps, and a step moves weights by lr = 0.01 of an update.
EXACT = 1e-5
PERIOD = 4
OF_CASE = ("missing", "missing_from", "frozen", "dtype", "plain", "num_steps", "seed")
OF_RULES = ("base", "sign", "merge", "decay", "weight_decay", "value_format", "lr")


def _drawn(numel: int, step: int, part: int) -> list[int]:
    """Which elements Random draws; that all nodes draw the same, and all elements, is tested elsewhere."""
    elements = torch.arange(numel, dtype=torch.float32)[None]
    return Random(rate=1 / PERIOD, seed=3).encode(elements, ExchangeStep(step, part)).values[0].long().tolist()


SQUARES, STRIPS = DCTTopK(chunk_size=8, top_k=5), DCTTopK(chunk_size=16, top_k=3, strips=True)
RANDOM, STRIDING, SLICING = Random(rate=1 / PERIOD, seed=3), Striding(rate=1 / PERIOD), Slicing(rate=1 / PERIOD)
CHOICES: dict[Any, Choice] = {
    RANDOM: _drawn,
    STRIDING: lambda numel, step, part: range(step % PERIOD, numel, PERIOD),
    SLICING: lambda numel, step, _: range(step % PERIOD * numel // PERIOD, (step % PERIOD + 1) * numel // PERIOD),
    Full(): lambda numel, step, part: range(numel),
}


def _case(mesh_shape: tuple[int, int], **options: Any) -> Case:
    fields = {key: options.pop(key) for key in OF_CASE if key in options}
    # Chunks smaller than most of the weights, and nearly all weights compressed.
    defaults = {"replicator": SQUARES, "value_format": "fp32", "sign": False, "dense_below": 16}
    return Case(mesh_shape=mesh_shape, options=defaults | options, **fields)


def _reference(case: Case) -> ReferenceFlexDeMo:
    options = case.options
    rules = {key: options[key] for key in OF_RULES if key in options}
    num_nodes, ranks_per_node = case.mesh_shape
    rules |= {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node, "dense_below": 16}
    rules |= {"orthogonalization": muon_plus} if "orthogonalize" in options else {}
    choice = CHOICES.get(options["replicator"])
    rules |= {"choose": choice} if choice else vars(options["replicator"])
    # Those that are not dense, in the order in which backward finishes them: in one bucket, or each in its own.
    flat = [name for name in reversed(SHAPES) if len(SHAPES[name]) > 1 and torch.Size(SHAPES[name]).numel() >= 16]
    parts = [[name] for name in flat] if "bucket_bytes" in options else [flat]
    matrices = MATRICES if options.get("base") == "muon" else ()
    return reference(case, Rules(**rules), parts=parts if choice else (), matrices=matrices)


MISSING = {1: ("odd", "bias", "scalar"), 2: ("odd", "prime")}
UNUSED: dict[str, Any] = {"missing": dict.fromkeys(range(3), ("odd", "bias")), "missing_from": 1}
MUON = {"base": "muon", "weight_decay": 0.1, "compute_dtype": "float32", "wire_dtype": "float32"}
MESHES = zip([(2, 1), (2, 2), (4, 1), (3, 1), (1, 2), (1, 1)], cycle(["contributors", "mean"]), strict=False)


@pytest.mark.filterwarnings("ignore:.*routed to Muon by their shape")
@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [
        *((mesh_shape, {"merge": merge, "weight_decay": 0.1}) for mesh_shape, merge in MESHES),
        ((2, 2), {"replicator": STRIPS}),
        ((2, 2), {"replicator": DCTTopK(chunk_size=64, top_k=32)}),
        # Each in a bucket of its own, some of which are empty on one rank of a node.
        ((2, 2), {"bucket_bytes": 4}),
        ((2, 2), {"replicator": RANDOM, "num_steps": 5}),
        ((4, 1), {"replicator": STRIDING, "num_steps": 5}),
        ((3, 1), {"replicator": STRIDING, "bucket_bytes": 4, "base": "adamw", "weight_decay": 0.1}),
        ((3, 1), {"replicator": SLICING, "num_steps": 5, "missing": MISSING}),
        ((2, 2), {"replicator": Full(), "frozen": ("prime", "scalar")} | UNUSED),
        ((2, 2), {"replicator": Full()} | MUON),
        ((2, 2), {"sign": True, "decay": 0.5}),
        ((3, 1), {"base": "adamw", "plain": True, "weight_decay": 0.1}),
        ((2, 2), {"frozen": ("prime", "scalar")} | UNUSED),
        # A gradient of some nodes is zero on the others.
        ((2, 2), {"merge": "mean", "missing": MISSING}),
        ((3, 1), {"merge": "contributors", "missing": MISSING}),
        ((2, 2), {"merge": "contributors", "missing": MISSING, "missing_from": 1}),
        ((2, 2), MUON),
        ((3, 1), MUON),
        ((2, 2), {"orthogonalize": family.muon_plus} | MUON),
        # bfloat16: values; values that are summed on the way; weights.
        ((2, 2), {"value_format": "bf16"}),
        ((3, 1), {"value_format": "bf16", "replicator": Full(), "decay": 1.0}),
        ((2, 2), {"dtype": torch.bfloat16, "lr": 1.0}),
    ],
)
def test_nodes_train_as_in_one_process(gloo: ProcessPool, mesh_shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Weights, which are equal on all nodes after each step, and every node's residuals."""
    case = _case(mesh_shape, **options)
    expected = _reference(case)
    trained = [name for name in expected.weights if name not in case.frozen]
    for weights, residuals in gloo.run(train, case, world_size=case.world_size):
        for node in range(mesh_shape[0]):
            found = {name: residuals[name][node] for name in trained}
            wanted = {name: expected.residual(name, node) for name in trained}
            if case.options["value_format"] == "fp32":
                # Not multiplied by lr, so that an error shows a hundred times larger.
                assert_close(found, wanted, EXACT)
            else:
                # A value that lies between two roundings, to 2^-24, may go one way in float32 and the other in
                # float64: then the elements of its block are off by up to 2^-8 of a coefficient of size 10.
                assert_mostly_close(found, wanted, EXACT, bound=0.05)
        # Weights and updates of up to 16 are rounded to 8 bits, three times: 3 * 2 * 2^-5. Else a step moves weights by
        # lr = 0.01 of an update, which is rounded to 8 bits where values are summed on the way: 3 * 0.01 * 2^-8 * 4.
        tolerance = {torch.bfloat16: 0.19}.get(case.dtype, EXACT if case.options["value_format"] == "fp32" else 5e-4)
        assert_close(weights, expected.weights, tolerance)
