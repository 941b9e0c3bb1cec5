"""Which parts of a model are which stage, and the removal of those of other ranks."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_muon.compat.torch import is_compiled
from lightning_muon.pipeline.model import Part, StagedModel


class Absent(nn.Module):
    """In the place of a module of another stage: hands on the hidden states, and adds nothing to them."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # A forward may ask a layer for its kind, for example the one of its attention.
        for name, value in vars(original).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """``hidden`` itself; 0 for what would look positions up in a table."""
        return hidden if hidden.is_floating_point() else torch.zeros((), device=hidden.device)


def choose_stages(model: StagedModel, num_stages: int, first_parts: Sequence[str] | None = None) -> list[list[Part]]:
    """The parts of each stage: as ``first_parts`` says, the first one of each, or with little work in the largest.

    The work of a part is taken to be its number of elements in matrices, embeddings (which are looked up) apart: the
    FLOPs of a forward are twice that for each token.

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
        starts = _balanced([sum(each.numel() for each in matrices_of(part)) for part in parts], num_stages)
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


def matrices_of(part: Part) -> list[nn.Parameter]:
    """What is multiplied with activations: all parameters of two and more dimensions that are looked up in no table."""
    return [
        parameter
        for module in part.modules
        for child in module.modules()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
        if parameter.ndim > 1
    ]


def _balanced(work: Sequence[int], num_stages: int) -> list[int]:
    """Where runs of parts begin so that the run with the most work has least; none is empty."""
    total = [0]
    for each in work:
        total.append(total[-1] + each)
    # (work of the largest run, starts) of the parts up to each, in so many runs.
    best: list[tuple[int, list[int]]] = [(total[end], [0]) for end in range(len(total))]
    for count in range(2, num_stages + 1):
        best = [
            min(
                ((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], cut]) for cut in range(count - 1, end)),
                default=(total[-1], []),
            )
            for end in range(len(total))
        ]
    return best[-1][1]


def check_plain(module: nn.Module) -> None:
    """Raise ``ValueError`` for a model that torch.compile or fully_shard has changed; local."""
    for name, child in module.named_modules():
        where = f"{name or 'the model'} ({type(child).__name__})"
        if isinstance(child, FSDPModule):
            raise ValueError(f"{where} is sharded already; a pipeline shards its stages itself, so remove fully_shard")
        # A backward in two parts does not find the gradients of inputs in a compiled graph (pytorch #161904).
        if is_compiled(child):
            raise ValueError(f"{where} is compiled; stages of a pipeline are not, so remove torch.compile")


def check_parameters(module: nn.Module, parts: Sequence[Part]) -> None:
    """Raise ``ValueError`` for parameters that belong to no part: no stage would train them. Local."""
    inside = {parameter for part in parts for child in part.modules for parameter in child.parameters()}
    for name, parameter in module.named_parameters():
        if parameter not in inside:
            raise ValueError(
                f"{name} {tuple(parameter.shape)} belongs to no part of the pipeline ({parts[0].name} to "
                f"{parts[-1].name}), so no stage would train it; move it into one of them"
            )


def untie(parts: Sequence[Part]) -> list[list[tuple[Part, nn.Module, str]]]:
    """Give each part a copy of its own of parameters that several parts share; the places of the copies. Local."""
    holders: dict[Tensor, list[tuple[Part, nn.Module, str]]] = {}
    for part in parts:
        for module in part.modules:
            for child in module.modules():
                for name, parameter in child.named_parameters(recurse=False):
                    holders.setdefault(parameter, []).append((part, child, name))
    tied: list[list[tuple[Part, nn.Module, str]]] = []
    for parameter, places in holders.items():
        if len({id(part) for part, _, _ in places}) == 1:
            continue
        copies: dict[int, nn.Parameter] = {}
        for part, child, name in places:
            if part is not places[0][0]:
                if id(part) not in copies:
                    copies[id(part)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(child, name, copies[id(part)])
        # One place for each part.
        tied.append(list({id(part): (part, child, name) for part, child, name in reversed(places)}.values())[::-1])
    return tied


def remove(parts: Collection[Part]) -> None:
    """Free the parts of other ranks. Names of what is left do not change; local."""
    for part in parts:
        for parent, name in part.places:
            setattr(parent, name, Absent(parent.get_submodule(name)))


@contextmanager
def only(parts: Mapping[int, Sequence[Part]], stage: int) -> Generator[None]:
    """Let the parts of other stages of this rank hand on what they get; local."""
    hidden = [place for other, own in parts.items() if other != stage for part in own for place in part.places]
    present = [(parent, name, parent.get_submodule(name)) for parent, name in hidden]
    for parent, name, module in present:
        setattr(parent, name, Absent(module))
    try:
        yield
    finally:
        for parent, name, module in present:
            setattr(parent, name, module)
