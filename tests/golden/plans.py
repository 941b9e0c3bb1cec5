"""Digests of the plans of all shipped shapes: which rank owns which matrix, and what travels together."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.config import MuonConfig, from_arguments
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.exchange import MeshRanks, ParameterToPlan, PlanOptions, plan_exchanges
from lightning_muon.schedule.shapes import read_shapes, shipped_shapes
from tests.golden.trainings import digest

MESHES = ((1, 8), (2, 4), (8, 8))  # Replicas x shards.


def plans() -> dict[str, str]:
    """Model and mesh -> digest of (matrix, its owners) and of the buckets, for each exchange group."""
    arithmetic, found = Arithmetic("cuda", torch.bfloat16), dict[str, str]()
    options = from_arguments(PlanOptions, vars(MuonConfig()) | {"itemsize": 2, "arithmetic": arithmetic})
    newton_schulz = NewtonSchulzOptions.of(vars(MuonConfig()))
    for name in shipped_shapes():
        trained = [each for each in read_shapes(name).parameters if each.kind != "elementwise" and not each.frozen]
        for mesh in MESHES:
            ranks = MeshRanks.of_shape(mesh)
            parameters = [
                ParameterToPlan(each, each.shape, ranks, (Replicate(), Shard(each.shard_dim)), newton_schulz)
                for each in trained
            ]
            groups = [
                (
                    [
                        (placed.spec.name, placed.spec.rows, placed.spec.cols, owners)
                        for placed, owners in zip(group.matrices, group.plan.owners, strict=True)
                    ],
                    [tuple(bucket) for bucket in group.plan.buckets],
                )
                for group in plan_exchanges(parameters, options)
            ]
            found[f"{name} {mesh[0]}x{mesh[1]}"] = digest(groups)
    return found
