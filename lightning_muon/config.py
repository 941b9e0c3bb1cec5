"""Frozen dataclasses with every option and its default: the one list for Python, YAML and command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

AdjustLr = Literal["original", "match_rms_adamw"]
Algorithm = Literal["auto", "muon", "adamw"]
DtypeName = Literal["auto", "float32", "bfloat16"]
Assignment = Literal["lpt", "round_robin", "redundant"]
Dedupe = Literal["auto", "always", "never"]
Overlap = Literal["backward", "step", "off"]


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Hyper-parameters and execution options of :class:`lightning_muon.ParallelMuon`.

    The first block has the names and defaults of ``torch.optim.Muon``, but for ``adjust_lr_fn``: ``match_rms_adamw``
    lets a learning rate that was tuned for AdamW carry over (Liu et al. 2025, arXiv:2502.16982, section 2.2).

    Args:
        lr: Learning rate, per optimizer step.
        weight_decay: Decoupled weight decay; a step multiplies the weights by ``1 - lr * weight_decay``.
        momentum: Decay of the exponential moving average of the gradients.
        nesterov: Orthogonalize the look-ahead ``lerp(grad, momentum_buffer, momentum)``, not the buffer itself.
        ns_coefficients: ``(a, b, c)`` of the quintic Newton-Schulz polynomial (https://kellerjordan.github.io/posts/muon).
        eps: Lower bound of the Frobenius norm by which a matrix is divided before Newton-Schulz.
        ns_steps: Number of Newton-Schulz iterations.
        adjust_lr_fn: ``"original"`` scales by ``sqrt(max(1, rows / cols))``, ``"match_rms_adamw"`` by
            ``0.2 * sqrt(max(rows, cols))``.
        betas: Decay rates of AdamW, for the parameters that are no matrices.
        adamw_eps: Denominator term of AdamW.
        adamw_patterns: Shell patterns of qualified names that AdamW takes whatever their type.
        muon_patterns: Shell patterns of qualified names that Muon takes whatever their type.
        fused: Pattern of a fused weight -> number of equal parts, or the sizes of the parts (Q, K, V); every part is
            orthogonalized on its own.
        compute_dtype: Of Newton-Schulz. ``"auto"``: bfloat16 where the device multiplies it faster, else float32.
        wire_dtype: Of the matrices and updates that travel between ranks. ``"auto"``: the compute dtype.
        chunk_bytes: How many bytes of a chunk, the matrices that travel together, a rank owns on average; a chunk has
            at least one matrix for each rank, however large.
        assignment: How matrices get their owners. ``"lpt"``: longest first to the least loaded rank. ``"round_robin"``:
            in turn. ``"redundant"``: every rank gathers and computes all of them.
        dedupe: Where parameters are replicated (hybrid sharding, DDP): ``"always"`` one owner for all replicas,
            ``"never"`` one in each, ``"auto"`` by the FLOPs that it saves and the bytes that it costs, per matrix.
        overlap: ``"backward"``: the gathers start while backward still runs, ``"step"``: they hide behind the
            arithmetic of the step, ``"off"``: one after the other. The weights are the same, bit for bit.
        look_ahead: Chunks that are gathered or on their way at a time during the step.
        error_if_nonfinite: Skip the step on all ranks, weights and state untouched, when a gradient has a NaN or Inf.
        max_skipped_steps: So many steps in a row are skipped; the next one raises, with the names of the parameters.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: AdjustLr = "match_rms_adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    adamw_eps: float = 1e-8
    adamw_patterns: tuple[str, ...] = ()
    muon_patterns: tuple[str, ...] = ()
    fused: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict[str, "int | tuple[int, ...]"])
    compute_dtype: DtypeName = "auto"
    wire_dtype: DtypeName = "auto"
    chunk_bytes: int = 4 * 2**20
    assignment: Assignment = "lpt"
    dedupe: Dedupe = "auto"
    overlap: Overlap = "backward"
    look_ahead: int = 3
    error_if_nonfinite: bool = True
    max_skipped_steps: int = 3

    def __post_init__(self) -> None:
        check_hyperparameters(vars(self))
        check_plan_options(vars(self))


_ADJUST_LR = ("original", "match_rms_adamw")
_ALGORITHMS = ("auto", "muon", "adamw")


def check_hyperparameters(group: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for the first hyper-parameter of a parameter group that is out of range."""
    for key in ("lr", "weight_decay", "momentum", "eps", "adamw_eps"):
        value = float(group[key])  # type: ignore[arg-type]
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{key} must be finite and >= 0, got {group[key]}")
    if float(group["momentum"]) >= 1.0:  # type: ignore[arg-type]
        raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
    betas = group["betas"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(0.0 <= float(b) < 1.0 for b in betas)):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    coefficients = group["ns_coefficients"]
    if not (isinstance(coefficients, tuple | list) and len(coefficients) == 3):
        raise ValueError(f"ns_coefficients must be three numbers (a, b, c), got {coefficients}")
    if not (isinstance(group["ns_steps"], int) and 1 <= group["ns_steps"] < 100):
        raise ValueError(f"ns_steps must be in [1, 99], got {group['ns_steps']}")
    for key, allowed in (("adjust_lr_fn", _ADJUST_LR), ("algorithm", _ALGORITHMS)):
        if group.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{key} must be one of {allowed}, got {group[key]!r}")


def check_plan_options(options: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for the first option of the plan that is out of range."""
    for key in ("chunk_bytes", "look_ahead"):
        value = options[key]
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{key} must be at least 1, got {value!r}")
    for key, allowed in (("assignment", Assignment), ("dedupe", Dedupe), ("overlap", Overlap)):
        if options[key] not in get_args(allowed):
            raise ValueError(f"{key} must be one of {get_args(allowed)}, got {options[key]!r}")
