"""Optimizers that are made before a model is sharded, and keep nothing for its parameters until it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer


class LateState(PlannedOptimizer):
    """Has no state before its parameters are sharded, or its first step, like the optimizers of torch.

    A Trainer makes the optimizer first. ``Accelerator.prepare`` then asks it for its ``state_dict``, loads that back,
    shards the model with FSDP2, and puts the shards in the place of the parameters. State that is made when it is
    asked for would be that of whole parameters, which it would keep alive as well.
    """

    def _can_make_state(self) -> bool:
        is_sharded = any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"])
        return is_sharded and super()._can_make_state()

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Collective where that of the base class is, once there is state."""
        return super().state_dict() if self._existing_state else torch.optim.Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Collective where that of the base class is, if there is state on either side."""
        if self._existing_state or state_dict["state"]:
            super().load_state_dict(state_dict)
        else:
            torch.optim.Optimizer.load_state_dict(self, state_dict)


class TrainerMuon(LateState, ParallelMuon):
    """The :class:`~lightning_muon.ParallelMuon` of a Trainer."""


class TrainerFlexDeMo(LateState, FlexDeMo):
    """The :class:`~lightning_muon.FlexDeMo` of a Trainer."""

    def _require_mesh(self) -> None:
        try:
            super()._require_mesh()
        except ValueError:
            raise ValueError(
                "FlexDeMo exchanges updates between the nodes itself, but this Accelerator averages gradients over all "
                "ranks and tells it no nodes; start the script with `lightning-muon launch --config_file FILE`, whose "
                "lightning_muon section has `optimizer: {class_path: lightning_muon.FlexDeMoConfig}`, or use MuonConfig"
            ) from None
