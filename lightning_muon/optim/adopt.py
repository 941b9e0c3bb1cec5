"""Turns an optimizer that the user made into a ParallelMuon that continues its hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.config import MuonConfig
from lightning_muon.optim.parallel_muon import ParallelMuon

AS_CONFIGURED = "ParallelMuon, as configured"
_MUON_KEYS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_ADAMW_KEYS = {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas", "eps": "adamw_eps"}
# How torch runs AdamW, not what it computes; checked in _reason_to_keep where the difference would show.
_ADAM_IMPLEMENTATION_KEYS = (
    "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Adoption:
    """What became of an optimizer.

    Attributes:
        optimizer: The new one, or the given one if it is kept.
        summary: One line for the log.
        kept_because: Why it was kept; empty if it runs on ParallelMuon now.
    """

    optimizer: torch.optim.Optimizer
    summary: str
    kept_because: str = ""


def adopt(optimizer: torch.optim.Optimizer, module: nn.Module, config: MuonConfig) -> Adoption:
    """Return the ParallelMuon that takes the place of ``optimizer``; no communication.

    A ``ParallelMuon`` only learns its routes; whoever adopts calls ``attach`` next. ``torch.optim.Muon`` becomes the
    same algorithm with the same numbers. Of ``AdamW``, and of ``Adam`` where it computes the same as AdamW, matrices go
    to Muon with the learning rate and weight decay of their group (``config`` has the rest), everything else stays
    AdamW. Any other optimizer is kept. Number and order of the param groups, of the parameters in them, and keys that
    the user or a scheduler added stay.

    Args:
        optimizer: Before its first step.
        module: Holds the parameters of ``optimizer`` in their final form; decides what is a matrix.
        config: What the optimizer does not say: momentum, Newton-Schulz, patterns, dtypes.

    Raises:
        ValueError: If the optimizer has taken steps already.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, ParallelMuon):
        optimizer.route(module)
        return Adoption(optimizer=optimizer, summary=AS_CONFIGURED)
    reason = _reason_to_keep(optimizer)
    if reason:
        return Adoption(optimizer=optimizer, summary=f"{name}, kept: {reason}", kept_because=reason)
    if optimizer.state:
        raise ValueError(
            f"{name} has optimizer state already, which ParallelMuon cannot take over; return it before its first "
            "step, or set optimizer='keep'"
        )
    if type(optimizer) is torch.optim.Muon:
        adopted = _from_muon(optimizer, config)
        summary = "torch.optim.Muon -> ParallelMuon, same hyper-parameters"
    else:
        adopted = _from_adamw(optimizer, config)
        summary = f"{name} -> ParallelMuon for matrices, AdamW for the rest"
    adopted.route(module)
    return Adoption(optimizer=adopted, summary=summary)


def has_matrices(optimizer: ParallelMuon) -> bool:
    """Whether any parameter runs on Muon."""
    return any(route.algorithm == "muon" for route in optimizer.routes)


def repoint_schedulers(schedulers: Iterable[Any], old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Let every scheduler of ``old``, nested ones too, act on ``new``; learning rates stay as they are."""
    pending, seen, found = list(schedulers), set[int](), False
    while pending:
        scheduler = pending.pop()
        if id(scheduler) in seen or not hasattr(scheduler, "__dict__"):
            continue
        seen.add(id(scheduler))
        for key, value in list(vars(scheduler).items()):
            if value is old:
                setattr(scheduler, key, new)
                found = True
            elif isinstance(value, list | tuple):
                pending.extend(item for item in value if hasattr(item, "optimizer"))
            elif hasattr(value, "optimizer"):
                pending.append(value)
    if found:
        _watch_steps(new)


def _watch_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let torch count the steps of ``optimizer``, by which schedulers warn of a wrong order of calls.

    Only the constructor of a scheduler sets this up. It also resets learning rates, so these are put back.
    """
    kept = [{key: group[key] for key in ("lr", "initial_lr") if key in group} for group in optimizer.param_groups]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.pop("initial_lr", None)
        group.update(values)


def _reason_to_keep(optimizer: torch.optim.Optimizer) -> str:
    """Why ParallelMuon cannot stand in for ``optimizer``; empty if it can."""
    if type(optimizer) is torch.optim.Muon:
        return ""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return "only AdamW, Adam, torch.optim.Muon and ParallelMuon run on Muon"
    for group in optimizer.param_groups:
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return (
                f"its weight_decay={group['weight_decay']} is added to the gradient, which has no counterpart in Muon; "
                "use AdamW, which decays the weights themselves"
            )
        for key in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group.get(key):
                return f"{key}=True is not supported by ParallelMuon; remove it"
    return ""


def _from_muon(optimizer: torch.optim.Optimizer, config: MuonConfig) -> ParallelMuon:
    groups = [_plain_numbers(_with_names(group)) | {"algorithm": "muon"} for group in optimizer.param_groups]
    defaults = {key: optimizer.defaults[key] for key in _MUON_KEYS if key in optimizer.defaults}
    return ParallelMuon.from_config(groups, config, **_plain_numbers(defaults))


def _from_adamw(optimizer: torch.optim.Optimizer, config: MuonConfig) -> ParallelMuon:
    groups = []
    for group in optimizer.param_groups:
        own = {key: value for key, value in _with_names(group).items() if key not in _ADAM_IMPLEMENTATION_KEYS}
        own["adamw_eps"] = own.pop("eps")
        groups.append(_plain_numbers(own))
    defaults = {ours: optimizer.defaults[theirs] for theirs, ours in _ADAMW_KEYS.items()}
    return ParallelMuon.from_config(groups, config, **_plain_numbers(defaults))


def _with_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a param group; torch takes names only as pairs with the parameters."""
    copied = dict(group)
    names = copied.pop("param_names", None)
    if names is not None:
        copied["params"] = list(zip(names, copied["params"], strict=True))
    return copied


def _plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rates that ``capturable`` or ``fused`` optimizers hold as tensors, as numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
