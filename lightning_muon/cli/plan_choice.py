"""Which of the compared strategies a config runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lightning_muon.cli.plan_specs import ExchangeRanks, Mesh
from lightning_muon.cli.plan_strategies import GRID, PIPELINE
from lightning_muon.config import MuonConfig
from lightning_muon.schedule.estimates import sharing_pays

_ITEMSIZES = {"auto": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a config says of owners and transfers.

    Attributes:
        assignment: Of the config.
        overlap: Of the config.
        dedupe: Of the config.
        num_matrices: Of the model.
        num_shared: Matrices that have one owner for all replicas; None where there are no replicas.
        row: The strategy of the tables that is the same, or None.
    """

    assignment: str
    overlap: str
    dedupe: str
    num_matrices: int
    num_shared: int | None
    row: str | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """One or two lines."""
        shared = (
            f"dedupe={self.dedupe} (replicas share {self.num_shared} of {self.num_matrices} matrices)"
            if self.num_shared is not None
            else f"dedupe={self.dedupe} (no replicas)"
        )
        which = f"the row {self.row!r} (*)" if self.row is not None else "none of these rows"
        return f"The config has assignment={self.assignment}, overlap={self.overlap}, {shared}: {which}."


def wire_itemsize(optimizer: MuonConfig) -> int:
    """Bytes of an element that travels, on CUDA, where ``"auto"`` is bfloat16."""
    dtype = optimizer.wire_dtype if optimizer.wire_dtype != "auto" else optimizer.compute_dtype
    return _ITEMSIZES[dtype]


def choice_of(optimizer: MuonConfig, ranks: ExchangeRanks, mesh: Mesh, *, itemsize: int) -> Choice:
    """What the config runs on this mesh.

    Args:
        optimizer: Options.
        ranks: With all matrices.
        mesh: Sizes.
        itemsize: Bytes of an element that travels.
    """
    num_shared = _num_shared(optimizer, ranks, mesh, itemsize) if mesh.replicate > 1 else None
    return Choice(
        assignment=optimizer.assignment,
        overlap=optimizer.overlap,
        dedupe=optimizer.dedupe,
        num_matrices=len(ranks.specs),
        num_shared=num_shared,
        row=_row(optimizer, mesh, num_shared, len(ranks.specs)),
    )


def _num_shared(optimizer: MuonConfig, ranks: ExchangeRanks, mesh: Mesh, itemsize: int) -> int:
    if optimizer.dedupe != "auto":
        return len(ranks.specs) if optimizer.dedupe == "always" else 0
    return sum(
        sharing_pays(
            spec.flops,
            spec.numel * itemsize,
            device_type="cuda",
            num_matrices=len(ranks.specs),
            num_replicas=mesh.replicate,
            replica_ranks=mesh.shard,
        )
        for spec in ranks.specs
    )


def _row(optimizer: MuonConfig, mesh: Mesh, num_shared: int | None, num_matrices: int) -> str | None:
    is_serial = optimizer.overlap == "off"
    if num_shared is not None and mesh.shard == 1:
        # Replicas that do not share compute everything; the other rows share it.
        if num_shared == 0:
            return "redundant"
        if num_shared < num_matrices:
            return None
    elif num_shared:
        is_grid = num_shared == num_matrices and optimizer.assignment == "lpt" and not is_serial
        return GRID if is_grid else None
    if optimizer.assignment == "lpt":
        return "lpt" if is_serial else PIPELINE
    if optimizer.assignment == "round_robin":
        return "round_robin" if is_serial else None
    return None if is_serial else "redundant"
