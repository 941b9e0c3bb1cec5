"""Callbacks of Lightning that cannot work on shards, refused before they do harm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_muon.compat.lightning import LightningPackage

_AVERAGE_INSTEAD = (
    "save checkpoints with ModelCheckpoint and ParallelMuonStrategy(save_distributed_checkpoint=False), and average "
    "their 'state_dict' entries after the training"
)
# Callback class -> (why, what to use in its place)
_REFUSED = {
    "StochasticWeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "WeightAveraging": ("it copies whole weights and averages them with shards", _AVERAGE_INSTEAD),
    "ModelPruning": (
        "it puts masks on whole weights",
        "prune after the training, on the module that load_from_checkpoint returns",
    ),
}


def refuse_callbacks(callbacks: Iterable[Any], package: LightningPackage) -> None:
    """Raise ``ValueError`` for the first callback that would fail, or be wrong, on sharded weights."""
    known = package.module("callbacks")
    for callback in callbacks:
        for name, (reason, instead) in _REFUSED.items():
            if isinstance(callback, getattr(known, name, ())):
                raise ValueError(
                    f"the callback {type(callback).__name__} does not work with the strategy 'parallel_muon': "
                    f"{reason}. Instead, {instead}; or use another strategy."
                )
