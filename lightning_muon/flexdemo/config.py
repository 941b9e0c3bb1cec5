"""Every option of FlexDeMo and its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import override

from lightning_muon.config import (
    MuonConfig,
    OptimizerConfig,
    OptimizerOptions,
    check_number,
    check_one_of,
    check_whole,
    from_arguments,
    takes_options,
)
from lightning_muon.flexdemo.replicators import DCTTopK, LocalSteps, Replicator, check_replicator

# Of matrices with base="muon" over AdamW's rate; docs/performance.md, losses with FlexDeMo.
MEASURED_FLEXDEMO_LR_FACTOR = 6.0
Base = Literal["sgd", "adamw", "muon"]
Merge = Literal["contributors", "mean"]
ValueFormat = Literal["fp32", "bf16"]


@takes_options()
@dataclass(frozen=True, kw_only=True)
class FlexDeMoConfig(OptimizerConfig):
    """Hyper-parameters and execution options of :class:`lightning_muon.FlexDeMo`.

    Patterns, fused weights and the options of Newton-Schulz count with ``base="muon"``, ``momentum`` and ``nesterov``
    only where the nodes then train by themselves. ``wire_dtype`` is that of what travels inside a node.

    Args:
        base: What applies the merged update: ``"muon"`` (Newton-Schulz for matrices, without a second momentum; AdamW
            for the rest), ``"adamw"`` (its moments follow the update), or ``"sgd"``. Where nodes train by themselves
            (``DiLoCo``, ``NoReplication``) it is the optimizer inside of each node, with all of its state.
        replicator: Chooses what the nodes send each other; see :mod:`lightning_muon.flexdemo.replicators`. ``"auto"``
            becomes ``DCTTopK(strips=True, top_k=4)``.
        decay: Factor on the residual, the part of the momentum that was not sent, in each step.
        sign: Apply the sign of the merged update. ``"auto"``: with ``base="sgd"``, as in DeMo.
        merge: A coefficient is divided by the number of the nodes that sent it (``"contributors"``, as in DeMo), or
            by the number of all nodes (``"mean"``).
        value_format: Format of the values that are sent; rounding errors stay in the residual.
        dense_below: Parameters with fewer elements than this, and those with less than two dimensions, travel whole.
        check_every: After so many steps all nodes compare their weights; 0 never.
        bucket_bytes: Size of a bucket: parameters (4 bytes for each element) that travel in one message.
    """

    base: Base = "muon"
    replicator: Replicator | LocalSteps | Literal["auto"] = "auto"
    decay: float = 0.999
    sign: bool | Literal["auto"] = "auto"
    merge: Merge = "contributors"
    weight_decay: float = 0.0
    value_format: ValueFormat = "bf16"
    dense_below: int = 4096
    check_every: int = 100
    bucket_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, allowed in (("base", Base), ("merge", Merge), ("value_format", ValueFormat)):
            check_one_of(key, getattr(self, key), get_args(allowed))
        for key, smallest in (("dense_below", 0), ("check_every", 0), ("bucket_bytes", 4)):
            check_whole(key, getattr(self, key), at_least=smallest)
        if self.sign not in (True, False, "auto"):
            raise ValueError(f"sign must be True, False or 'auto', got {self.sign!r}")
        check_number("decay", self.decay)
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if self.replicator == "auto":  # Not the default itself, whose options Lightning's files would add to theirs.
            object.__setattr__(self, "replicator", DCTTopK(strips=True, top_k=4))
        if not isinstance(self.replicator, Replicator | LocalSteps):
            raise TypeError(f"replicator must be a Replicator, such as DCTTopK(top_k=8), got {self.replicator!r}")
        without_meaning: dict[str, str] = {}
        if isinstance(self.replicator, Replicator):
            check_replicator(self.replicator)
        else:
            reason = f"means nothing with {self.replicator}, which exchanges no momenta; remove it"
            without_meaning["value_format"] = reason
        if not self.has_inner_momentum:
            reason = (
                "is of base='muon' in nodes that train by themselves (DiLoCo, NoReplication), got "
                f"base={self.base!r} and {self.replicator}; the momentum that is exchanged has decay=..., remove it"
            )
            without_meaning |= dict.fromkeys(("momentum", "nesterov"), reason)
        for key, reason in without_meaning.items():
            if getattr(self, key) != getattr(type(self), key):
                raise ValueError(f"{key}={getattr(self, key)!r} {reason}")

    @property
    @override
    def measured_lr_factor(self) -> float:
        if self.has_inner_momentum:  # Nodes that train by themselves, each with a whole ParallelMuon.
            return super().measured_lr_factor
        return MEASURED_FLEXDEMO_LR_FACTOR if self.base == "muon" else 1.0

    @property
    def has_inner_momentum(self) -> bool:
        """Whether matrices keep a moving average of their gradients in each node, as in ParallelMuon."""
        return self.base == "muon" and isinstance(self.replicator, LocalSteps)

    @property
    def takes_sign(self) -> bool:
        """Whether the sign of the merged update is applied."""
        return self.base == "sgd" if self.sign == "auto" else self.sign

    @property
    def inside_nodes(self) -> MuonConfig:
        """Options of what the ranks of a node do together: Newton-Schulz with one owner in each node."""
        # With one owner for several nodes, whole matrices would be sent between them. The buckets of this config are
        # those that nodes exchange.
        own = {"dedupe": "never", "bucket_bytes": MuonConfig.bucket_bytes}
        return from_arguments(MuonConfig, {**vars(self), **own})


class FlexDeMoOptions(OptimizerOptions, total=False):
    """The fields of :class:`FlexDeMoConfig` that FlexDeMo takes as ``**options``, for editors."""

    base: Base
    replicator: Replicator | LocalSteps | Literal["auto"]
    decay: float
    sign: bool | Literal["auto"]
    merge: Merge
    weight_decay: float
    value_format: ValueFormat
    dense_below: int
    check_every: int
    bucket_bytes: int
    momentum: float
