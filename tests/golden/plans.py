"""Digests of the plans of all shipped shapes: which rank owns which matrix, and what travels together."""

from __future__ import annotations

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import Setting, exchange_groups
from lightning_muon.params.shapes import read_shapes, shipped_shapes
from lightning_muon.schedule.cost import PRESETS
from tests.golden.trainings import digest

MESHES = ((1, 8), (2, 4), (8, 8))  # Replicas x shards.


def plans() -> dict[str, str]:
    """Model and mesh -> digest of (matrix, its owners) and of the buckets, for each exchange group."""
    found = dict[str, str]()
    for name in shipped_shapes():
        setting = Setting(model=read_shapes(name), cost=PRESETS["reference"])
        for mesh in MESHES:
            groups = [
                ([(each.name, each.rows, each.cols, (each.owner,)) for each in group.matrices], list(group.buckets))
                for group in exchange_groups(setting, Mesh(*mesh), setting.config.dedupe)
            ]
            found[f"{name} {mesh[0]}x{mesh[1]}"] = digest(groups)
    return found
