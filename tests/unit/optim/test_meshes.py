"""Meshes of local tensors; the rest is in tests/distributed/test_one_rank_differs.py."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.optim.meshes import fail_on_all_meshes, group_by_mesh
from lightning_muon.params.layout import TensorLayout


def test_local_tensors_are_alone() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    (members,) = group_by_mesh(tensors, TensorLayout())
    assert members.axes.group is None
    assert all(one is other for one, other in zip(members.tensors, tensors, strict=True))


def test_without_other_ranks_an_error_is_just_raised() -> None:
    meshes = group_by_mesh([torch.ones(2)], TensorLayout())
    fail_on_all_meshes(None, meshes)
    with pytest.raises(ValueError, match="wrong"):
        fail_on_all_meshes(ValueError("wrong"), meshes)
