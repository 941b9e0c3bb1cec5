"""Strategies and Accelerators."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn

from lightning_muon import Options
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.accelerate.settings import check_state, mesh_sizes, mode_options, read_options
from lightning_muon.integrations.lightning.trainer import sharded_plugin
from lightning_muon.integrations.registry import strategy_class
from tests.unit.integrations.test_accelerate import accelerate_state
from tests.unit.refusals import Table


def _fabric(precision: str) -> None:
    strategy = strategy_class("lightning.fabric")()
    importlib.import_module("lightning.fabric").Fabric(
        accelerator="cpu", devices=4, strategy=strategy, precision=precision
    )


def _plugin(kind: str, *arguments: Any) -> None:
    package = LightningPackage("lightning.pytorch")
    sharded_plugin(getattr(package.module("plugins.precision"), kind)(*arguments), package)


def _trainer_with_fabric() -> None:
    strategy = strategy_class("lightning.fabric")()
    importlib.import_module("lightning.pytorch").Trainer(accelerator="cpu", devices=1, strategy=strategy)


def _without(package: str, of_ours: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.delitem(importlib.sys.modules, f"lightning_muon.{of_ours}", raising=False)  # type: ignore[attr-defined]
        patched.setitem(importlib.sys.modules, package, None)  # type: ignore[attr-defined]
        importlib.import_module(f"lightning_muon.{of_ours}")


def _sizes(parallel: dict[str, int], options: dict[str, int], kind: DistributedType = DistributedType.FSDP) -> None:
    state = accelerate_state(kind)
    state.parallelism_config = ParallelismConfig(**parallel)
    mesh_sizes(state, Options(**options))


def _launched(number: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("WORLD_SIZE", number)
        check_state(accelerate_state(DistributedType.NO), Options())


STRATEGIES = {
    "precision of Fabric": Table(_fabric, [(each, "precision=") for each in ("16-true", "64-true", "16-mixed")]),
    "precision of a Trainer": Table(
        _plugin,
        [
            (("MixedPrecision", "16-mixed", "cpu"), "16-mixed.*float16 needs loss scaling.*'bf16-mixed'"),
            (("HalfPrecision", "16-true"), "16-true"),
            (("DoublePrecision",), "DoublePrecision"),
            (("FSDPPrecision", "bf16-mixed"), "FSDPPrecision"),
        ],
    ),
    "a Trainer": Table(
        _trainer_with_fabric, [((), "for Fabric; the names 'parallel_muon' and 'flexdemo' find the right class")]
    ),
    "a missing package": Table(
        _without,
        [
            (("transformers", "hf"), r'hf needs .*pip install "lightning-muon\[accelerate\]" "transformers>=5"'),
            (("accelerate", "accelerate"), r'accelerate needs .*pip install "lightning-muon\[accelerate\]"'),
        ],
        ModuleNotFoundError,
    ),
    "a state of Accelerate": Table(
        lambda state, options: check_state(accelerate_state(**state), Options(**options)),
        [
            (({"fsdp_version": 1}, {}), "FSDP1 flattens"),
            (({"kind": DistributedType.DEEPSPEED}, {}), "DEEPSPEED brings a division"),
            (({}, {"sharding": "ddp"}), "sharding='ddp' contradicts distributed_type: FSDP"),
            (({"precision": "fp16"}, {}), "mixed_precision: fp16 is not supported"),
            (({"cpu_offload": True}, {}), "fsdp_offload_params"),
            (({"ignored_modules": ["head"]}, {}), "fsdp_ignored_modules"),
            (({"activation_checkpointing": True}, {}), "fsdp_auto_wrap_policy"),
            (({}, {"context_size": 2}), "context_size=2"),
            (({}, {"process_group_backend": "gloo"}), "InitProcessGroupKwargs"),
            (({}, {"pipeline_size": 2, "sharding": "none"}), "=2: no loop of .* use ParallelMuonStrategy .* of Fabric"),
        ],
    ),
    "processes that Accelerate overlooks": Table(_launched, [("2", "2 processes were launched")]),
    "sizes of both sides": Table(
        _sizes,
        [
            (({"dp_replicate_size": 2, "dp_shard_size": 4}, {"shard_size": 2}), "contradicts .*_dp_shard_size: 4"),
            (({"dp_shard_size": 2, "tp_size": 2}, {}), "parallelism_config_tp_size: 2 is not supported"),
            (({"dp_shard_size": 2}, {}, DistributedType.MULTI_GPU), "needs distributed_type: FSDP"),
        ],
    ),
    "units of both sides": Table(
        lambda state, options: mode_options(accelerate_state(**state), Options(**options), nn.Linear(2, 2)),
        [
            (({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]},
              {"wrap_policy": ["Block"]}), "both name the units"),
        ],
    ),
    "options of an Accelerator": Table(read_options, [(3, "got 3")], TypeError),
}  # fmt: skip
