"""Converts the optimizers that a program made into ParallelMuon or FlexDeMo."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import gather, require_equal, together
from lightning_muon.comm.collectives import ALONE, AxisGroup
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon, PlannedOptimizer
from lightning_muon.optim.parameters import as_saved
from lightning_muon.params.layout import parameters_of
from lightning_muon.params.routing import Route, require_muon

OptimizerChoice = Literal["auto", "keep"] | MuonConfig | FlexDeMoConfig

_MUON_KEYS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_ADAMW_KEYS = {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas", "eps": "adamw_eps"}
# torch optimizer -> its hyper-parameters that ours have too, with our names of them, and the optimizers of ours that
# can replace it: bases of FlexDeMo, or `None` for ParallelMuon.
_SOURCES: dict[type[torch.optim.Optimizer], tuple[Mapping[str, str], tuple[str | None, ...]]] = {
    torch.optim.AdamW: (_ADAMW_KEYS, (None, "sgd", "adamw", "muon")),
    torch.optim.Adam: (_ADAMW_KEYS, (None, "sgd", "adamw", "muon")),
    torch.optim.SGD: ({"lr": "lr", "weight_decay": "weight_decay"}, ("sgd",)),
    torch.optim.Muon: ({name: name for name in _MUON_KEYS}, (None, "muon")),
}
# What has taken the place of an optimizer in a training that has ended, and the choice that led to it.
_HANDED_BACK: WeakKeyDictionary[torch.optim.Optimizer, tuple[OptimizerChoice, PlannedOptimizer]] = WeakKeyDictionary()
# Least usual betas[0]: 0.9 and 0.95 are usual, and 0 to 0.5 where models train against each other.
_LEAST_BETA = 0.8
_SAME_GROUPS = (
    "Options are saved, and scheduled, by the number of a param group: make the same groups on every stage of the "
    "pipeline, also those that have no parameters there."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """What became of an optimizer."""

    optimizer: torch.optim.Optimizer  # The new one, or the given one if it is kept.
    summary: str  # One line for the log.
    warning: str = ""  # What the user may not have meant.
    is_as_configured: bool = False  # The user made this kind of optimizer himself.


def convert_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    *,
    choice: OptimizerChoice,
    stages: AxisGroup = ALONE,
) -> list[Conversion]:
    """Return what becomes of each optimizer of the sharded ``module``, in their order.

    Collective over the ``stages`` of a pipeline, of which some may have no matrices.
    """
    has_several = sum(type(each) in (torch.optim.AdamW, torch.optim.Adam) for each in optimizers) > 1

    def convert() -> tuple[list[Conversion], list[PlannedOptimizer], list[Route]]:
        conversions = [convert_optimizer(each, module, choice, is_one_of_several=has_several) for each in optimizers]
        ours = [each.optimizer for each in conversions if isinstance(each.optimizer, PlannedOptimizer)]
        return conversions, ours, [route for optimizer in ours for route in optimizer.routes]

    # Patterns may be wrong for parameters of one stage.
    conversions, ours, routes = together(convert, [stages]) if stages.size > 1 else convert()
    with_frozen = [*routes, *(route for optimizer in ours for route in optimizer.frozen_routes())]
    if stages.size > 1:
        kinds = [(f"optimizer {number}", each.summary) for number, each in enumerate(conversions)]
        require_equal([*kinds, *_groups_of(conversions)], stages, "an optimizer", _SAME_GROUPS)
        for optimizer in ours:
            optimizer.needs_matrices = False
        if any(gather(any(route.algorithm == "muon" for route in with_frozen), stages)):
            return conversions
    # No error if the user sends every group to AdamW.
    if any(group["algorithm"] != "adamw" for optimizer in ours for group in optimizer.param_groups):
        require_muon(with_frozen)
        if all(route.algorithm == "adamw" for route in routes):  # All matrices are frozen, and may be thawed.
            return conversions
    for index, (old, conversion) in enumerate(zip(optimizers, conversions, strict=True)):
        new: Any = conversion.optimizer
        if new is old or any(route.algorithm == "muon" for route in new.routes):
            continue
        # The other optimizers have the matrices: this is, for example, the AdamW beside a Muon.
        if isinstance(new, ParallelMuon):
            conversions[index] = Conversion(optimizer=old, summary=f"{type(old).__name__}, kept: it has no matrices")
        for group in new.param_groups:
            group["algorithm"] = "adamw"
    return conversions


def _groups_of(conversions: Sequence[Conversion]) -> list[tuple[str, str]]:
    """Name and options of each param group."""
    return [
        (
            f"param group {number}",
            str({key: options[key] for key in sorted(options.keys() - {"params", "param_names"})}),
        )
        for each in conversions
        for number, options in enumerate(map(as_saved, each.optimizer.param_groups))
    ]


def describe_optimizers(conversions: Sequence[Conversion]) -> str:
    """Text that says what runs on Muon, what on AdamW, and what was kept."""
    lines: list[str] = []
    for each in conversions:
        table = [each.optimizer.summary()] if isinstance(each.optimizer, PlannedOptimizer) else []
        lines += [f"Optimizer: {each.summary}", *table]
    return "\n".join(lines or ["Optimizer: none"])


def tell(log: Any, text: str) -> None:
    """Log a text of :func:`describe_optimizers`; where nobody would see it, its first line as a warning."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    else:
        log.warning("%s (logging.basicConfig(level='INFO') shows the table of all parameters)", text.partition("\n")[0])


def optimizer_warnings(
    conversions: Sequence[Conversion], choice: OptimizerChoice, *, is_default: bool = False
) -> list[str]:
    """Warnings for the user; ``is_default``: the optimizers were made from ``choice``, not by the user."""
    warnings = [conversion.warning for conversion in conversions if conversion.warning]
    # strategy="flexdemo" brings the defaults without being asked.
    is_given = isinstance(choice, MuonConfig | FlexDeMoConfig) and choice != FlexDeMoConfig() and not is_default
    if is_given and conversions and all(conversion.is_as_configured for conversion in conversions):
        name = type(conversions[0].optimizer).__name__
        warnings.append(
            f"The option optimizer={type(choice).__name__}(...) has no effect: the program made a {name} of its own."
        )
    return warnings


def _require_works_on_shards(optimizer: torch.optim.Optimizer) -> None:
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    takes_whole = isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor | torch.optim.Rprop)
    if takes_whole or (is_fused and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad)):
        # LBFGS goes by losses, which differ between the ranks with any sharding.
        instead = "" if isinstance(optimizer, torch.optim.LBFGS) else ", or sharding='ddp', where each rank has all"
        raise ValueError(
            f"{type(optimizer).__name__}{'' if takes_whole else '(fused=True)'} of torch does not work on the shards "
            f"of FSDP2; use another one, such as AdamW{instead}"
        )


def convert_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, choice: OptimizerChoice, *, is_one_of_several: bool = False
) -> Conversion:
    """Return what takes the place of ``optimizer``, with its groups, rates and keys that the user added. Local."""
    name = type(optimizer).__name__
    config = choice if isinstance(choice, MuonConfig | FlexDeMoConfig) else MuonConfig()
    kind = FlexDeMo if isinstance(config, FlexDeMoConfig) else ParallelMuon
    if isinstance(optimizer, kind):
        optimizer.route(module)
        return Conversion(optimizer=optimizer, summary=f"{name}, as configured", is_as_configured=True)
    if isinstance(optimizer, FlexDeMo):
        raise ValueError(
            "a FlexDeMo needs nodes; set the option optimizer=FlexDeMoConfig(), or Trainer(strategy='flexdemo')"
        )
    if any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)):
        _require_works_on_shards(optimizer)
    if choice == "keep":
        return Conversion(optimizer=optimizer, summary=f"{name}, kept: optimizer='keep'")
    before, used = _HANDED_BACK.pop(optimizer, (None, None))
    if used is not None and before == choice and set(parameters_of(used)) == set(parameters_of(optimizer)):
        _copy_rates(optimizer, used)
        used.route(module)
        return Conversion(optimizer=used, summary=f"{name} -> {type(used).__name__}, as in the training before")

    reason = _reason_against(optimizer, config.base if isinstance(config, FlexDeMoConfig) else None)
    if not reason and choice == "auto":
        reason = _reason_to_keep(optimizer, is_one_of_several)
    if reason and isinstance(config, FlexDeMoConfig):
        raise ValueError(f"FlexDeMo cannot stand in for the {name} that configure_optimizers returned: {reason}")
    if reason:
        warning = f"{name} is kept and does not run on Muon: {reason}. optimizer='keep' says that this is meant."
        return Conversion(optimizer=optimizer, summary=f"{name}, kept: {reason}", warning=warning)
    if optimizer.state:
        raise ValueError(
            f"{name} has optimizer state already, which cannot be taken over; return it before its first step"
        )

    new = f"FlexDeMo(base={config.base!r})" if isinstance(config, FlexDeMoConfig) else kind.__name__
    if type(optimizer) is torch.optim.Muon:
        summary = f"torch.optim.Muon -> {new}, same hyper-parameters"
    elif isinstance(config, FlexDeMoConfig) and config.base != "muon":
        summary = f"{name} -> {new}, same learning rates and weight decay"
    else:
        factor, measured = config.lr_factor_over_adamw, "muon_lr_factor; measured in docs/performance.md"
        rate = "" if factor == 1 else f" with {factor:g} times its learning rate, in weight decay too ({measured})"
        summary = f"{name} -> {new} for matrices{rate}, AdamW for the rest"
    converted = _translated(kind, optimizer, config)
    converted.route(module)
    return Conversion(optimizer=converted, summary=summary, warning=_without_effect(config, converted, name))


def _reason_against(optimizer: torch.optim.Optimizer, base: str | None) -> str:
    """Why ParallelMuon, or FlexDeMo with this ``base``, cannot stand in for ``optimizer``; empty if it can."""
    kind, ours = type(optimizer), "FlexDeMo" if base else "ParallelMuon"
    _, bases = _SOURCES.get(kind, ({}, ()))
    if base not in bases and (base is None or not bases):
        known = [each.__name__ for each, (_, others) in _SOURCES.items() if base or None in others]
        return f"only these of torch become a {ours}: {', '.join(known)}"
    if base not in bases:
        return f"its learning rate means nothing with base={base!r}; set FlexDeMoConfig(base={bases[-1]!r})"
    if kind is torch.optim.Muon:
        return ""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            return f"momentum={group['momentum']} would be a second one, beside FlexDeMoConfig(decay=...); remove it"
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            instead = "FlexDeMoConfig(weight_decay=...)" if kind is torch.optim.SGD else "AdamW"
            return (
                f"its weight_decay={group['weight_decay']} is added to the gradient, in {ours} it is not; use {instead}"
            )
        for key in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group.get(key):
                return f"{key}=True is not supported by {ours}; remove it"
    return ""


def _reason_to_keep(optimizer: torch.optim.Optimizer, is_one_of_several: bool) -> str:
    """Why ``optimizer`` seems to belong to an adversarial training, at which Muon is worse; else empty."""
    small = [group["betas"] for group in optimizer.param_groups if "betas" in group and group["betas"][0] < _LEAST_BETA]
    if not (small or is_one_of_several):
        return ""
    return (
        f"{'the program has several optimizers' if is_one_of_several else f'betas={small[0]}'}, as in adversarial "
        "trainings, at which AdamW is better (docs/performance.md); optimizer=MuonConfig() moves the matrices to Muon "
        "all the same"
    )


def _without_effect(config: MuonConfig | FlexDeMoConfig, converted: PlannedOptimizer, name: str) -> str:
    """Warning of options in ``config`` that the optimizer of the program overrides; else empty."""
    defaults, unused = type(config)(), list[str]()
    for key in sorted({*_MUON_KEYS, *_ADAMW_KEYS.values()}):
        value = getattr(config, key, None)
        used = [group[key] for group in converted.param_groups if key in group]
        if value != getattr(defaults, key, None) and used and value not in used:
            unused.append(f"{key}={value!r} (it says {', '.join(sorted(set(map(repr, used))))})")
    if not unused:
        return ""
    return f"The {name} of the program decides, no option of {type(config).__name__}: {', '.join(unused)}."


def _translated(
    kind: type[ParallelMuon | FlexDeMo], optimizer: torch.optim.Optimizer, config: Any
) -> ParallelMuon | FlexDeMo:
    """Make an optimizer of ``kind`` with the groups of ``optimizer``; other options come from ``config``."""
    keys, _ = _SOURCES[type(optimizer)]
    added = {"algorithm": "muon"} if type(optimizer) is torch.optim.Muon else {}
    has_momentum = kind is ParallelMuon or config.has_inner_momentum
    known = {key: value for key, value in keys.items() if has_momentum or key not in ("momentum", "nesterov")}
    groups = []
    for group in optimizer.param_groups:
        given = dict(group)
        names = given.pop("param_names", None)
        if names is not None:  # torch takes names only as pairs with the parameters.
            given["params"] = list(zip(names, given["params"], strict=True))
        own = {
            known.get(key, key): value
            for key, value in given.items()
            if key in known or not (key in keys or key in optimizer.defaults)
        }
        groups.append(_plain_numbers(own) | added)
    defaults = {ours: optimizer.defaults[theirs] for theirs, ours in known.items() if theirs in optimizer.defaults}
    if defaults.get("adjust_lr_fn", "") is None:
        defaults["adjust_lr_fn"] = "original"  # What None means to torch.optim.Muon.
    if type(optimizer) is torch.optim.Muon and config.muon_lr_factor == "auto":
        defaults["muon_lr_factor"] = 1.0  # Its rate was chosen for Muon.
    return kind.from_config(groups, config, **_plain_numbers(defaults))


def _plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with tensors, which ``capturable`` or ``fused`` optimizers use for learning rates, as numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}


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
    if not found:
        return
    # Only the constructor of a scheduler lets torch count the steps by which schedulers warn of a wrong order of calls.
    # It also resets learning rates, so these are put back.
    kept = [{key: group[key] for key in ("lr", "initial_lr") if key in group} for group in new.param_groups]
    torch.optim.lr_scheduler.LambdaLR(new, lambda _: 1.0)
    for group, values in zip(new.param_groups, kept, strict=True):
        group.pop("initial_lr", None)
        group.update(values)


def hand_back(
    schedulers: Iterable[Any], used: torch.optim.Optimizer, given: torch.optim.Optimizer, choice: OptimizerChoice
) -> None:
    """End a training with ``used`` in the place of ``given``, which the program may give to the next one; local."""
    if isinstance(used, PlannedOptimizer) and used is not given:
        _copy_rates(used, given)
        repoint_schedulers(schedulers, used, given)
        _HANDED_BACK[given] = choice, used


def _copy_rates(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for ours, theirs in zip(source.param_groups, target.param_groups, strict=False):  # A callback may have added some.
        theirs["lr"] = ours["lr"]


class OptimizerProxy:
    """Keeps the user's original optimizer object alive, since schedulers hold it and write learning rates to it.

    Its param groups are those of the optimizer that really steps; ``step()`` of the old one is refused.
    """

    def __init__(self, given: torch.optim.Optimizer, used: torch.optim.Optimizer) -> None:
        self.given, self.used = given, used
        self._is_following = False
        given.register_step_pre_hook(self._refuse)
        used.register_step_post_hook(self._follow)
        # Loading a state makes new groups.
        used.register_load_state_dict_post_hook(self._share)
        self._share()

    def _follow(self, *_: Any) -> None:
        # A step without parameters shows schedulers that they are called in the right order.
        self.given.param_groups, self._is_following = [], True
        try:
            self.given.step()
        finally:
            self._is_following = False
            self._share()

    def _share(self, *_: Any) -> None:
        self.given.param_groups = self.used.param_groups

    def _refuse(self, *_: Any) -> None:
        if not self._is_following:
            raise RuntimeError(
                f"{type(self.given).__name__} does nothing any more: a {type(self.used).__name__} has taken its place"
            )
