"""Batches that are divided over context ranks; the ranks are played by one process."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence


class OneAxis:
    """Stands in for the mesh of the context ranks, seen from one of them."""

    ndim = 1
    mesh_dim_names = ("context",)

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank


Pair = namedtuple("Pair", ["tokens", "mask"])


@dataclass
class Item:
    tokens: Tensor
    name: str


def _parts(batch: Any, size: int, **options: Any) -> list[Any]:
    return [split_sequence(batch, OneAxis(size, rank), **options) for rank in range(size)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_tensors_in_any_container_are_split(kind: Any) -> None:
    tokens, mask, lengths = torch.randint(99, (3, 4)), torch.rand(3, 4, 2), torch.tensor([4, 3, 4])
    batch = kind(
        pair=Pair(tokens, mask), items=[tokens, (mask, "text")], item=Item(tokens, "a"), lengths=lengths, step=7
    )
    for rank, part in enumerate(_parts(batch, 2)):
        mine = slice(2 * rank, 2 * rank + 2)
        assert type(part) is kind and type(part["pair"]) is Pair and type(part["items"][1]) is tuple
        for found in (part["pair"].tokens, part["items"][0], part["item"].tokens):
            assert torch.equal(found, tokens[:, mine])
        for found in (part["pair"].mask, part["items"][1][0]):
            assert torch.equal(found, mask[:, mine])
        assert (part["items"][1][1], part["item"].name, part["step"]) == ("text", "a", 7)
        assert part["lengths"] is lengths
    assert batch["pair"].tokens is tokens  # The batch itself stays whole.


@pytest.mark.parametrize("keys", [("tokens",), ("text",), ("text.tokens",), {"0"}])
def test_only_what_the_keys_name_is_divided(keys: Any) -> None:
    tokens, image = torch.randint(99, (3, 4)), torch.rand(3, 5)
    is_tuple = keys == {"0"}
    part = _parts((tokens, image) if is_tuple else {"text": {"tokens": tokens}, "image": image}, 2, keys=keys)[1]
    found, whole = part if is_tuple else (part["text"]["tokens"], part["image"])
    assert torch.equal(found, tokens[:, 2:]) and whole is image


def _with_two_axes() -> Any:
    mesh = OneAxis(2, 0)
    mesh.ndim, mesh.mesh_dim_names = 2, ("shard", "context")  # type: ignore[assignment]
    return mesh


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: _parts({"a": {"tokens": x[:, :7]}}, 2), r"a\.tokens \(2, 7\) has 7 positions in dimension 1"),
        (lambda x: _parts(x[:, :5], 2), r"the batch \(2, 5\) has 5 positions"),
        (lambda x: _parts({"tokens": x}, 2, keys=("token",)), "keys names token, but the batch has no tensor"),
        (lambda x: _parts({"tokens": x}, 2, keys="tokens"), "keys must be a collection of names"),
        (lambda x: _parts({"tokens": x[0], "name": "a"}, 2), r"no tensor of the batch \(dict\) has a dimension 1"),
        (lambda x: split_sequence(x, _with_two_axes()), "one axis of a mesh, got 2 axes"),
        (lambda x: gather_sequence(x, _with_two_axes()), "one axis of a mesh, got 2 axes"),
    ],
)
def test_what_cannot_work_is_an_error(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(torch.zeros(2, 8))
