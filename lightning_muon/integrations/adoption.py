"""Decides what becomes of the optimizers that a program made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.config import MuonConfig
from lightning_muon.optim.adopt import Adoption, adopt, adopt_decoupled, has_matrices, repoint_schedulers
from lightning_muon.optim.flexdemo.config import FlexDeMoConfig
from lightning_muon.optim.flexdemo.flexdemo import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.routing import require_muon

OptimizerChoice = Literal["auto", "keep"] | MuonConfig | FlexDeMoConfig


class ReplacedParameters:
    """Names of the parameters that sharding replaces, for optimizers that were made too early.

    Most training loops create the optimizer before the model is divided. Made before sharding; keeps no parameter alive
    that nothing else holds.
    """

    def __init__(self, module: nn.Module) -> None:
        plain = ((name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor))
        self._references = [(name, weakref.ref(parameter)) for name, parameter in plain]
        self._replaced: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()

    def close(self, module: nn.Module) -> None:
        """Call after sharding: from now on only parameters that outlived it are known.

        Weak references would make ``Module.to`` fail on those that are still in place.
        """
        current = set(module.parameters())
        for name, reference in self._references:
            parameter = reference()
            if parameter is not None and parameter not in current:
                self._replaced[parameter] = name
        self._references.clear()

    def rebind(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Replace the parameters of ``optimizer`` by what ``module`` holds under the same names now.

        Raises:
            ValueError: If the optimizer has state for a parameter that was replaced.
        """
        current = dict(module.named_parameters())
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                name = self._replaced.get(parameter)
                if name is None:
                    continue
                if not _is_fresh(optimizer) and parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} has state for {name}, which was sharded since; create the "
                        "optimizer anew (in Lightning in configure_optimizers), and load its state after the sharding"
                    )
                group["params"][index] = current[name]


def _is_fresh(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what there is of state can be made again."""
    return isinstance(optimizer, PlannedOptimizer) and optimizer.is_fresh


def check_choice(choice: object) -> None:
    """Raise ``ValueError`` for anything but an :data:`OptimizerChoice`."""
    if choice not in ("auto", "keep") and not isinstance(choice, MuonConfig | FlexDeMoConfig):
        raise ValueError(f"optimizer must be 'auto', 'keep', a MuonConfig or a FlexDeMoConfig, got {choice!r}")


def config_of(choice: OptimizerChoice) -> MuonConfig | FlexDeMoConfig:
    """The config that the user gave, or the default one."""
    return choice if isinstance(choice, MuonConfig | FlexDeMoConfig) else MuonConfig()


def choose_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    module: nn.Module,
    *,
    choice: OptimizerChoice,
    is_placeholder: Callable[[torch.optim.Optimizer], bool] | None = None,
) -> list[Adoption]:
    """Return what becomes of each optimizer, in the same order.

    Args:
        optimizers: With the parameters that ``module`` holds now.
        schedulers: Follow an optimizer that is replaced.
        module: Sharded.
        choice: ``"keep"`` replaces nothing; a config gives what AdamW does not say, and its class what all become.
        is_placeholder: Whether an optimizer stands for none, and is to be left alone.

    Raises:
        ValueError: If an optimizer was to run on Muon, but none of them has a matrix; or if nodes would drift apart.
    """
    adoptions = [
        Adoption(optimizer=optimizer, summary="none")
        if is_placeholder is not None and is_placeholder(optimizer)
        else _adopt(optimizer, module, choice)
        for optimizer in optimizers
    ]
    _require_matrices(adoptions, choice)
    for index, (old, adoption) in enumerate(zip(optimizers, adoptions, strict=True)):
        new = adoption.optimizer
        if new is old:
            continue
        if isinstance(new, ParallelMuon) and not has_matrices(new):
            # One of several, such as the AdamW beside a Muon: nothing of it would change.
            adoptions[index] = Adoption(optimizer=old, summary=f"{type(old).__name__}, kept: it has no matrices")
            continue
        if isinstance(new, FlexDeMo) and not has_matrices(new):
            # Nothing of it is for Muon, which is meant as long as another optimizer has matrices.
            for group in new.param_groups:
                group["algorithm"] = "adamw"
        repoint_schedulers(schedulers, old, new)
    return adoptions


def _adopt(optimizer: torch.optim.Optimizer, module: nn.Module, choice: OptimizerChoice) -> Adoption:
    if isinstance(choice, FlexDeMoConfig):
        return adopt_decoupled(optimizer, module, choice)
    if isinstance(optimizer, FlexDeMo):
        raise ValueError(
            "the optimizer is a FlexDeMo, but gradients are averaged over all ranks, so nothing is left to exchange; "
            "set the option optimizer=FlexDeMoConfig(), or Trainer(strategy='flexdemo')"
        )
    if choice == "keep" and not isinstance(optimizer, ParallelMuon):
        return Adoption(optimizer=optimizer, summary=f"{type(optimizer).__name__}, kept: optimizer='keep'")
    return adopt(optimizer, module, choice if isinstance(choice, MuonConfig) else MuonConfig())


def _require_matrices(adoptions: Sequence[Adoption], choice: OptimizerChoice) -> None:
    ours = [adoption.optimizer for adoption in adoptions if isinstance(adoption.optimizer, PlannedOptimizer)]
    # A user who sends every group to AdamW means it.
    if all(group["algorithm"] == "adamw" for optimizer in ours for group in optimizer.param_groups):
        return
    try:
        require_muon([route for optimizer in ours for route in optimizer.routes])
    except ValueError as error:
        instead = "optimizer='keep' trains with the optimizer as it is"
        if isinstance(choice, FlexDeMoConfig):
            instead = "optimizer=FlexDeMoConfig(base='adamw') needs no matrices"
        raise ValueError(f"{error}\nThe option {instead}.") from None


def describe_optimizers(adoptions: Sequence[Adoption]) -> str:
    """What runs on Muon, what on AdamW, and what was kept."""
    lines: list[str] = []
    for adoption in adoptions:
        lines.append(f"Optimizer: {adoption.summary}")
        if isinstance(adoption.optimizer, PlannedOptimizer):
            lines.append(adoption.optimizer.summary())
    return "\n".join(lines)


def optimizer_warnings(
    adoptions: Sequence[Adoption], choice: OptimizerChoice, *, is_default: bool = False
) -> list[str]:
    """What the user may not have meant: optimizers that do not run on Muon, and a config that nothing uses.

    Args:
        adoptions: What became of the optimizers.
        choice: The option that decided it.
        is_default: The optimizers are not the user's, but were made from ``choice``.
    """
    warnings = [
        f"{type(adoption.optimizer).__name__} is kept and does not run on Muon: {adoption.kept_because}. "
        "The option optimizer='keep' says that this is meant and silences the warning."
        for adoption in adoptions
        if adoption.kept_because
    ]
    warnings += [adoption.caution for adoption in adoptions if adoption.caution]
    made_by_user = [adoption.is_as_configured and not is_default for adoption in adoptions]
    # strategy="flexdemo" brings the defaults without being asked.
    is_given = isinstance(choice, MuonConfig | FlexDeMoConfig) and choice != FlexDeMoConfig()
    if is_given and made_by_user and all(made_by_user):
        name = type(adoptions[0].optimizer).__name__
        warnings.append(
            f"The option optimizer={type(choice).__name__}(...) has no effect: the program made a {name} of its own, "
            "which is used as it is."
        )
    return warnings
