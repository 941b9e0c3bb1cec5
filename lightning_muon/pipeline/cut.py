"""Cuts a model: chooses the parts of each stage, and removes those of other ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.compat.torch import is_compiled
from lightning_muon.pipeline.model import CausalLM, PPPlanModel, next_token_loss
from lightning_muon.pipeline.parts import Part, StagedModel, missing_methods
from lightning_muon.sharding.base import JOINS_STATE_DICTS


@dataclass(frozen=True)
class Stages:
    """The stages of a model, and the parts of those that this rank has."""

    model: StagedModel
    parts: Mapping[int, Sequence[Part]]  # Of each stage of this rank.
    rank_of: Mapping[int, int]  # The rank of each stage.
    group: AxisGroup  # The ranks of the pipeline.
    device: torch.device
    # For each parameter that several stages have: these, and for those of this rank the module that holds it, and its
    # name there.
    tied: Sequence[tuple[Sequence[int], Mapping[int, tuple[nn.Module, str]]]]

    @property
    def last(self) -> int:
        """The last stage of all."""
        return len(self.rank_of) - 1

    @property
    def modules(self) -> list[nn.Module]:
        """Modules of the parts of this rank, in the order of forward."""
        return [module for stage in sorted(self.parts) for module in self.modules_of(stage)]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """Modules of one of its stages."""
        return [module for part in self.parts[stage] for module in part.modules]

    def copies(self) -> set[Tensor]:
        """Parameters of this rank that are copies of one of an earlier stage; norms count that one instead."""
        places = [(stages[0], stage, place) for stages, own in self.tied for stage, place in own.items()]
        return {getattr(*place) for first, stage, place in places if stage != first}


class Absent(nn.Module):
    """Stands for a module of another stage: returns the hidden states unchanged."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # A forward may ask a layer for its kind, for example the one of its attention.
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    @override
    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Raise ``ValueError``: a state dict of what holds this module would lack weights; local."""
        if not JOINS_STATE_DICTS.get():
            raise ValueError(
                f"state_dict would lack {prefix.rstrip('.')} and all else that other ranks of the pipeline have; call "
                "lightning_muon.full_state_dict(model) on every rank, which gives all of it to rank 0"
            )
        return super().state_dict(*args, prefix=prefix, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the first argument, the hidden states; 0 if it holds integers, as for a table of positions."""
        hidden: Tensor = args[0] if args else next(iter(kwargs.values()))
        return hidden if hidden.is_floating_point() else torch.zeros((), device=hidden.device)


def choose_stages(model: StagedModel, num_stages: int, first_parts: Sequence[str] | None = None) -> list[list[Part]]:
    """The parts of each stage, from ``first_parts``, the first one of each, or by :func:`balance`; local.

    Stages then have about equal numbers of elements in matrices, to which the arithmetic of a token is proportional.

    Raises:
        ValueError: If there are fewer parts than stages, or no such parts in this order.
    """
    parts = model.parts
    if len(parts) < num_stages:
        raise ValueError(
            f"the model has {len(parts)} parts, too few for {num_stages} stages (pipeline_size * "
            "pipeline_stages_per_rank)"
        )
    if first_parts is None:
        starts = balance([sum(each.numel() for each in matrices_of(part)) for part in parts], num_stages)
    else:
        names = [part.name for part in parts]
        unknown = [name for name in first_parts if name not in names]
        if unknown:
            raise ValueError(
                f"pipeline_split names {', '.join(unknown)}; the parts of the model are {', '.join(names)}"
            )
        starts = [names.index(name) for name in first_parts]
        if len(starts) != num_stages or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(
                f"pipeline_split must name the first part of each of the {num_stages} stages in order, beginning with "
                f"{names[0]}; got {', '.join(first_parts)}"
            )
    ends = [*starts[1:], len(parts)]
    return [list(parts[start:end]) for start, end in zip(starts, ends, strict=True)]


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Indices at which runs of parts begin, none of them empty, whose largest sum of costs is the lowest."""
    total = [0, *accumulate(costs)]
    # (cost of the largest run, starts) of the first parts, for each number of these, in a growing number of runs.
    best: list[tuple[float, list[int]]] = [(-math.inf, []), *[(math.inf, list[int]())] * len(costs)]
    for _ in range(num_stages):
        best = [
            min(
                ((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], cut]) for cut in range(end)),
                default=(math.inf, []),
            )
            for end in range(len(total))
        ]
    return best[-1][1]


def matrices_of(part: Part) -> list[nn.Parameter]:
    """Parameters that are multiplied with activations: all of two and more dimensions, except those of embeddings."""
    return [
        parameter
        for module in part.modules
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
        if parameter.ndim > 1
    ]


def check_plain(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model that torch.compile or fully_shard has changed; local."""
    for name, child in module.named_modules():
        where = f"{name or 'the model'} ({type(child).__name__})"
        if isinstance(child, FSDPModule):
            raise ValueError(f"{where} is sharded already; a pipeline shards its stages itself, so remove fully_shard")
        # Its hooks take each part of a backward for the whole (pytorch #144530).
        if isinstance(child, DistributedDataParallel):
            raise ValueError(
                f"{where} averages gradients itself; a pipeline does so for each stage, so give its module"
            )
        # A backward in two parts does not find the gradients of inputs in a compiled graph (pytorch #161904).
        if is_compiled(child):
            raise ValueError(f"{where} is compiled; stages of a pipeline are not, so remove torch.compile")


def check_outputs(module: nn.Module, model: StagedModel) -> None:
    """Raise ``ValueError`` if a model run stage by stage computes something else than as a whole. Local.

    Each part is run as a stage, with a few tokens in evaluation mode; only for models that no test of ours covers.
    """
    if not isinstance(model, PPPlanModel) or model.is_known:
        return
    modes = {child: child.training for child in model.root.modules()}
    model.root.eval()
    try:
        check_parameters(model.root, model.parts)
        why = _difference(model, model.probe())
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    finally:
        for child, is_training in modes.items():
            child.training = is_training
    if why:
        names = ", ".join(part.name for part in model.parts)
        raise missing_methods(
            module, f"the forward of {type(model.root).__name__} cannot be run on stages that have {names} ({why})"
        )


@torch.no_grad()
def _difference(model: PPPlanModel, inputs: Any) -> str:
    """Say how the outputs of stages and of the model differ for a small batch; empty if they do not."""
    if any(parameter.is_meta for parameter in model.root.parameters()):
        return "what they compute is unknown while the weights are on the meta device"
    if isinstance(model, CausalLM):
        whole = model.root(**inputs, use_cache=False)
        expected = whole.logits
        inputs, target = CausalLM.split(model, inputs)
        total, count = next_token_loss(expected, target)
        if not _are_close(total / count, whole.loss.float()):
            return "its loss is not the cross-entropy of its labels alone, as without output_router_logits"
    else:
        expected = model.run(model.parts, None, inputs)
    stages = {index: [part] for index, part in enumerate(model.parts)}
    output: Any = None
    for index, parts in stages.items():
        with only(stages, index):
            output = model.run(parts, output, inputs)
    return "" if _are_close(output, expected) else "its output becomes another one"


def _are_close(found: Tensor, wanted: Tensor) -> bool:
    scale = float(wanted.nan_to_num().abs().max())
    # Kernels that add in different orders differ by a few roundings.
    return torch.allclose(found, wanted, rtol=0, atol=10 * torch.finfo(wanted.dtype).eps * scale, equal_nan=True)


def check_parameters(module: nn.Module, parts: Sequence[Part]) -> None:
    """Raise ``ValueError`` for parameters that belong to no part, so that no stage would train them. Local."""
    inside = {parameter for part in parts for child in part.modules for parameter in child.parameters()}
    for name, parameter in module.named_parameters():
        if parameter not in inside:
            raise ValueError(
                f"{name} {tuple(parameter.shape)} belongs to no part of the pipeline ({parts[0].name} to "
                f"{parts[-1].name}), so no stage would train it; move it into one of them"
            )


def untie(module: nn.Module, stages: Sequence[Sequence[Part]]) -> list[dict[int, tuple[nn.Module, str, str]]]:
    """Give each stage its own copy of parameters that several stages have. Local.

    Returns for each of them the stages, the first one with the original, and where each has its own: the module that
    holds it, its name there, and in ``module``.

    Raises:
        ValueError: If a stage would need two copies of one.
    """
    names = {child: name for name, child in module.named_modules()}
    holders: dict[Tensor, dict[Part, list[tuple[int, nn.Module, str]]]] = {}
    for stage, parts in enumerate(stages):
        for part in parts:
            for child in (child for each in part.modules for child in each.modules()):
                for name, parameter in child.named_parameters(recurse=False):
                    holders.setdefault(parameter, {}).setdefault(part, []).append((stage, child, name))
    tied: list[dict[int, tuple[nn.Module, str, str]]] = []
    for parameter, of_part in holders.items():
        if len(of_part) == 1:
            continue
        for places in list(of_part.values())[1:]:
            copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for _, child, name in places:
                setattr(child, name, copy)
        firsts = [(stage, (child, name, f"{names[child]}.{name}")) for (stage, child, name), *_ in of_part.values()]
        tied.append(dict(firsts))
        if len(tied[-1]) < len(firsts):
            raise ValueError(
                f"{' and '.join(place[2] for _, place in firsts)} are one parameter, and more than one of these parts "
                "is in a stage, where their gradients would not be added; let pipeline_split put each into a stage of "
                "its own, or share it inside of one part"
            )
    return tied


def free(parts: Collection[Part]) -> None:
    """Free the parts of other ranks. Names of the remaining parameters do not change; local."""
    for part in parts:
        for parent, name in part.places:
            setattr(parent, name, Absent(parent.get_submodule(name)))


@contextmanager
def only(parts: Mapping[int, Sequence[Part]], stage: int) -> Generator[None]:
    """Context in which the parts of this rank's other stages return their input; local."""
    hidden = [place for other, own in parts.items() if other != stage for part in own for place in part.places]
    present = [(parent, name, parent.get_submodule(name)) for parent, name in hidden]
    for parent, name, module in present:
        setattr(parent, name, Absent(module))
    try:
        yield
    finally:
        for parent, name, module in present:
            setattr(parent, name, module)
