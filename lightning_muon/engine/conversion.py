"""Converts the optimizers that a program made into ParallelMuon or FlexDeMo."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.routing import require_muon

OptimizerChoice = Literal["auto", "keep"] | MuonConfig | FlexDeMoConfig


class ReplacedParameters:
    """The parameters that sharding replaces, for optimizers that were made before it; keeps none of them alive."""

    def __init__(self, module: nn.Module) -> None:
        plain = ((name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor))
        self._references = [(name, weakref.ref(parameter)) for name, parameter in plain]
        self._replaced = WeakTensorKeyDictionary()

    def close(self, module: nn.Module) -> None:
        """After sharding: drop the weak references to what is still in place, on which ``Module.to`` would fail."""
        current = set(module.parameters())
        for name, reference in self._references:
            parameter = reference()
            if parameter is not None and parameter not in current:
                self._replaced[parameter] = name
        self._references.clear()

    def rebind(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Replace the parameters of ``optimizer`` by what ``module`` holds under the same names now."""
        current = dict(module.named_parameters())
        is_fresh = isinstance(optimizer, PlannedOptimizer) and optimizer.is_fresh  # Its state can be made again.
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = self._replaced.get(parameter)
                if name is None:
                    continue
                if not is_fresh and parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} has state for {name}, which was sharded since; create the "
                        "optimizer anew (in Lightning in configure_optimizers), and load its state after the sharding"
                    )
                group["params"][index] = current[name]


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """What became of an optimizer."""

    optimizer: torch.optim.Optimizer  # The new one, or the given one if it is kept.
    summary: str  # One line for the log.
    kept_because: str = ""  # Why it was kept; empty if it runs on ParallelMuon now, or if that is meant.
    caution: str = ""  # What the user may not have meant; empty if there is nothing.
    is_as_configured: bool = False  # The user made this kind of optimizer himself.


def convert_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    module: nn.Module,
    *,
    choice: OptimizerChoice,
    is_placeholder: Callable[[torch.optim.Optimizer], bool] = lambda _: False,
) -> list[Conversion]:
    """Return what becomes of each optimizer of the sharded ``module``, in their order; schedulers follow it. Local."""
    conversions = [
        Conversion(optimizer=each, summary="none") if is_placeholder(each) else convert_optimizer(each, module, choice)
        for each in optimizers
    ]
    ours = [each.optimizer for each in conversions if isinstance(each.optimizer, PlannedOptimizer)]
    # A user who sends every group to AdamW means it.
    if any(group["algorithm"] != "adamw" for optimizer in ours for group in optimizer.param_groups):
        try:
            require_muon([route for optimizer in ours for route in optimizer.routes])
        except ValueError as error:
            instead = "optimizer='keep' trains with the optimizer as it is"
            if isinstance(choice, FlexDeMoConfig):
                instead = "optimizer=FlexDeMoConfig(base='adamw') needs no matrices"
            raise ValueError(f"{error}\nThe option {instead}.") from None
    for index, (old, conversion) in enumerate(zip(optimizers, conversions, strict=True)):
        new = conversion.optimizer
        if new is old:
            continue
        assert isinstance(new, PlannedOptimizer)
        if all(route.algorithm != "muon" for route in new.routes):
            # One of several, such as the AdamW beside a Muon.
            if isinstance(new, ParallelMuon):
                kept = Conversion(optimizer=old, summary=f"{type(old).__name__}, kept: it has no matrices")
                conversions[index] = kept
                continue
            for group in new.param_groups:
                group["algorithm"] = "adamw"
        repoint_schedulers(schedulers, old, new)
    return conversions


def describe_optimizers(conversions: Sequence[Conversion]) -> str:
    """What runs on Muon, what on AdamW, and what was kept."""
    return "\n".join(
        f"Optimizer: {each.summary}"
        + (f"\n{each.optimizer.summary()}" if isinstance(each.optimizer, PlannedOptimizer) else "")
        for each in conversions
    )


def optimizer_warnings(
    conversions: Sequence[Conversion], choice: OptimizerChoice, *, is_default: bool = False
) -> list[str]:
    """What the user may not have meant; ``is_default``: the optimizers were made from ``choice``, not by the user."""
    warnings = [
        f"{type(conversion.optimizer).__name__} is kept and does not run on Muon: {conversion.kept_because}. "
        "The option optimizer='keep' says that this is meant and silences the warning."
        for conversion in conversions
        if conversion.kept_because
    ]
    warnings += [conversion.caution for conversion in conversions if conversion.caution]
    # strategy="flexdemo" brings the defaults without being asked.
    is_given = isinstance(choice, MuonConfig | FlexDeMoConfig) and choice != FlexDeMoConfig() and not is_default
    if is_given and conversions and all(conversion.is_as_configured for conversion in conversions):
        name = type(conversions[0].optimizer).__name__
        warnings.append(
            f"The option optimizer={type(choice).__name__}(...) has no effect: the program made a {name} of its own."
        )
    return warnings


# Hyper-parameters of theirs -> ours.
_NAMES = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_MUON_KEYS = {name: name for name in _NAMES}
_SGD_KEYS = {"lr": "lr", "weight_decay": "weight_decay"}
_ADAMW_KEYS = {"lr": "lr", "weight_decay": "weight_decay", "betas": "betas", "eps": "adamw_eps"}
_KEYS = {torch.optim.Muon: _MUON_KEYS, torch.optim.SGD: _SGD_KEYS}
# Where nodes exchange their momenta, FlexDeMo has one of its own, FlexDeMoConfig.decay.
_OWN_MOMENTUM = ("momentum", "nesterov")


def convert_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, choice: OptimizerChoice) -> Conversion:
    """Return what takes the place of ``optimizer``, which has taken no step. Local; whoever converts attaches next.

    Matrices of ``AdamW``, and of ``Adam`` where it computes the same, go to Muon with learning rate and weight decay of
    their group; the config has the rest. FlexDeMo takes both from each of these and from ``SGD``. Number and order of
    the param groups, of the parameters in them, and keys that the user or a scheduler added stay.
    """
    name = type(optimizer).__name__
    config = choice if isinstance(choice, MuonConfig | FlexDeMoConfig) else MuonConfig()
    kind = FlexDeMo if isinstance(config, FlexDeMoConfig) else ParallelMuon
    if isinstance(optimizer, kind):
        optimizer.route(module)
        return Conversion(optimizer=optimizer, summary=f"{name}, as configured", is_as_configured=True)
    if isinstance(optimizer, FlexDeMo):
        raise ValueError(
            "the optimizer is a FlexDeMo, but gradients are averaged over all ranks, so nothing is left to exchange; "
            "set the option optimizer=FlexDeMoConfig(), or Trainer(strategy='flexdemo')"
        )
    if choice == "keep":
        return Conversion(optimizer=optimizer, summary=f"{name}, kept: optimizer='keep'")

    if isinstance(config, FlexDeMoConfig):
        if reason := _reason_against(optimizer, config.base):
            raise ValueError(
                f"FlexDeMo cannot stand in for the {name} that configure_optimizers returned: {reason}. Without "
                "FlexDeMo each node would go its own way, so nothing is kept"
            )
        advice, caution = "", _caution(name, config)
        summary = f"{name} -> FlexDeMo(base={config.base!r}), same learning rates and weight decay"
    else:
        if reason := _reason_against(optimizer, None):
            return Conversion(optimizer=optimizer, summary=f"{name}, kept: {reason}", kept_because=reason)
        advice, caution = ", or set optimizer='keep'", ""
        summary = f"{name} -> ParallelMuon for matrices, AdamW for the rest"
        if type(optimizer) is torch.optim.Muon:
            summary = "torch.optim.Muon -> ParallelMuon, same hyper-parameters"
    if optimizer.state:
        raise ValueError(
            f"{name} has optimizer state already, which cannot be taken over; return it before its first step{advice}"
        )

    converted = _translated(kind, optimizer, config)
    converted.route(module)
    cautions = (caution, _without_effect(config, converted, name))
    return Conversion(optimizer=converted, summary=summary, caution=" ".join(filter(None, cautions)))


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
    # Only the constructor of a scheduler lets torch count steps, by which schedulers warn of a wrong order of calls. It
    # also resets learning rates, so these are put back.
    kept = [{key: group[key] for key in ("lr", "initial_lr") if key in group} for group in new.param_groups]
    torch.optim.lr_scheduler.LambdaLR(new, lambda _: 1.0)
    for group, values in zip(new.param_groups, kept, strict=True):
        group.pop("initial_lr", None)
        group.update(values)


def _reason_against(optimizer: torch.optim.Optimizer, base: str | None) -> str:
    """Why ParallelMuon, or FlexDeMo with this ``base``, cannot stand in for ``optimizer``; empty if it can."""
    kind, ours = type(optimizer), "FlexDeMo" if base else "ParallelMuon"
    if kind is torch.optim.Muon:
        return "" if base in (None, "muon") else f"its updates need FlexDeMoConfig(base='muon'), got base={base!r}"
    if kind is torch.optim.SGD and base:
        if base != "sgd":
            return f"its learning rate means nothing with base={base!r}; set FlexDeMoConfig(base='sgd')"
    elif kind not in (torch.optim.AdamW, torch.optim.Adam):
        if base:
            return "only AdamW, Adam, SGD and torch.optim.Muon have a counterpart; return one of these or a FlexDeMo"
        return "only AdamW, Adam, torch.optim.Muon and ParallelMuon run on Muon"
    for group in optimizer.param_groups:
        if group.get("momentum"):
            return f"momentum={group['momentum']} would be a second one, beside FlexDeMoConfig(decay=...); remove it"
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            instead = "FlexDeMoConfig(weight_decay=...)" if kind is torch.optim.SGD else "AdamW"
            return (
                f"its weight_decay={group['weight_decay']} is added to the gradient, which has no counterpart in "
                f"{ours}; use {instead}, which decays the weights themselves"
            )
        for key in ("amsgrad", "maximize", "differentiable", "capturable"):
            if group.get(key):
                return f"{key}=True is not supported by {ours}; remove it"
    return ""


def _caution(name: str, config: FlexDeMoConfig) -> str:
    """What the learning rate of a converted optimizer may not have been meant for."""
    if name == "SGD" and config.takes_sign:
        return (
            "The learning rate of SGD now steps by signs (FlexDeMoConfig(sign=True), the default with base='sgd'): "
            "each step changes each weight by lr. Set sign=False, or a learning rate as for Adam"
        )
    if name in ("AdamW", "Adam") and config.base == "sgd":
        return (
            f"{name} now runs as {'sign' if config.takes_sign else 'plain'} SGD on the exchanged updates, because "
            "FlexDeMoConfig.base is 'sgd'; base='adamw' keeps its moments"
        )
    return ""


def _without_effect(config: MuonConfig | FlexDeMoConfig, converted: PlannedOptimizer, name: str) -> str:
    """Options that the user has set, and that the optimizer of the program says otherwise."""
    defaults = type(config)()
    unused: list[str] = []
    for key in sorted({*_MUON_KEYS, *_ADAMW_KEYS.values()}):
        value = getattr(config, key, None)
        used = [group[key] for group in converted.param_groups if key in group]
        if value != getattr(defaults, key, None) and used and value not in used:
            unused.append(f"{key}={value!r} (it says {', '.join(sorted(set(map(repr, used))))})")
    if not unused:
        return ""
    return (
        f"The {name} of the program decides, so these have no effect in {type(config).__name__}: {', '.join(unused)}. "
        "They are for programs that make no optimizer."
    )


def _translated(
    kind: type[ParallelMuon | FlexDeMo], optimizer: torch.optim.Optimizer, config: Any
) -> ParallelMuon | FlexDeMo:
    """A ``kind`` of optimizer with the groups of ``optimizer``; ``config`` says what that does not."""
    keys = _KEYS.get(type(optimizer), _ADAMW_KEYS)
    added = {"algorithm": "muon"} if type(optimizer) is torch.optim.Muon else {}
    has_momentum = kind is ParallelMuon or config.has_inner_momentum
    known = {key: value for key, value in keys.items() if has_momentum or key not in _OWN_MOMENTUM}
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
    return kind.from_config(groups, config, **_plain_numbers(defaults))


def _plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rates that ``capturable`` or ``fused`` optimizers hold as tensors, as numbers."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}


class OptimizerProxy:
    """Lets the given optimizer go on as a handle on the learning rates of the used one, for schedulers that hold it.

    It shares the param groups of the used one, and takes a step without parameters whenever that has stepped, by which
    schedulers see that they are called in the right order. Stepping it by itself is an error.
    """

    def __init__(self, given: torch.optim.Optimizer, used: torch.optim.Optimizer) -> None:
        self.given, self.used = given, used
        self._is_following = False
        given.register_step_pre_hook(self._refuse)
        # Loading a state makes new groups.
        used.register_load_state_dict_post_hook(self._share)
        self._share()

    def follow(self) -> None:
        """The other optimizer has stepped; local."""
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
                f"this {type(self.given).__name__} does nothing any more: a {type(self.used).__name__} has taken its "
                "place; step the one that setup (prepare) has returned"
            )
