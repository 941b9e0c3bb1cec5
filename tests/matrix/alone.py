"""What a row trains, by one process: whole batches, whole matrices, and the optimizers of ``tests/reference``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from lightning_muon.flexdemo.replicators import DiLoCo, ExchangeStep, Full, NoReplication, Random, Slicing, Striding
from lightning_muon.math.newton_schulz import FAST, steps_of
from tests.matrix.row import BETAS, EPS, LR, WEIGHT_DECAY, Found, Row
from tests.reference import diloco, flexdemo, muon
from tests.reference.muon_and_adamw import MuonAndOther
from tests.support import family

# What Muon takes of each model, by the rules of docs/lightning.md.
ON_MUON = {
    "net": ("*.up.*weight", "*.down.weight", "*.qkv.weight", "*.conv.weight", "*.experts", "*.inputs_first.weight",
            "*.transposed.weight", "*.branches.*.weight"),
    "llama": ("*proj.weight",),
    "tensors": ("*",),
}  # fmt: skip
ORTHOGONALIZATIONS: dict[Any, muon.Orthogonalization] = {family.muon_eq: muon.muon_eq, family.muon_plus: muon.muon_plus}


def alone(row: Row) -> Found:
    """Weights at the end, and the loss of each step. With FlexDeMo's nodes in float64, and the weights are theirs."""
    model = row.make_model().to(torch.float64 if row.has_nodes else row.dtype)
    computing = copy.deepcopy(model).bfloat16() if row.has_mains else model
    for main, weight in zip(model.parameters(), computing.parameters(), strict=True):
        main.data.copy_(weight.data)
        weight.grad_dtype = main.dtype
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer, losses = _optimizer(row, named), list[float]()
    for step in range(row.steps):
        optimizer.rate = row.rate(step)
        total, gradients = 0.0, list[dict[str, Tensor]]()
        for node in range(row.num_nodes):
            optimizer.put_weights_of(node)
            loss, gradient = _gradients(row, computing, step, node)
            total, gradients = total + loss, [*gradients, gradient]
        if row.max_norm is not None and row.has_nodes:
            _clip_nodes_(row, gradients)
        optimizer.step(gradients)
        for main, weight in zip(model.parameters(), computing.parameters(), strict=True):
            weight.data.copy_(main.data)
        losses.append(total)
    optimizer.put_weights_of(None)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    if isinstance(optimizer, _FlexDeMo) and row.model == "tensors" and row.num_nodes > 1:
        residuals = optimizer.reference.residuals
        weights |= {f"{name}.residual": torch.stack([of_node[name] for of_node in residuals]) for name in named}
    return weights, losses if row.model != "tensors" else []


def _gradients(row: Row, model: Any, step: int, node: int) -> tuple[float, dict[str, Tensor]]:
    """The share of the loss, and the clipped gradients, of the ranks of a node, or of all."""
    if row.model == "tensors":
        drawn = row.gradients(step, node)
        for rank, names in row.missing.items() if not row.has_nodes else ():
            for name in names:  # Zero there, of replicas as a part of the mean.
                is_sharded = row.options["shard_dim"] == 0
                part = drawn[name].chunk(row.ranks)[rank] if is_sharded else drawn[name]
                part.mul_(0.0 if is_sharded else 1 - 1 / row.ranks)
        return 0.0, drawn
    model.zero_grad()
    size, total, count, sums = row.num_data_ranks // row.num_nodes, 0.0, 1.0, dict[Tensor, Any]()
    if row.has_tokens:
        micro_batches = [row.batch(step, index) for index in range(row.accumulate)]
        count = sum(map(row.num_tokens, micro_batches)) / row.num_nodes
    for rank in range(node * size, (node + 1) * size):
        for index in range(row.accumulate):
            batch = row.batch(step, index, rank)
            loss = row.loss(model, batch)
            divisor = row.accumulate * (1 if row.has_mains else size)
            (loss if row.has_tokens else loss / divisor).backward()
            total += loss.item()
        for parameter in model.parameters() if row.has_mains else ():
            if parameter.grad is not None:  # It travels in 16 bits.
                sums[parameter] = sums.get(parameter, 0) + parameter.grad.bfloat16().float()
                parameter.grad = None
    for parameter, gradient in sums.items():
        parameter.grad = gradient / size
    for parameter in model.parameters() if row.has_tokens else ():
        if parameter.grad is not None:
            parameter.grad /= count
    clipped = model.parameters()
    is_muon = row.optimizer != "keep" and (not row.has_nodes or row.config.base == "muon")
    if row.options.get("clip_groups") == "elementwise" and is_muon:
        clipped = [each for name, each in model.named_parameters() if not is_on_muon(row, name, each)]
    if row.max_norm is not None and not row.has_nodes:
        nn.utils.clip_grad_norm_(clipped, row.max_norm)
    if row.max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), row.max_value)
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    # What the ranks report, on average.
    return total / row.num_data_ranks / (1 if row.has_tokens else row.accumulate), found


def _clip_nodes_(row: Row, gradients: Sequence[Mapping[str, Tensor]]) -> None:
    """By the mean of the squares of all nodes; in a loop of its own each node by its own norm."""
    squares = torch.stack([sum(each.square().sum() for each in node.values()) for node in gradients])  # type: ignore[misc]
    norms = squares.sqrt() if row.framework == "fully_shard" else squares.mean().sqrt().expand(len(gradients))
    for node, norm in zip(gradients, norms, strict=True):
        for gradient in node.values():
            gradient.mul_((row.max_norm / norm).clamp(max=1.0))


def is_on_muon(row: Row, name: str, tensor: Tensor) -> bool:
    config: Any = row.optimizer if isinstance(row.optimizer, Mapping) else {}
    is_tied = "tied" in row.parts and name == "embedding.weight"

    def matches(key: str) -> bool:
        names = [name, "tail.head.weight"] if is_tied else [name]
        return any(fnmatchcase(each, pattern) for each in names for pattern in config.get(key, ()))

    if matches("muon_patterns"):
        return True
    is_other = matches("adamw_patterns") or tensor.ndim < 2
    return not is_other and any(fnmatchcase(name, pattern) for pattern in ON_MUON[row.model])


def matrices_of(row: Row, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Views of what Muon takes for matrices (outputs, inputs), for a stack of them, or for a convolution."""
    if "conv." in name:
        tensor = tensor.unsqueeze(-1)
    if name.endswith("inputs_first.weight"):
        tensor = tensor.T
    if name.endswith("transposed.weight"):  # (inputs, outputs, places): each output of each place is a neuron.
        tensor = tensor.flatten(1).T
    parts = [tensor]
    for dim, key in enumerate(("fused", "fused_inputs")):
        for pattern, sizes in (row.optimizer.get(key, {}) if isinstance(row.optimizer, Mapping) else {}).items():
            if fnmatchcase(name, pattern):
                parts = list(tensor.split(tensor.shape[dim] // sizes if isinstance(sizes, int) else sizes, dim))
    return {f"{name} {number}": part for number, part in enumerate(parts)}


def _optimizer(row: Row, named: Mapping[str, nn.Parameter]) -> Any:
    if not row.has_nodes:
        return _Whole(row, named)
    return _DiLoCo(row, named) if isinstance(row.config.replicator, DiLoCo | NoReplication) else _FlexDeMo(row, named)


class _Whole:
    """Muon for the matrices and torch's AdamW for the rest, or for all the optimizer of the program."""

    def __init__(self, row: Row, named: Mapping[str, nn.Parameter]) -> None:
        self.row, self.rate, config = row, 1.0, dict(row.optimizer) if isinstance(row.optimizer, Mapping) else {}
        muon = named.items() if row.optimizer != "keep" else ()
        self.matrices = {name for name, each in muon if is_on_muon(row, name, each)}
        rest = [(name, each) for name, each in named.items() if name not in self.matrices]
        keys = ("momentum", "nesterov", "adjust_lr_fn", "normuon", "normuon_beta2")
        options = {key: config[key] for key in keys if key in config}
        if "orthogonalize" in config:
            options["orthogonalization"] = ORTHOGONALIZATIONS[config["orthogonalize"]]
        weights = self._cut({name: each.detach() if name in self.matrices else each for name, each in named.items()})
        self.reference = MuonAndOther(
            weights,
            weights.keys() - dict(rest).keys(),
            lambda _: row.make_optimizer(nn.Module(), rest),
            lr=LR,
            muon_lr_factor=config.get("muon_lr_factor", MEASURED_MUON_LR_FACTOR if row.program == "AdamW" else 1.0),
            weight_decay=WEIGHT_DECAY,
            dtype=torch.bfloat16 if config.get("compute_dtype") == "bfloat16" else row.dtype,
            steps=_steps(config),
            **options,
        )

    def _cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = [matrices_of(self.row, *each) if each[0] in self.matrices else dict([each]) for each in tensors.items()]
        return {name: part for of_tensor in parts for name, part in of_tensor.items()}

    def put_weights_of(self, node: int | None) -> None:
        pass

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        self.reference.set_rate(LR * self.rate)
        self.reference.step(self._cut(gradients[0]))


def _steps(config: Mapping[str, Any]) -> Any:
    """(a, b, c) of each step of Newton-Schulz."""
    coefficients, number = config.get("ns_coefficients", muon.COEFFICIENTS), config.get("ns_steps", 5)
    if config.get("ns_quality") == "fast":
        return FAST
    return steps_of(coefficients, number) if isinstance(coefficients, str | tuple) else coefficients


class _FlexDeMo:
    """Nodes that exchange components: the reference has weights and residuals of its own, in float64."""

    def __init__(self, row: Row, named: Mapping[str, nn.Parameter]) -> None:
        self.named, self.rate, config = named, 1.0, row.config
        keys = ("base", "merge", "decay", "value_format", "dense_below")
        rules: dict[str, Any] = {key: getattr(config, key) for key in keys} | {"sign": config.takes_sign, "lr": LR}
        rules |= {"num_nodes": row.num_nodes, "ranks_per_node": row.num_data_ranks // row.num_nodes}
        rules |= {"weight_decay": WEIGHT_DECAY, "betas": BETAS, "eps": EPS}
        rules |= {"muon_lr_factor": config.lr_factor_over_adamw if row.program == "AdamW" else 1.0}
        if config.orthogonalize != "newton_schulz":
            rules["orthogonalization"] = ORTHOGONALIZATIONS[config.orthogonalize]
        choice = choice_of(config.replicator)
        rules |= {"choose": choice} if choice else vars(config.replicator)
        is_flat = {name: each.ndim > 1 and each.numel() >= config.dense_below for name, each in named.items()}
        # In the order in which backward finishes them: in one bucket, or each in its own.
        flat = [name for name in reversed(named) if is_flat[name]]
        matrices = [name for name, each in named.items() if is_on_muon(row, name, each)]
        self.reference = flexdemo.ReferenceFlexDeMo(
            {name: each.detach() for name, each in named.items()},
            flexdemo.Rules(**rules),
            parts=([[name] for name in flat] if config.bucket_bytes == 4 else [flat]) if choice and flat else (),
            matrices=matrices if config.base == "muon" else (),
            replicated=[name for name, each in named.items() if not each.ndim],
        )

    @torch.no_grad()
    def put_weights_of(self, node: int | None) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(self.reference.weights[name])

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        self.reference.set_rate(LR * self.rate)
        self.reference.step(gradients)


def choice_of(replicator: Any) -> flexdemo.Choice | None:
    """Which elements of a buffer travel; ``None`` for blocks of coefficients."""
    if isinstance(replicator, Random):  # That all nodes draw the same, and all elements, is tested elsewhere.
        return lambda numel, step, part: (
            replicator.encode(torch.arange(numel, dtype=torch.float32)[None], ExchangeStep(step, part))
            .values[0].long().tolist()
        )  # fmt: skip
    if isinstance(replicator, Full):
        return lambda numel, step, part: range(numel)
    if not isinstance(replicator, Striding | Slicing):
        return None
    period = round(1 / replicator.rate)
    if isinstance(replicator, Striding):
        return lambda numel, step, part: range(step % period, numel, period)
    return lambda numel, step, part: range(step % period * numel // period, (step % period + 1) * numel // period)


class _DiLoCo:
    """Nodes that train by themselves, and average."""

    def __init__(self, row: Row, named: Mapping[str, nn.Parameter]) -> None:
        self.named, self.rate, config = named, 1.0, row.config
        never = DiLoCo(period=10**6)
        outer = vars(config.replicator if isinstance(config.replicator, DiLoCo) else never)
        inner = {"base": config.base, "momentum": config.momentum, "inner_nesterov": config.nesterov}
        matrices = [name for name, each in named.items() if is_on_muon(row, name, each)]
        rules = diloco.Rules(
            num_nodes=row.num_nodes, lr=LR, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS, matrices=matrices,
            **outer, **inner,
        )  # fmt: skip
        self.reference = diloco.ReferenceDiLoCo({name: each.detach() for name, each in named.items()}, rules)

    @torch.no_grad()
    def put_weights_of(self, node: int | None) -> None:
        """Those that are common if nobody trains any more."""
        weights = self.reference.common if node is None else self.reference.nodes[node]
        for name, parameter in self.named.items():
            parameter.copy_(weights[name])

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        self.reference.step(gradients)
