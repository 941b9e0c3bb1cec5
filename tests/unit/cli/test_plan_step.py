"""An optimizer step planned from shapes; tests/golden and tests/distributed/test_step_plan.py compare its owners."""

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import IN_REPLICAS, Setting, SimulatedStep, planned_steps
from lightning_muon.config import MuonConfig
from lightning_muon.params.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.cost import PRESETS
from tests.reference.muon import newton_schulz_flops

_NUMEL = 256 * 128


def _plan(shapes: Sequence[ParameterShape], replicate: int, shard: int, **options: Any) -> dict[str, SimulatedStep]:
    model = ModelShapes(name="model", source="", parameters=tuple(shapes))
    config = MuonConfig(bucket_bytes=2**16, **options)
    return planned_steps(Setting(model=model, cost=PRESETS["reference"], config=config), Mesh(replicate, shard))


def _matrices(count: int, shape: tuple[int, ...] = (256, 128)) -> list[ParameterShape]:
    kind = "matrix" if len(shape) == 2 else "stack"
    bias = ParameterShape(name="bias", shape=(64,), kind="elementwise")
    return [*(ParameterShape(name=f"m.{i}", shape=shape, kind=kind) for i in range(count)), bias]


def _moved(step: SimulatedStep) -> dict[tuple[str, str], int]:
    """Bytes by direction and axis."""
    return {(direction, axis.split()[0]): total for direction, axis, _, total in step.moved()}


def test_experts_on_one_rank_stay_there() -> None:
    (step,) = _plan(_matrices(3, (4, 256, 128)), 1, 2).values()
    assert [each.owner for each in step.plan.matrices] == [0, 0, 1, 1] * 3 and not _moved(step)
    with pytest.raises(ValueError, match="model has no matrices that are trained"):
        _plan(_matrices(0), 1, 2)


def test_options_of_the_config_count() -> None:
    frozen = ParameterShape(name="frozen", shape=(10, 4), kind="matrix", frozen=True)
    fused = ParameterShape(name="fused", shape=(12, 4), kind="matrix", splits=(4, 8))
    (step,) = _plan([frozen, fused], 1, 4, ns_steps=3).values()
    assert [(matrix.rows, matrix.cols, matrix.flops) for matrix in step.plan.matrices] == [
        (rows, 4, newton_schulz_flops(rows, 4, 3)) for rows in (4, 8)
    ]
    hidden, serial = (_plan(_matrices(64), 1, 4, overlap=overlap)[IN_REPLICAS].timeline for overlap in ("step", "off"))
    assert serial.hidden == pytest.approx(0, abs=1e-9) and serial.makespan > hidden.makespan
    (wide,) = _plan(_matrices(4), 1, 2, wire_dtype="float32").values()
    assert _moved(wide)["gather", "within"] == 4 * _NUMEL // 2 * 4
