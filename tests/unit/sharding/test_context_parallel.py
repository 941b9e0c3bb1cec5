"""Sequences that are divided over context ranks, and gathered again."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence
from tests.support.processes import ProcessPool

Pair = namedtuple("Pair", ["tokens", "mask"])


@dataclass
class Item:
    tokens: Tensor
    name: str


def _parts(batch: Any, size: int, **options: Any) -> list[Any]:
    """Of each rank, by stand-ins for its mesh."""
    mesh = mock.Mock(ndim=1, mesh_dim_names=("context",))
    mesh.size.return_value, mesh.get_local_rank.side_effect = size, range(size)
    return [split_sequence(batch, mesh, **options) for _ in range(size)]


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


def _gather(dim: int, dtype: torch.dtype) -> list[Tensor]:
    """The whole, and the gradient of this rank's part for a loss that weighs elements differently on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    whole = torch.arange(24 * mesh.size(), dtype=dtype).view(2, 3 * mesh.size(), 4).transpose(1, dim)
    part = split_sequence(whole, mesh, dim=dim).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    gathered = gather_sequence(part, mesh, dim)
    (gathered * whole * (mesh.get_local_rank() + 1)).sum().backward()
    assert part.grad is not None
    return [gathered.detach(), part.grad, whole]


@pytest.mark.parametrize(
    ("world_size", "dtype", "dim"), [(1, torch.float32, 1), (3, torch.float32, 1), (3, torch.bfloat16, 2)]
)
def test_gathering_gives_the_whole_and_its_backward_the_sum(
    gloo: ProcessPool, world_size: int, dim: int, dtype: torch.dtype
) -> None:
    for rank, (gathered, grad, whole) in enumerate(gloo.run(_gather, dim, dtype, world_size=world_size)):
        assert torch.equal(gathered, whole)
        # Small whole numbers: exact in float32, and one rounding of each product and of the sum in bfloat16.
        expected = (sum(range(1, world_size + 1)) * whole).chunk(world_size, dim)[rank]
        torch.testing.assert_close(grad, expected, rtol=0 if dtype == torch.float32 else 2**-6, atol=0)
