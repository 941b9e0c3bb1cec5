"""Measured steps beside the steps that a calibrated cost model predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_muon.monitor.calibrate import calibrate
from lightning_muon.monitor.timeline import Recording, predict, record_step
from lightning_muon.monitor.workload import make_optimizer
from lightning_muon.params.logical import logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.shapes import ModelShapes
from lightning_muon.schedule.simulate import Timeline


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step as it ran and as it was predicted.

    Attributes:
        recording: The fastest of the steps that were recorded: other work on the machine only ever adds.
        cost: Measured just before.
        predicted: The same ops in the same order, simulated.
        measured_seconds: Duration of each recorded step.
    """

    recording: Recording
    cost: CostModel
    predicted: Timeline
    measured_seconds: tuple[float, ...]

    @property
    def measured(self) -> float:
        """Seconds of the fastest step."""
        return self.recording.timeline.makespan

    @property
    def ratio(self) -> float:
        """Predicted over measured duration."""
        return self.predicted.makespan / self.measured


def compare(
    model: ModelShapes, *, num_replicas: int, num_steps: int, options: Sequence[Mapping[str, Any]]
) -> list[Comparison]:
    """Calibrate, then record a few steps with each set of options, and predict the same.

    Collective over the default process group; every rank must call it.

    Args:
        model: Shapes of the weights, which are random.
        num_replicas: Size of the replicate axis.
        num_steps: Recorded steps for each set of options.
        options: Of :class:`~lightning_muon.ParallelMuon`.
    """
    cost = calibrate(matrix_shapes(model), num_ranks=dist.get_world_size(), num_replicas=num_replicas)
    return [_compare_one(model, num_replicas, num_steps, each, cost) for each in options]


def matrix_shapes(model: ModelShapes) -> list[tuple[int, int]]:
    """Rows and columns of every matrix that Newton-Schulz sees."""
    return [
        (matrix.rows, matrix.cols)
        for parameter in model.parameters
        if parameter.kind != "elementwise" and not parameter.frozen
        for matrix in logical_matrices(
            parameter.shape,
            Route(
                name=parameter.name,
                kind=parameter.kind,  # type: ignore[arg-type]
                reason=parameter.reason,
                splits=parameter.splits,
                split_dim=parameter.split_dim,
            ),
        )
    ]


def _compare_one(
    model: ModelShapes, num_replicas: int, num_steps: int, options: Mapping[str, Any], cost: CostModel
) -> Comparison:
    optimizer = make_optimizer(model, num_replicas=num_replicas, **options)
    optimizer.step()
    recordings = [record_step(optimizer) for _ in range(num_steps)]
    fastest = min(recordings, key=lambda recording: recording.timeline.makespan)
    device_type = optimizer.param_groups[0]["params"][0].device.type
    return Comparison(
        recording=fastest,
        cost=cost,
        predicted=predict(fastest, cost, device_type=device_type),
        measured_seconds=tuple(recording.timeline.makespan for recording in recordings),
    )
