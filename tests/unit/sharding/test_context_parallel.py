"""Batches that are divided over context ranks; the ranks are played by one process."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon.sharding.context_parallel import split_sequence


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
