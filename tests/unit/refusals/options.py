"""Options in Python and in mappings: values, sizes, keywords."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import lightning_muon
from lightning_muon import (
    DCTTopK,
    DiLoCo,
    FlexDeMo,
    FlexDeMoConfig,
    MuonConfig,
    NoReplication,
    Options,
    ParallelMuon,
    ParallelMuonFabricStrategy,
    ParallelMuonStrategy,
    Random,
)
from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.schedule.simulate import PRESETS, CostModel
from tests.unit.refusals import INF, NAN, Table

_POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "exit 1", "shell": True}}
_CALLABLE = {"class_path": "sympy.Lambda", "init_args": {"signature": "x", "expr": "exit(1)"}}
_MAPPING = {"class_path": "shelve.DbfilenameShelf", "init_args": {"filename": "made_by_a_stranger"}}


def _mapping(mapping: dict[Any, Any]) -> None:
    Options.from_mapping(mapping, source="side.yaml")


# Values of MuonConfig; the message has the name of the option.
_WRONG_VALUES: dict[str, list[Any]] = {
    "adamw_patterns": ["*.x"],
    "adjust_lr_fn": ["adamw"],
    "betas": [(0.9,), ("0.9", 0.95)],
    "bucket_bytes": [0],
    "compute_dtype": ["float64", torch.bfloat16],
    "eps": [-1.0],
    "error_if_nonfinite": [1],
    "fused": [["*.qkv"], {"*": True}, {"*": "4"}, {"*": (2, 2.0)}, {"*": ()}, {3: 3}, {"*": 0}],
    "fused_inputs": [["*.o_proj"], {"*": 0}],
    "look_ahead": [True],
    "lr": [-1e-3, INF, "1e-3", None],
    "max_skipped_steps": [-1, "x"],
    "momentum": [1.0, True],
    "muon_lr_factor": ["fast", -1, NAN, None],
    "muon_patterns": [(3,)],
    "nesterov": ["no"],
    "normuon": [1],
    "normuon_beta2": [1.0, "x"],
    "ns_coefficients": [(1, 2), (1, 2, "3"), "jordans", ((1, 2, 3),), (1.0, 2.0, NAN)],
    "ns_quality": ["best", (0.9, 1.1), 0.9],
    "ns_steps": [100, 2.5, True],
    "orthogonalize": ["svd", None],
    "wire_dtype": ["float16", "bf16"],
}
_ALONE = [
    ({"replicator": each, "value_format": "fp32"}, f"value_format=.* means nothing with {type(each).__name__}.* remove")
    for each in (DiLoCo(period=4), NoReplication())
]
_NO_INNER_MOMENTUM = [
    (options | {key: value}, rf"{key}={value} is of base='muon' .*decay=\.\.\., remove it")
    for options in ({}, {"base": "muon"}, {"base": "adamw", "replicator": DiLoCo(period=2)})
    for key, value in (("momentum", 0.9), ("nesterov", False))
]
OPTIONS = {
    "MuonConfig": Table(MuonConfig, [({key: each}, key) for key, values in _WRONG_VALUES.items() for each in values]),
    "FlexDeMoConfig": Table(
        FlexDeMoConfig,
        [
            ({"base": "adam"}, r"base must be one of \('sgd', 'adamw', 'muon'\), got 'adam'"),
            ({"merge": "sum"}, r"merge must be one of \('contributors', 'mean'\), got 'sum'"),
            ({"value_format": "fp8"}, r"value_format must be one of \('fp32', 'bf16'\), got 'fp8'"),
            ({"dense_below": -1}, "dense_below must be an integer of at least 0, got -1"),
            ({"check_every": True}, "check_every must be an integer of at least 0, got True"),
            ({"bucket_bytes": 3}, "bucket_bytes must be an integer of at least 4, got 3"),
            ({"sign": "never"}, "sign must be True, False or 'auto', got 'never'"),
            ({"decay": 1.01}, r"decay must be in \[0, 1\], got 1.01"),
            ({"decay": "0.9"}, "decay must be a number, got '0.9'"),
            ({"replicator": DCTTopK}, "replicator must be a Replicator, .* got "),
            ({"lr": -1.0}, "lr must be finite and >= 0, got -1.0"),
            *_ALONE,
            *_NO_INNER_MOMENTUM,
        ],
        (ValueError, TypeError),
    ),
    "a replicator": Table(
        lambda kind, **options: kind(**options),
        [
            ({"kind": DCTTopK, "chunk_size": 0}, "DCTTopK: chunk_size must be an integer of at least 1, got 0"),
            ({"kind": DCTTopK, "top_k": -3}, "DCTTopK: top_k must be an integer of at least 1"),
            ({"kind": Random, "rate": NAN}, r"Random: rate must be in \(0, 1\]"),
            ({"kind": Random, "rate": "0.5"}, r"rate must be a number, got '0\.5'"),
            ({"kind": Random, "rate": 0.7}, r"1 / n for a whole number n.*got 0\.7"),
            ({"kind": DiLoCo, "period": 2.5}, "DiLoCo: period must be an integer of at least 1, got 2.5"),
            ({"kind": DiLoCo, "period": 5, "outer_lr": NAN}, "outer_lr must be positive"),
            ({"kind": DiLoCo, "period": 5, "outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\)"),
        ],
        (ValueError, TypeError),
    ),
    "Options": Table(
        Options,
        [
            ({"timeout": 30}, "timeout must be a datetime.timedelta of more than 0 seconds, got 30"),
            ({"reshard_after_backward": "no"}, "reshard_after_backward must be True or False, got 'no'"),
            ({"optimizer": 3}, "a MuonConfig or a FlexDeMoConfig, got 3"),
            ({"shard_size": True}, "shard_size must be 'auto' or an integer of at least 1, got True"),
            ({"optimizer": {"momentun": 0.5}}, r"^optimizer \(MuonConfig\): .*did you mean 'momentum'"),
            ({"sharding": "zero3"}, r"sharding must be one of .*'zero2'.*got 'zero3'"),
            ({"loss_scaling": "sum"}, r"loss_scaling must be one of \('mean', 'tokens'\), got 'sum'"),
            ({"clip_groups": "muon"}, r"clip_groups must be one of \('all', 'elementwise'\), got 'muon'"),
            ({"bucket_bytes": 0}, "bucket_bytes must be 'auto' or an integer of at least 1, got 0"),
            ({"optimizer": FlexDeMoConfig(), "sharding": "zero2"}, "needs sharding='fsdp', got 'zero2'"),
            ({"optimizer": FlexDeMoConfig(), "tensor_size": 2}, "needs the axes replicate .* no tensor_size"),
            ({"sharding": "ddp", "tensor_size": 2}, "tensor_size=2 needs sharding='fsdp', got 'ddp'"),
            ({"bucket_bytes": 1000}, r"bucket_bytes=1000 means nothing with sharding='fsdp'; .*\['zero2', 'ddp'\]"),
            ({"pipeline_schedule": "zb_v"}, "pipeline_schedule='zb_v' means nothing without"),
        ],
    ),
    "Options of a pipeline": Table(
        lambda **options: Options(**({"pipeline_size": 2} | options)),
        [
            ({"pipeline_schedule": "1f1p"}, "there is no schedule '1f1p'; did you mean '1f1b'"),
            ({"pipeline_microbatches": 0}, "pipeline_microbatches must be 'auto' or"),
            ({"pipeline_size": 0}, "pipeline_size must be"),
            ({"context_size": 2}, "pipeline_size=2 goes with replicate_size and shard_size only"),
            ({"sharding": "zero2"}, "pipeline_size=2 needs sharding='fsdp'"),
            ({"save_distributed_checkpoint": False}, "does not go with pipeline_size"),
            ({"wrap_policy": ("Block",)}, "wrap_policy=.*means nothing with pipeline_size"),
        ],
    ),
    "sizes on 2 nodes of 4": Table(
        lambda **sizes: MeshSizes(**sizes).resolve(num_nodes=2, num_processes=4),
        [
            (
                {"replicate_size": 2, "shard_size": 2, "context_size": 3, "tensor_size": 4},
                "2 replicas x 2 shards x 3 context ranks x 4 tensor ranks = 48 ranks, .*context_size=3, tensor_size=4",
            ),
        ],
    ),
    "CostModel": Table(
        lambda **change: CostModel.from_dict(asdict(PRESETS["h100"]) | change),
        [
            ({"flops_per_second": 0}, "flops_per_second must be finite and above 0, got 0"),
            ({"latency_seconds": -1}, r"latency_seconds must be finite and at least 0, got \(-1,\)"),
            ({"bandwidth": "fast"}, r"bandwidth must be finite and above 0, got \('fast',\)"),
        ],
        (ValueError, TypeError),
    ),
}


_STRATEGIES = (Options, ParallelMuonStrategy, ParallelMuonFabricStrategy)
KEYWORDS = {
    "a keyword": Table(
        lambda kind, options: kind(**options),
        [
            *(((kind, {"ns_stepss": 3}), "did you mean 'ns_steps'") for kind in (MuonConfig, ParallelMuon)),
            ((FlexDeMo, {"ns_stepss": 3}), "^FlexDeMo: .*'ns_stepss'; did you mean 'ns_steps'"),
            *(((kind, {"replicat_size": 2}), r"did you mean 'replicate_size'\?") for kind in _STRATEGIES),
            *(((kind, {"momentum": 0.9}), "'momentum'; it is one of MuonConfig, which optimizer= takes$")
              for kind in _STRATEGIES),
            ((lambda **options: FlexDeMo([nn.Parameter(torch.eye(3))], **options), {"normuon": True}),
             "there is no option 'normuon'; it is one of MuonConfig"),
            ((lightning_muon.hf.optimizer, {"wieght_decay": 0.1}), "MuonConfig: .* did you mean 'weight_decay'"),
        ],
        TypeError,
    ),
    "a value without a name": Table(
        lambda kind: kind(MuonConfig()),
        [(kind, "name the option that the MuonConfig is for; .* shard_size, .*optimizer") for kind in _STRATEGIES],
        TypeError,
    ),
    "hf.optimizer": Table(
        lightning_muon.hf.optimizer, [(FlexDeMoConfig(), r"a MuonConfig, got FlexDeMoConfig.*muon launch`")], TypeError
    ),
}  # fmt: skip
MAPPINGS = {
    "a mapping": Table(
        _mapping,
        [
            (({"optimizer": {"base": "sgd", "decy": 0}},), r"FlexDeMoConfig\): .*'decy'; did you mean 'decay'"),
            (({"nesterov": True},), "^side.yaml: there is no option 'nesterov'; it is one of MuonConfig"),
            (({1: 2},), "^side.yaml: there is no option 1; the options are replicate_size, shard_size, .*optimizer, "),
            (({"optimizer": {"look_ahead": 2, "base": "adamw"}},),
             r"optimizer \(MuonConfig\): there is no option 'base'"),
            *((({"optimizer": config},), rf"^side.yaml: optimizer{key}: class_path '.*Popen' names no {names}$")
              for config, key, names in (
                  (_POPEN, "", "MuonConfig or FlexDeMoConfig"),
                  ({"replicator": _POPEN}, ".*: replicator", "Replicator or LocalSteps"),
                  ({"decay": _POPEN}, ".*: decay", "class that this option takes"),
              )),
            (({"optimizer": {"orthogonalize": _CALLABLE}},), "orthogonalize: class_path 'sympy.Lambda' names no class"),
            (({"optimizer": {"fused": _MAPPING}},), "fused: class_path 'shelve.DbfilenameShelf' names no class that"),
            (({"wrap_policy": _CALLABLE},), "^side.yaml: wrap_policy: .* names no class that"),
            (({"wrap_policy": "os.system"},), "^side.yaml: wrap_policy: 'os.system' is a function of Python itself"),
            (({"optimizer": {"orthogonalize": "subprocess.getoutput"}},), "orthogonalize: 'subprocess.getoutput' is"),
            (({"optimizer": {"orthogonalize": "no_module.f"}},), "expects a function or a callable class"),
        ],
    ),
}  # fmt: skip
