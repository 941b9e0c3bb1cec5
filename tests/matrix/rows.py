"""The rows of the matrix, and further ones that are drawn from the same space."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from packaging.version import Version

from lightning_muon import DCTTopK, DiLoCo, Full, Random, Slicing, Striding
from lightning_muon.sharding.modes import MODES
from tests.matrix.row import ODD, Row
from tests.support import family
from tests.support.tensors import SHAPES

HSDP = {"replicate_size": 2, "shard_size": 2}
FLAT = tuple(part for part in ODD if part != "conv")  # A sequence that is divided has no convolution.
FUSED = {"fused": {"*.qkv.weight": 3}}
HEADS = {"fused": {"queries": (6, 4, 2)}, "fused_inputs": {"heads": (4, 2, 2, 4), "other_heads": 3, "convolution": 2}}
CUBIC = (1.5, -0.5, 0.0)
CUSTOM = tuple((3.0 - 0.2 * step, -3.0, 1.1) for step in range(4))
# Names are what a failure shows.
ROWS: dict[str, Row] = {}


def _add(name: str, framework: str, ranks: int, *, like: Row | None = None, **fields: Any) -> None:
    assert name not in ROWS, name
    if framework in ("plain", "fully_shard", "tensors"):
        fields = {"program": "ParallelMuon", "model": "tensors" if framework == "tensors" else "net"} | fields
    ROWS[name] = replace(like or Row(), framework=framework, ranks=ranks, **fields)


def _loops() -> None:
    """A sharding mode in a loop of one's own: every mode, on 1 to 4 ranks; ranks that take different branches."""
    branches = {"parts": (*ODD, "branches")}
    for mode in ("zero2", "ddp"):
        for ranks, sizes in ((1, {}), (3, {}), (4, {"replicate_size": 2})):
            options = {"sharding": mode, "bucket_bytes": 600, **sizes}
            _add(f"{mode}, {ranks} ranks, branches by rank", "plain", ranks, options=options, **branches,
                 accumulate=2, max_norm=0.5)  # fmt: skip
    for ranks in (2, 3):
        _add(f"fsdp, {ranks} shards, branches by rank", "plain", ranks, **branches, accumulate=2)
    _add("zero2, 4 shards", "plain", 4, options={"sharding": "zero2", "bucket_bytes": 600}, optimizer=FUSED)
    for ranks, sizes in ((1, {}), (3, {}), (4, {"replicate_size": 2})):
        _add(f"zero2, mains, {ranks} ranks, branches by rank", "plain", ranks, accumulate=2, max_norm=0.5, **branches,
             options={"sharding": "zero2", **sizes}, precision="bf16-true", tolerance=1e-4)  # fmt: skip
    _add("zero2, mains, compiled units", "plain", 2, options={"sharding": "zero2"}, compiles="units", accumulate=2,
         precision="bf16-true", tolerance=0.02)  # fmt: skip
    for accumulate in ("sharded", "whole"):
        for ranks, sizes in ((3, {}), (4, HSDP)):
            _add(f"fsdp, {ranks} ranks {sizes}, accumulated {accumulate}", "plain", ranks, accumulate=3,
                 parts=(*ODD, "skips"), options={**sizes, "accumulate": accumulate})  # fmt: skip
    for ranks, sizes in ((1, {}), (4, {}), (4, HSDP), (4, {"replicate_size": 4, "shard_size": 1})):
        _add(f"fsdp, {ranks} ranks, {sizes}", "plain", ranks, options=sizes, max_norm=0.3)
    for what in ("", "units"):
        _add(f"outputs of units are changed in place, compiled {what}", "plain", 2, compiles=what,
             parts=("in place", "frozen"))  # fmt: skip
    # In memory its weight has the shape of another matrix.
    _add("inputs first, MuonEq", "plain", 2, inner=5, parts=("inputs first",), tolerance=2e-5,
         optimizer={"orthogonalize": family.muon_eq, "adjust_lr_fn": "spectral_mup"})  # fmt: skip
    _add("float64", "plain", 2, dtype=torch.float64, parts=(*ODD, "no bias", "frozen block"))
    for mode in ("fsdp", "zero2", "ddp"):
        for what in ("units", "model"):
            _add(f"{mode}, compiled {what}", "plain", 2, options={"sharding": mode}, compiles=what, accumulate=2,
                 max_norm=0.3)  # fmt: skip
    for what, patterns in (("both", ()), ("b_only", ("*lora_A*",))):
        # AdamW divides by moments of gradients that are near zero, since B begins with zeros.
        for ranks, sizes in ((3, {}), (4, {"replicate_size": 2})):
            _add(f"LoRA, {what}, {ranks} ranks", "fully_shard", ranks, options=sizes,
                 optimizer={"adamw_patterns": patterns}, parts=("lora",))  # fmt: skip
    _add("fully_shard, 2 replicas", "fully_shard", 4, options={"replicate_size": 2}, max_norm=0.3, accumulate=2,
         saved_at=1, parts=("conv", "experts", "inputs first", "frozen", "unused", "tied"))  # fmt: skip


def _frameworks() -> None:
    """Each framework with its own loop, schedule, clipping, accumulation, tokens and checkpoints."""
    both = {"accumulate": 2, "has_rates": True}
    tokens = {"accumulate": 2, "has_tokens": True, "max_norm": 0.01}
    loss = {"loss_scaling": "tokens"}
    for name, other, apart in (
        ("fabric", "lightning_fabric", "fabric, set up apart"),
        ("lightning", "pytorch_lightning", "lightning"),
        ("accelerate", "accelerate compiled", "accelerate ddp, prepared apart"),
    ):
        zero2, ddp = {"sharding": "zero2"}, {"sharding": "ddp"}
        # Clipped gradients do not tell by what they were divided.
        _add(f"{name}, tokens, not clipped", name, 2, options=loss, accumulate=2, has_tokens=True)
        # Accelerate steps a scheduler once for each process.
        others = both | {"has_rates": name != "accelerate"}
        plain = f"{name} ddp" if name == "accelerate" else name
        _add(f"{name}, hsdp", name, 4, options=HSDP, **others, max_norm=0.1, saved_at=1,
             resumed={"ranks": 2, "options": {}})  # fmt: skip
        _add(f"{name}, fsdp", other, 2, **both, max_norm=0.1, saved_at=2, resumed={"framework": name})
        _add(f"{name}, 3 shards", name, 3, max_value=1e-3, accumulate=2, options={"reshard_after_backward": False})
        _add(f"{name}, zero2", plain, 4, options={**zero2, "replicate_size": 2}, **others, max_norm=0.1, saved_at=1,
             resumed={"ranks": 3, "options": zero2, "framework": plain})  # fmt: skip
        _add(f"{name}, zero2 to fsdp", plain, 3, options={**zero2, "save_distributed_checkpoint": False}, saved_at=1,
             resumed={"ranks": 2, "options": {}, "framework": name})  # fmt: skip
        _add(f"{name}, ddp", apart, 2, options=ddp, max_value=1e-3, has_rates=True, saved_at=2,
             resumed={"framework": plain})  # fmt: skip
        _add(f"{name}, ddp to zero2", plain, 2, options={**ddp, "save_distributed_checkpoint": True}, saved_at=1,
             resumed={"ranks": 4, "options": zero2})  # fmt: skip
        _add(f"{name}, none", plain, 1, options={"sharding": "none"}, **both)
        _add(f"{name}, tokens, fsdp", name, 4, options={**loss, **HSDP}, **tokens)
        _add(f"{name}, tokens, fsdp, whole", name, 4, options={**loss, **HSDP, "accumulate": "whole"}, **tokens)
        _add(f"{name}, tokens, zero2", plain, 2, options={**loss, **zero2}, **tokens)
        _add(f"{name}, tokens, ddp", plain, 3, options={**loss, **ddp}, **tokens)
        _add(f"{name}, llama", name, 2, model="llama", parts=("tied",), accumulate=2, max_norm=0.3)
        for kind, sharding in (("fsdp", {}), ("zero2", zero2)):
            _add(f"{name}, {kind}, clips what is elementwise", plain if sharding else name, 2, max_norm=1e-3,
                 options={**sharding, "clip_groups": "elementwise"}, tolerance=2e-6)  # fmt: skip
        _add(f"{name}, keep", name, 2, optimizer="keep", program="SGD", accumulate=2, max_norm=0.1, saved_at=1)
        _add(f"{name}, nodes send everything", plain, 2, optimizer=MEAN, options={"replicate_size": 2}, **both)
        # Three digits; what is resumed has the same bits.
        mixed: dict[str, Any] = {"precision": "bf16-mixed", "tolerance": 0.05, "saved_at": 1, "max_norm": 0.3, **others}
        mixed["parts"] = ODD
        _add(f"{name}, bf16-mixed, hsdp", name, 4, options=HSDP, **mixed)
        _add(f"{name}, bf16-mixed, accumulated whole", name, 2, options={"accumulate": "whole"},
             **mixed | {"accumulate": 2})  # fmt: skip
        _add(f"{name}, bf16-mixed, zero2", plain, 2, options=zero2, **mixed)
        _add(f"{name}, bf16-mixed, SGD", name, 2, optimizer="keep", program="SGD", **mixed)
        at_rate: dict[str, Any] = MEAN | {"base": "muon", "muon_lr_factor": 1.0}
        _add(f"{name}, bf16-mixed, nodes", name, 4, options=HSDP, optimizer=at_rate, **mixed)
        for kind, of_kind in (("fsdp", {}), ("ddp", ddp)) if name != "accelerate" else ():
            _add(f"{name}, bf16-true, {kind}", name, 2, options={**of_kind, "save_distributed_checkpoint": True},
                 **mixed | {"precision": "bf16-true"})  # fmt: skip
        # A weight may be rounded the other way where sums have another order.
        mains = mixed | {"precision": "bf16-true", "accumulate": 2, "tolerance": 1e-4}
        for ranks, sizes in ((1, {}), (2, {}), (3, {"bucket_bytes": 600}), (4, {"replicate_size": 2})):
            _add(f"{name}, bf16-true, zero2, {ranks} ranks", plain, ranks, options={**zero2, **sizes}, **mains)
        # Other ranks have other rows, whose gradients are rounded one by one.
        mains |= {"tolerance": 0.02}
        _add(f"{name}, bf16-true, zero2 to 3 ranks", plain, 4, options={**zero2, "save_distributed_checkpoint": True},
             **mains, resumed={"ranks": 3})  # fmt: skip
        _add(f"{name}, bf16-true, zero2 to fsdp", plain, 2, options=zero2, **mains,
             resumed={"framework": name, "options": {}, "precision": "32-true"})  # fmt: skip
        normuon = {"optimizer": {"normuon": True, **FUSED}, "tolerance": 2e-6, "parts": (*ODD, "transposed")}
        _add(f"{name}, NorMuon, hsdp", name, 4, options=HSDP, **normuon, saved_at=1,
             resumed={"ranks": 3, "options": {}})  # fmt: skip
        _add(f"{name}, NorMuon, zero2", plain, 3, options=zero2, **normuon, saved_at=2)
    _add("accelerate, loss.backward()", "accelerate by torch", 2, accumulate=2)
    _add("accelerate, ddp, loss.backward()", "accelerate ddp by torch", 2, accumulate=2, options={"sharding": "ddp"})
    # Not clipped: the norm would hide a wrong divisor.
    _add("lightning, nodes, tokens", "lightning", 2, optimizer=MEAN, accumulate=2, has_tokens=True,
         options={"replicate_size": 2, **loss})  # fmt: skip
    _add("lightning, context and replicas", "lightning", 4, parts=FLAT, accumulate=2, max_norm=0.3,
         options={"context_size": 2, "replicate_size": 2})  # fmt: skip
    _add("lightning, context with zero2", "lightning", 4, parts=FLAT, **tokens,
         options={"context_size": 2, "sharding": "zero2", **loss})  # fmt: skip
    _add("lightning, tensor and replicas", "lightning", 4, inner=14, **tokens,
         options={"tensor_size": 2, "replicate_size": 2, **loss}, saved_at=1)  # fmt: skip
    _add("lightning, tensor and context", "lightning", 4, parts=FLAT, inner=14, accumulate=2, max_norm=0.3,
         options={"tensor_size": 2, "context_size": 2})  # fmt: skip
    staged = tuple(part for part in ODD if part != "unused")
    for name in ("fabric", "lightning"):
        deep: dict[str, Any] = {"num_blocks": 4, "parts": staged, "max_norm": 0.3}
        _add(f"{name}, pipeline", name, 2, options={"pipeline_size": 2}, **deep, saved_at=1)
        _add(f"{name}, V", name, 2, **deep,
             options={"pipeline_size": 2, "sharding": "none", "pipeline_schedule": "zb_v"})  # fmt: skip
        if name == "fabric":  # A stage without matrices.
            _add("fabric, the embedding apart", name, 2, **deep,
                 options={"pipeline_size": 2, "pipeline_split": ["embedding", "blocks.0"]})  # fmt: skip
        # Patterns for a stage, which the other one does not have.
        routes = {"adamw_patterns": ("*blocks.0.up.weight",), "muon_patterns": ("*tail.head.weight",), **FUSED}
        _add(f"{name}, pipeline, patterns", name, 2, options={"pipeline_size": 2}, **deep | {"parts": ("frozen",)},
             optimizer=routes)  # fmt: skip
        _add(f"{name}, pipeline, nodes", name, 4, **deep | {"parts": ("frozen", "tied")}, tolerance=1e-5,
             options={"pipeline_size": 2, "replicate_size": 2}, optimizer=MEAN)  # fmt: skip
        _add(f"{name}, pipeline, replicas", name, 4, **deep,
             options={"pipeline_size": 2, "replicate_size": 2, "pipeline_schedule": "zb_h1"})  # fmt: skip
        _add(f"{name}, pipeline, shards, tokens", name, 4, **deep, has_tokens=True,
             options={"pipeline_size": 2, "shard_size": 2, **loss})  # fmt: skip
        _add(f"{name}, pipeline, bf16-mixed", name, 4, **deep, options={"pipeline_size": 2, "shard_size": 2},
             precision="bf16-mixed", tolerance=0.05)  # fmt: skip
    of_trainer: dict[str, Any] = {"model": "llama", "has_tokens": True, "max_norm": 0.3, "accumulate": 2}
    # Before 5.18 transformers loads the state of DDP on CPUs to "cpu:0", an error.
    of_ddp = 2 if Version(transformers.__version__) >= Version("5.18") else 0
    for kind, ranks, saved in (
        ("none", 1, 0),
        ("ddp", 4, of_ddp),
        ("fsdp", 2, 2),
        ("fsdp, one file", 2, 1),
        ("hsdp", 4, 0),
    ):
        resumed = {"ranks": 4} if kind == "fsdp, one file" else {}
        _add(f"transformers, {kind}", f"transformers {kind}", ranks, **of_trainer, has_rates=kind != "hsdp",
             parts=("tied",) if kind in ("ddp", "fsdp") else (), saved_at=saved, resumed=resumed)  # fmt: skip
    _add("transformers, bf16-mixed, fsdp", "transformers fsdp", 2, **of_trainer, saved_at=2,
         precision="bf16-mixed", tolerance=0.05)  # fmt: skip
    for kind, ranks, saved in (("none", 1, 0), ("hsdp", 4, 2), ("ddp", 2, of_ddp)):
        options = {"sharding": "ddp"} if kind == "ddp" else {}
        _add(f"transformers, launched, {kind}", f"transformers launched {kind}", ranks, **of_trainer, options=options,
             saved_at=saved)  # fmt: skip


def _goes_on() -> None:
    """Checkpoints that go on with other ranks, divided in other ways, in each format."""
    directory, one_file = ({"save_distributed_checkpoint": value} for value in (True, False))
    none, zero2, ddp = ({"sharding": name} for name in ("none", "zero2", "ddp"))
    stages: dict[str, Any] = {"pipeline_size": 2, "pipeline_microbatches": 4}
    staged: dict[str, Any] = {"num_blocks": 4, "parts": [part for part in ODD if part != "unused"], "has_rates": True}
    for name, (ranks, options), (others, other_options) in [
        ("4 shards to 3", (4, directory), (3, {})),
        ("2 x 2 to 4 x 1", (4, HSDP | directory), (4, {"replicate_size": 4, "shard_size": 1})),
        ("2 x 2 to 1", (4, HSDP | one_file), (1, none)),
        ("1 to 4", (1, none), (4, directory)),
        ("4 to zero2", (4, directory), (4, zero2)),
        ("zero2 to ddp", (4, zero2 | directory), (2, ddp)),
        ("zero2 to 1", (4, zero2 | one_file), (1, none)),
        ("one file to stages", (4, one_file), (2, stages)),
        ("1 to stages", (1, none), (2, {**stages, "pipeline_schedule": "zb_v"})),
        ("stages to 4", (4, {**stages, "shard_size": 2, "pipeline_schedule": "interleaved_1f1b"}),
         (4, {"pipeline_size": 4, "pipeline_microbatches": 4})),
        ("stages to 3 shards", (4, {**stages, "replicate_size": 2}), (3, {})),
        ("stages to 1", (2, {**stages, "pipeline_schedule": "zb_v"}), (1, none)),
    ]:  # fmt: skip
        _add(f"goes on, {name}", "fabric", ranks, options=options, optimizer={"normuon": True}, **staged,
             tolerance=2e-6, saved_at=1, resumed={"ranks": others, "options": other_options})  # fmt: skip
    tensor = {"tensor_size": 2, "replicate_size": 2, **directory}
    for name, ranks, options, resumed in [
        ("shards to tensor", 2, directory, {"ranks": 4, "options": tensor}),
        ("tensor to shards", 4, tensor, {"ranks": 3, "options": {}}),
        ("tensor to one file", 4, {"tensor_size": 2, **one_file}, {"ranks": 1, "options": none}),
    ]:
        _add(f"goes on, {name}", "lightning", ranks, options=options, optimizer={"normuon": True}, inner=14,
             tolerance=2e-6, saved_at=1, resumed=resumed)  # fmt: skip
    for loop, sharding in (("accelerate", {}), ("accelerate ddp", ddp)):
        _add(f"goes on, {loop}, async", loop, 2, options={**sharding, "async_save": True}, saved_at=1)
    # Nodes go on between two averages, and everybody while the file is written.
    average = {"replicator": DiLoCo(period=3), "base": "adamw"}
    nodes = {"replicator": DCTTopK(chunk_size=8, top_k=4), "dense_below": 16, "base": "adamw", "value_format": "fp32"}
    for loop in ("fully_shard", "lightning", "accelerate ddp"):
        _add(f"goes on, DiLoCo, {loop}", loop, 2, options={"replicate_size": 2}, optimizer=average, steps=6, saved_at=2,
             parts=("frozen", "tied"), tolerance=1e-5)  # fmt: skip
    for format_, written in (("directory", directory), ("one file", one_file), ("async", {"async_save": True})):
        _add(f"goes on, DiLoCo, {format_}", "fabric", 2, options={"replicate_size": 2, **written}, optimizer=average,
             parts=("frozen", "tied"), steps=6, saved_at=2, tolerance=1e-5)  # fmt: skip
        _add(f"goes on, nodes, {format_}", "fabric", 2, options={"replicate_size": 2, **written}, optimizer=nodes,
             parts=("frozen", "tied"), saved_at=1, tolerance=1e-5)  # fmt: skip
        _add(f"goes on, Muon+, {format_}", "fabric", 2, options=written, saved_at=1, tolerance=2e-5,
             optimizer={"normuon": True, "orthogonalize": family.muon_plus})  # fmt: skip


# All of each momentum travels, so that nodes do what one process would.
MEAN: dict[str, Any] = {
    "replicator": Full(), "base": "adamw", "value_format": "fp32", "decay": 0.0, "merge": "mean", "check_every": 1,
}  # fmt: skip


def _tensors() -> None:
    """ParallelMuon on tensors placed by hand: all meshes, dimensions and options."""
    buckets = {"bucket_bytes": 8000, "muon_lr_factor": 2.5}
    for ranks, sizes in ((1, {}), (2, {}), (3, {}), (4, {}), (4, {"replicate_size": 2}), (3, {"replicate_size": 3})):
        for dim in (0, 1, None, "plain"):
            _add(f"tensors, {ranks} ranks {sizes}, dim {dim}", "tensors", ranks, options={**sizes, "shard_dim": dim},
                 optimizer=buckets)  # fmt: skip
    for dim in (0, None, "plain"):
        _add(f"tensors, gradients that one rank lacks, dim {dim}", "tensors", 3, options={"shard_dim": dim},
             shapes=("odd", "flat", "bias"), missing={1: ("odd", "bias")})  # fmt: skip
    for ranks, sizes in ((3, {}), (4, {"replicate_size": 2})):
        _add(f"tensors, disturbed, {ranks} ranks", "tensors", ranks, options=sizes, steps=4, is_disturbed=True,
             optimizer={"normuon": True, "bucket_bytes": 4000, **HEADS}, tolerance=2e-6)  # fmt: skip
    # torch cannot gather columns of which a rank has none.
    matrices = ("odd", "flat", "row", "stack", "queries", "heads")
    for number, sizes in enumerate(({}, {"shard_size": 2}, {"replicate_size": 2}, {"context_size": 2})):
        for dim, dedupe in ((0, "never"), (1, "always")):
            _add(f"tensors, tensor parallel {sizes}, dim {dim}", "tensors", 4 if sizes else 3, shapes=matrices,
                 optimizer={"dedupe": dedupe, "bucket_bytes": 300, "normuon": bool(number % 2)},
                 options={"tensor_size": 2 if sizes else 3, **sizes, "shard_dim": dim})  # fmt: skip
    muon_plus = {"orthogonalize": family.muon_plus}
    options: dict[str, tuple[dict[str, Any], float]] = {
        "no nesterov": ({"nesterov": False, "adjust_lr_fn": "original"}, 1e-6),
        "other momentum": ({"momentum": 0.5, "adjust_lr_fn": "spectral_mup"}, 1e-6),
        "polar express": ({"ns_coefficients": "polar_express", "ns_steps": 6}, 1e-6),
        "cubic": ({"ns_coefficients": CUBIC}, 1e-6),
        "custom steps": ({"ns_coefficients": CUSTOM, "ns_steps": 4}, 1e-6),
        # Gram iterations, which "fast" takes for unequal sides, add in another order; each step is off by some 1e-6.
        "fast": ({"ns_quality": "fast"}, 5e-5),
        # Input and update of Newton-Schulz are rounded to 8 bits (2^-9); an update has entries of about 0.2, and small
        # singular values are amplified.
        "bfloat16 wire": ({"wire_dtype": "bfloat16"}, 1e-3),
        "bfloat16": ({"compute_dtype": "bfloat16"}, 1e-2),
        # Lengths are float64 in the reference; Newton-Schulz multiplies the rounding of small singular values.
        "MuonEq": ({"orthogonalize": family.muon_eq}, 2e-5),
        "Muon+": ({**muon_plus, **HEADS}, 2e-5),
        "Muon+, all": ({**muon_plus, "nesterov": False, "normuon": True}, 2e-5),
        "NorMuon": ({"normuon": True, **HEADS}, 2e-6),
        "NorMuon, other decay": ({"normuon": True, "normuon_beta2": 0.8, "adjust_lr_fn": "spectral_mup"}, 2e-6),
        "heads": (HEADS, 1e-6),
        "one owner each": ({"dedupe": "never", "overlap": "off", "look_ahead": 1}, 1e-6),
        "one owner for all": ({"dedupe": "always", "bucket_bytes": 1}, 1e-6),
    }
    places = [(1, {}, 0), (3, {}, 0), (3, {}, 1), (4, {"replicate_size": 2}, 1), (2, {}, None), (4, {}, 0)]
    for number, (name, (chosen, tolerance)) in enumerate(options.items()):
        for ranks, sizes, dim in (places[number % 3], places[3 + number % 3]):
            _add(f"tensors, {name}, {ranks} ranks, dim {dim}", "tensors", ranks, optimizer=chosen, tolerance=tolerance,
                 options={**sizes, "shard_dim": dim})  # fmt: skip


def _nodes() -> None:
    """FlexDeMo on tensors and models: replicators, bases, merges, gradients that some nodes lack."""
    squares = DCTTopK(chunk_size=8, top_k=5)
    base = {"base": "sgd", "value_format": "fp32", "sign": False, "dense_below": 16}
    muon = {"base": "muon", "nesterov": True}
    missing = {1: ("odd", "bias", "scalar"), 2: ("odd", "tall")}
    unused = {-1: ("odd", "bias")}
    meshes, merges = [(2, 2), (4, 2), (4, 4), (3, 3), (2, 1), (1, 1)], ["contributors", "mean"] * 3
    summed = {"value_format": "bf16", "replicator": Full(), "decay": 1.0}
    shapes = tuple(name for name in SHAPES if name not in ("square", "queries"))
    cases: list[tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]]] = [
        *((f"merge {merge}", mesh, {"merge": merge}, {}) for mesh, merge in zip(meshes, merges, strict=True)),
        ("strips", (4, 2), {"replicator": DCTTopK(chunk_size=16, top_k=3, strips=True)}, {}),
        ("large blocks", (4, 2), {"replicator": DCTTopK(chunk_size=64, top_k=32)}, {}),
        ("a bucket each", (4, 2), {"bucket_bytes": 4}, {}),
        ("random", (4, 2), {"replicator": Random(0.25, seed=3)}, {"steps": 5}),
        ("disturbed", (2, 2), {"bucket_bytes": 700}, {"is_disturbed": True}),
        ("random, disturbed", (3, 3), {"replicator": Random(0.25, seed=3)}, {"is_disturbed": True}),
        ("striding", (4, 4), {"replicator": Striding(0.25)}, {"steps": 5}),
        ("striding, AdamW", (3, 3), {"replicator": Striding(0.25), "bucket_bytes": 4, "base": "adamw"}, {}),
        ("slicing", (3, 3), {"replicator": Slicing(0.25)}, {"steps": 5, "missing": missing}),
        ("full", (4, 2), {"replicator": Full()}, {"missing": unused}),
        ("full, Muon", (4, 2), {"replicator": Full(), "base": "muon"}, {}),
        ("signs", (4, 2), {"sign": True, "decay": 0.5}, {}),
        ("AdamW, plain", (3, 3), {"base": "adamw"}, {"options": {"shard_dim": "plain"}}),
        ("mean, some lack it", (4, 2), {"merge": "mean"}, {"missing": missing}),
        ("contributors, some lack it", (3, 3), {"merge": "contributors"}, {"missing": missing}),
        ("Muon", (3, 3), {"base": "muon"}, {}),
        # Weights and updates of up to 16 are rounded to 8 bits.
        ("bf16 weights", (4, 2), {"base": "adamw"}, {"dtype": torch.bfloat16, "tolerance": 0.07}),
        ("Muon+", (4, 2), {"base": "muon", "orthogonalize": family.muon_plus}, {}),
        # A value between two roundings may go one way in float32 and the other in float64.
        ("bf16, summed on the way", (3, 3), summed, {"tolerance": 0.05}),
    ]  # fmt: skip
    for name, (ranks, nodes), options, fields in cases:
        given = dict(fields)
        sizes = {"replicate_size": nodes, **given.pop("options", {})}
        _add(f"nodes, {name}, {ranks} ranks, {nodes} nodes", "tensors", ranks, options=sizes, shapes=shapes,
             optimizer={"replicator": squares, **base, **options}, **{"tolerance": 1e-5, **given})  # fmt: skip
    local = {"base": "sgd", "sign": False, "bucket_bytes": 3000}
    own = DiLoCo(period=3, outer_lr=0.9, outer_momentum=0.8)
    other = DiLoCo(period=2, nesterov=False, outer_lr=0.5, outer_momentum=0.6)
    mean = DiLoCo(period=2, nesterov=False, outer_lr=1.0, outer_momentum=0.0)
    for name, (ranks, nodes), options in [
        ("DiLoCo", (2, 2), {"replicator": DiLoCo(period=3)}),
        ("DiLoCo, no nesterov", (4, 2), {"replicator": other}),
        ("local SGD", (3, 3), {"replicator": mean}),
        ("an average of each step", (2, 2), {"replicator": replace(mean, period=1)}),
        ("MuLoCo", (4, 2), {"replicator": own, **muon}),
        ("MuLoCo, other momentum", (3, 3), {"replicator": own, "base": "muon", "momentum": 0.6, "nesterov": False}),
        ("DiLoCo, AdamW", (4, 2), {"replicator": own, "base": "adamw"}),
    ]:  # fmt: skip
        placed = {"shard_dim": "plain"} if ranks == nodes else {}
        _add(f"nodes, {name}, {ranks} ranks, {nodes} nodes", "tensors", ranks, steps=6, shapes=shapes, tolerance=1e-5,
             options={"replicate_size": nodes, **placed}, optimizer={**local, **options})  # fmt: skip
    parts = ("frozen", "unused", "tied")
    compressed = {"replicator": squares, **base, "bucket_bytes": 600, "merge": "mean"}
    for framework in ("fully_shard", "fabric", "lightning", "accelerate"):
        for ranks, nodes, options, fields in [
            (4, 2, {}, {"max_norm": 0.1}),
            (3, 3, {"base": "adamw"}, {"accumulate": 2}),
            (4, 2, {"base": "muon"}, {}),
        ]:
            sizes = {"replicate_size": nodes, "shard_size": ranks // nodes}
            loop = "accelerate ddp" if framework == "accelerate" and ranks == nodes else framework
            _add(f"{framework}, nodes, {options}, {ranks} ranks", loop, ranks, options=sizes, tolerance=1e-5,
                 optimizer={**compressed, **options}, parts=parts, saved_at=1, **fields)  # fmt: skip


for add in (_loops, _frameworks, _goes_on, _tensors, _nodes):
    add()


def draw(seed: int) -> Row:
    """A row of the same space."""
    choose = random.Random(1000 + seed)

    def some(choices: dict[str, Sequence[Any]]) -> dict[str, Any]:
        """Up to four of them."""
        return {name: choose.choice(choices[name]) for name in choose.sample(sorted(choices), choose.randrange(5))}

    framework = choose.choice(["plain", "fabric", "fabric", "lightning", "lightning", "accelerate", "accelerate ddp"])
    is_plain, ranks = framework == "plain", choose.choice([1, 2, 2, 3, 4, 4])
    pipeline, least_blocks = dict[str, Any](), 1
    if ranks in (2, 4) and framework in ("fabric", "lightning") and choose.random() < 0.3:
        size, of_one_stage = choose.choice([2, ranks]), ("gpipe", "1f1b", "zb_h1", "zb_1p", "zb_2p")
        schedule = choose.choice([*of_one_stage, "interleaved_1f1b", "zb_v", "v_half", "v_min"])
        pipeline = {"pipeline_size": size, "pipeline_schedule": schedule}
        pipeline["pipeline_microbatches"] = choose.choice([each for each in (2, 3, 4, 6) if each >= size])
        least_blocks = max(2, size * (1 if schedule in of_one_stage else 2) - 2)
        mode = choose.choice(["fsdp", "none"]) if size == ranks else "fsdp"
    elif framework == "accelerate":
        mode = "fsdp"
    else:
        mode = choose.choice(["fsdp"] * 4 + ["zero2"] * 3 + ["ddp", "none"])
        ranks = 1 if mode == "none" else ranks
    options = some(
        {
            "wrap_policy": [("Linear",), ("Block",)],
            "reshard_after_forward": [False],
            "reshard_after_backward": [False],
            "accumulate": ["whole"],
            "bucket_bytes": [1, 300],
            "clip_groups": ["elementwise"],
            "check_replicas_every_n_steps": [2],
            "loss_scaling": ["tokens"],
        }
    )
    known = MODES[mode].takes | (set() if is_plain else {"clip_groups", "check_replicas_every_n_steps", "loss_scaling"})
    options = {key: value for key, value in options.items() if key in ({"loss_scaling"} if pipeline else known)}
    options |= {"sharding": mode, **pipeline}
    num_data_ranks = ranks // pipeline.get("pipeline_size", 1)
    if framework != "accelerate" and mode != "none" and choose.random() < 0.6:
        options["replicate_size"] = choose.choice([size for size in (1, 2, 3, 4) if num_data_ranks % size == 0])
    muon = some(
        {
            "momentum": [0.0, 0.9, 0.99],
            "nesterov": [False],
            "ns_steps": [1, 3],
            "adjust_lr_fn": ["original", "match_rms_adamw", "spectral_mup"],
            "muon_lr_factor": [1.0, 0.5],
            "fused": [{"*tail.qkv.weight": 3}],
            "adamw_patterns": [("*blocks.0.*",)],
            "muon_patterns": [("*tail.head.weight",), ("*embedding.weight",)],
            "bucket_bytes": [1, 500],
            "dedupe": ["always", "never"],
            "overlap": ["off"],
            "look_ahead": [1, 2],
            "normuon": [True],
        }
    )
    optimizers: list[Any] = [muon, muon, {}]
    if pipeline:
        optimizers = [muon, {}]
    elif not is_plain and mode == "fsdp":
        optimizers += [MEAN, "keep"]
    elif not is_plain and mode != "zero2":
        optimizers.append("keep")
    optimizer = choose.choice(optimizers)
    parts = [part for part in (*ODD, "no bias", "frozen block") if choose.random() < 0.4]
    if is_plain and "wrap_policy" not in options:  # Of which ranks may run other ones.
        parts.append(choose.choice(["skips", "branches"]))
    resumed = dict[str, Any]()
    fixed = {"replicate_size", "loss_scaling", "pipeline_size"}
    if mode != "none" and framework != "accelerate" and not fixed & options.keys():
        resumed = choose.choice([{}, {"ranks": choose.choice([1, 2, 3, 4])}])
    return Row(
        framework=framework,
        ranks=ranks,
        options=options,
        optimizer=optimizer,
        program="ParallelMuon" if is_plain else "SGD" if optimizer == "keep" and choose.random() < 0.5 else "AdamW",
        width=choose.choice([6, 7, 8, 13]),
        inner=choose.choice([1, 4, 7, 24]),
        num_blocks=choose.randrange(least_blocks, least_blocks + 3),
        parts=parts,
        dtype=torch.float64 if choose.random() < 0.2 else torch.float32,
        accumulate=1 if pipeline else choose.choice([1, 1, 2, 3]),
        max_norm=choose.choice([None, None, 0.05]),
        has_tokens="loss_scaling" in options,
        has_rates=framework in ("fabric", "lightning") and choose.random() < 0.3,
        tolerance=1e-4,
        saved_at=0 if is_plain else choose.choice([0, 0, 1, 2]),
        resumed={} if optimizer is MEAN else resumed,
    )
