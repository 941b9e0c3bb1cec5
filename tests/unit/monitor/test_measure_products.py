"""What products of Newton-Schulz cost here, measured."""

from functools import partial

import torch

from lightning_muon.math.methods import Arithmetic, NewtonSchulzOptions
from lightning_muon.math.product_costs import Variant
from lightning_muon.monitor.measure_products import fastest, measure_costs, model_matrices
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape


def test_each_product_of_each_shape_is_measured() -> None:
    dtypes = (torch.float32, torch.bfloat16)
    costs = measure_costs([(40, 24), (3, 5)], torch.device("cpu"), seconds=0.01, dtypes=dtypes)
    for shape in ((40, 24), (3, 5)):
        for dtype in dtypes:
            found = costs.of(*shape, Variant(dtype))
            assert found is not None and list(found) == ["gram", "square", "symmetric", "whole"]
            assert all(0 < seconds < 1 for seconds in found.values())
            assert costs.of(*shape, Variant(dtype, by_kernel=True)) is None
    choice = NewtonSchulzOptions("fast", "jordan", 5).choice(40, 24, Arithmetic("cpu", torch.float32, costs))
    assert choice.dtype == torch.float32


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    candidates = {name: partial(calls.append, name) for name in ("a", "b")}
    found = fastest(candidates, 0.0, torch.device("cpu"), least_rounds=3)
    assert calls == ["a", "b"] * 3 and all(0 < seconds < 1 for seconds in found.values())


def test_the_matrices_of_a_model_are_each_measured_once() -> None:
    kinds = {"w": "matrix", "v": "matrix", "q": "matrix", "b": "elementwise", "f": "matrix"}
    shapes = {"w": (8, 4), "v": (8, 4), "q": (6, 4), "b": (8, 9), "f": (2, 2)}
    parameters = tuple(
        ParameterShape(
            name=name, shape=shapes[name], kind=kind, frozen=name == "f", splits=(3, 3) if name == "q" else ()
        )
        for name, kind in kinds.items()
    )
    assert model_matrices(ModelShapes(name="m", source="", parameters=parameters)) == [(3, 4), (8, 4)]
