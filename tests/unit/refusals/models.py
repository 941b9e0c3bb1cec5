"""Models, optimizers, plans and pipelines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import Partial

import lightning_muon
from lightning_muon import FlexDeMo, FlexDeMoConfig, MuonConfig, ParallelMuon
from lightning_muon.engine.conversion import convert_optimizer, convert_optimizers
from lightning_muon.flexdemo.sync import NodeLayout
from lightning_muon.params.layers import parameter_uses
from lightning_muon.params.layout import Layout, sharded_axes
from lightning_muon.params.routing import OptimizerConfig, route_module
from lightning_muon.pipeline.cut import check_parameters, choose_stages
from lightning_muon.pipeline.model import find_staged_model
from lightning_muon.schedule.pipeline import SCHEDULES, Pipeline, StageCosts, make_order
from lightning_muon.sharding.clipping import clip_norm_, clip_value_
from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence
from lightning_muon.sharding.modes import ModeOptions, make_mode
from lightning_muon.sharding.shard_model import plan_units
from lightning_muon.sharding.units import dtype_units, find_units
from tests.distributed.pipeline.models import chain
from tests.unit.params.test_routing import _mlp
from tests.unit.refusals import INF, NAN, Table


def _routes(**options: Any) -> None:
    route_module(_mlp(), OptimizerConfig(**options))


def _convert(make: Callable[..., Any], choice: Any = "auto") -> None:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    convert_optimizer(make([model[1].weight]), model, choice)


def _convert_without_matrices(choice: Any) -> None:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5))
    convert_optimizers([torch.optim.AdamW(model[0].parameters())], model, choice=choice)


def _after_a_step(parameters: Any) -> Any:
    optimizer = torch.optim.AdamW(parameters)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    return optimizer


def _add_group(kind: Any, **options: Any) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3, 2))])
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))], **options})
    finally:
        assert len(optimizer.param_groups) == 1


def _node_layout(*shape: int) -> None:
    NodeLayout(None).of_this_node(torch.zeros(shape), nn.Parameter(torch.zeros(4, 3)))


def _axes(*axes: str) -> Any:
    """A mesh of two ranks on an axis, seen from the first one."""
    return SimpleNamespace(ndim=len(axes), mesh_dim_names=axes, size=lambda: 2, get_local_rank=lambda: 0)


def _half_on_meta() -> nn.Module:
    model = _mlp()
    model[0].weight = nn.Parameter(model[0].weight.to("meta"))
    return model


def _two_dtypes() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].bias = nn.Parameter(model[0].bias.to(torch.bfloat16))
    return model


def _parts_and_more() -> None:
    net = chain(4)
    net.scale = nn.Parameter(torch.ones(3))
    check_parameters(net, find_staged_model(net).parts)


def _one_context_rank(batch: Any, **options: Any) -> None:
    split_sequence(batch, _axes("context"), **options)


_GROUP_KEYS = {
    "muon_lr_facto": "a param group: .*did you mean muon_lr_factor",
    "hyperball": "a param group: hyperball went",
    "learning_rate": "there is no option 'learning_rate'; did you mean lr",
    "wd": "did you mean weight_decay",
    "Momentum": "did you mean momentum",
    "use_muon": "did you mean algorithm='muon'",
    "adamw_patterns": "adamw_patterns is an option of .*, not of a param group",
    "weight_decay": "weight_decay must be finite and >= 0, got -2",
    "algorithm": "algorithm must be",
}
_SGD = {"base": "sgd"}
_NODES = [(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), _SGD, "momentum=0.9 would be a second one"),
          (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), _SGD, "weight_decay=0.5 is added to the gradient"),
          (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), _SGD, "maximize"),
          (lambda p: torch.optim.SGD(p, lr=0.1), {"base": "adamw"}, r"set FlexDeMoConfig\(base='sgd'\)"),
          (lambda p: torch.optim.Muon(p), _SGD, r"base='sgd'; set FlexDeMoConfig\(base='muon'\)"),
          (lambda p: torch.optim.Adam(p, weight_decay=0.1), {}, "in FlexDeMo it is not; use AdamW"),
          (lambda p: torch.optim.AdamW(p, amsgrad=True), {}, "amsgrad=True is not supported by FlexDeMo"),
          (lambda p: torch.optim.Adagrad(p), {}, "the Adagrad .*: AdamW, Adam, SGD, Muon"),
          (ParallelMuon, {}, "the ParallelMuon that configure_optimizers returned")]  # fmt: skip
MODELS = {
    "patterns": Table(
        _routes,
        [
            ({"muon_patterns": ["2.*"]}, r"2\.bias \(6,\) matches muon_patterns '2\.\*', but Muon takes .* 1-D"),
            ({"muon_patterns": ["2.wieght"]}, r"muon_patterns: pattern '2\.wieght' matches no parameter; .* 2\.weight"),
            ({"adamw_patterns": "0.weight"}, r"adamw_patterns must be a sequence of patterns, .* got '0\.weight'"),
            ({"adamw_patterns": ["0.weight"], "muon_patterns": ["*.weight"]}, r"0\.weight matches both"),
            ({"fused": {"0.weight": 4}}, r"0\.weight \(6, 4\) cannot be divided into 4 equal parts along dim 0 of si"),
            ({"fused": {"0.weight": (4, 1)}}, r"size 6 along dim 0, but the parts \(4, 1\) sum to 5"),
            ({"fused": {"*.bias": 2}}, r"fused pattern '\*\.bias' matches only parameters that are not on Muon: 0\.b"),
            ({"fused": {"0.weight": 2, "0.*": 3}}, r"0\.weight is matched by two .*, the second is fused: '0\.\*'"),
            ({"fused": {"0.weight": 2}, "fused_inputs": {"0.*": 2}}, r"0\.weight is matched by two .* fused_inputs: "),
            ({"fused_inputs": {"0.weight": 3}}, r"fused_inputs: 0\.weight \(6, 4\) .* into 3 .* along dim 1 of size 4"),
        ],
    ),
    "a stack that is fused": Table(
        lambda fused: route_module(nn.Bilinear(3, 4, 6), OptimizerConfig(fused=fused)),
        [(({"weight": 3},), "stack of matrices already")],
    ),
    "a step without matrices": Table(
        lambda *named: ParallelMuon([named]).step(), [(("norm.weight", nn.Parameter(torch.ones(3))), r"norm\.weight")]
    ),
    "a vector for Muon": Table(
        lambda name: ParallelMuon([{"params": [(name, nn.Parameter(torch.ones(3)))], "algorithm": "muon"}]).routes,
        [("fc.bias", r"fc\.bias \(3,\) is in a group with algorithm='muon'")],
    ),
    "a group of ParallelMuon": Table(
        lambda **options: _add_group(ParallelMuon, **options),
        [({key: -2.0}, words) for key, words in _GROUP_KEYS.items()],
    ),
    "a group of FlexDeMo": Table(
        lambda **options: _add_group(FlexDeMo, **options),
        [*(({key: -2.0}, _GROUP_KEYS[key]) for key in ("wd", "adamw_patterns")),
         ({"normuon": True}, "normuon is an option of ParallelMuon")],
    ),
    "an optimizer for nodes": Table(
        _convert, [((make, FlexDeMoConfig(**config)), words) for make, config, words in _NODES]
    ),
    "an optimizer that took steps": Table(
        _convert, [((_after_a_step, each), "AdamW has optimizer state already") for each in ("auto", FlexDeMoConfig())]
    ),
    "a FlexDeMo without nodes": Table(
        _convert, [((FlexDeMo, each), r"or Trainer\(strategy='flexdemo'\)") for each in ("auto", "keep", MuonConfig())]
    ),
    "nothing for Muon": Table(
        _convert_without_matrices,
        [("auto", "(?s)0.weight.*optimizer='keep'"), (FlexDeMoConfig(), "(?s)0.weight.*base='adamw'")],
    ),
    "another layout": Table(
        lambda model: FlexDeMo(model).attach(model, Layout()),
        [(nn.Linear(4, 3), "takes gradients that FSDP2 has averaged inside of a node")],
    ),
    "the mesh of FlexDeMo": Table(
        lambda *axes: NodeLayout(_axes(*axes)),
        [(axes, "takes a mesh with the axes") for axes in (("shard", "replicate"), ("replicate",), ("a", "b", "c"))],
    ),
    "the state of another parameter": Table(
        _node_layout,
        [
            (shape, r"parameter of shape \(4, 3\) has the shape .*\(number of nodes, \*shape\)")
            for shape in ((4, 3), (2, 4, 4), (2, 12))
        ],
    ),
    "lazy layers": Table(
        parameter_uses, [(nn.Sequential(nn.LazyLinear(3)), r"0\.weight of lazy module LazyLinear has no shape yet")]
    ),
    "a partial sum": Table(sharded_axes, [(([Partial()], (2,), "layer.w"), r"layer\.w has the placement")]),
    "wrap_policy": Table(
        lambda policy: find_units(nn.Sequential(nn.ModuleList([_mlp(), _mlp()])), policy),
        [
            (["Blok"], "wrap_policy: no module is a Blok; the model has Linear, .*ModuleList"),
            ("all", "wrap_policy must be 'auto'"),
        ],
    ),
    "modules that cannot be sharded": Table(plan_units, [
        (_half_on_meta(), "0: weight on the meta device, but bias not"),
        (nn.Sequential(nn.LazyLinear(3)), r"0\.weight of lazy module LazyLinear has no shape yet"),
    ]),
    "a complex parameter": Table(lambda p: ParallelMuon([p]).routes, [
        (nn.Parameter(torch.ones(3, 2).to(torch.complex64)), r"\(3, 2\) is complex: train what torch\.view_as_re"),
    ]),
    "a mode": Table(
        lambda name: make_mode(name, _axes("shard"), ModeOptions()),
        [("zero3", r"one of \('fsdp', 'zero2', 'ddp', 'none'\), got 'zero3'")],
    ),
    "two dtypes": Table(
        lambda model: dtype_units(model, []),
        [(_two_dtypes(), r"0\.bias is bfloat16, but its FSDP2 unit Sequential is float32")],
    ),
    "clipping": Table(
        lambda clip, bad: clip([], bad),
        [((clip_norm_, -1.0), "max_norm"), ((clip_norm_, NAN), "max_norm"), ((clip_value_, NAN), "max_value")],
    ),
    "a divisor": Table(
        lambda bad: make_mode("none", _axes("shard"), ModeOptions()).set_gradient_divisor(bad),
        [(bad, "divisor of the gradients must be positive and finite") for bad in (0.0, INF, NAN)],
    ),
    "split_sequence": Table(
        _one_context_rank,
        [
            (({"a": {"tokens": torch.zeros(2, 7)}},), r"a\.tokens \(2, 7\) has 7 positions in dimension 1"),
            ({"batch": {"tokens": torch.zeros(2, 8)}, "keys": ("token",)}, "keys names token, but the batch has no"),
            ({"batch": {"tokens": torch.zeros(2, 8)}, "keys": "tokens"}, "keys must be a collection of names"),
            (({"tokens": torch.zeros(8), "name": "a"},), r"no tensor of the batch \(dict\) has a dimension 1"),
        ],
    ),
    "two context axes": Table(
        lambda call: call(torch.zeros(2, 8), _axes("shard", "context")),
        [(each, "one axis of a mesh, got 2 axes") for each in (split_sequence, gather_sequence)],
    ),
    "stages": Table(
        lambda num_stages, first_parts: choose_stages(find_staged_model(chain(4)), num_stages, first_parts),
        [
            ((7, None), "has 6 parts, too few for 7 stages"),
            ((2, ["parts.0", "part.1"]), r"names part\.1; the parts of the model are parts\.0, parts\.1"),
            ((2, ["parts.0", "parts.1", "parts.2"]), r"of the 2 stages in order, beginning with parts\.0; got"),
        ],
    ),
    "a parameter of no part": Table(_parts_and_more, [((), r"scale \(3,\) belongs to no part of the pipeline")]),
    "a pipeline": Table(
        lambda **options: Pipeline(**{"num_ranks": 4, "num_microbatches": 8, **options}),
        [
            ({"num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
            ({"memory_limit": NAN}, "memory_limit=nan holds less"),
            ({"memory_limit": 1, "stages_per_rank": 2}, "memory_limit=1 holds less than one .* at least 2"),
        ],
    ),
    "costs of a pipeline": Table(
        StageCosts,
        [
            ({"communication": -1}, "communication must be a finite number of at least 0, got -1"),
            ({"forward": (1.0, 2.0)}, r"forward must be a finite number of at least 0, got \(1.0, 2.0\)"),
        ],
    ),
    "the cost of an op": Table(StageCosts().of, [("X", r"kind must be one of \('F', 'B', 'I', .*, got 'X'")]),
    "a schedule": Table(
        mock.patch.dict(SCHEDULES, {"of nothing": lambda _: None})(
            lambda name, m, v: make_order(name, Pipeline(num_ranks=4, num_microbatches=m, stages_per_rank=v))
        ),
        [
            (("gpipe", 8, 2), "gpipe needs exactly 1 stages per rank, got stages_per_rank=2; .* interleaved_1f1b"),
            (("1f1b", 3, 1), "1f1b needs at least 4 micro-batches on 4 ranks, got num_microbatches=3; split"),
            (("interleaved_1f1b", 9, 2), r"divisible by max\(1, num_microbatches // num_ranks\) = 2, .*=9 .*; take 8"),
            (("zb_v", 8, 1), "zb_v needs exactly 2 stages per rank, got stages_per_rank=1; set it to 2"),
            (("zbv", 8, 2), "there is no schedule 'zbv'; did you mean 'zb_v'"),
            (("of nothing", 8, 1), "schedule 'of nothing': 0 ranks .* num_ranks=4; return a list of nodes for each"),
        ],
    ),
    "too many activations": Table(
        lambda limit: make_order("1f1b", Pipeline(num_ranks=4, num_microbatches=8, memory_limit=limit)),
        [(3, r"1f1b.: rank 0 holds 4 activations, memory_limit=3; .* v_min")],
    ),
    "a model that transformers has sharded": Table(
        lambda model: lightning_muon.hf.Trainer(model),
        [(SimpleNamespace(_device_mesh="a mesh"), "does not train models that it has sharded")],
    ),
}  # fmt: skip
