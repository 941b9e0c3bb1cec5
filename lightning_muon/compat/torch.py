"""Every private name of torch that the package uses, one function each; tests/unit/compat fails when one moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Placement, _utils


def cpu_multiplies_bfloat16_fast() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX-512 BF16 or AMX).

    Uses ``torch.cpu._is_avx512_bf16_supported`` and ``torch.cpu._is_amx_tile_supported`` (2.11 to 2.13).
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def default_store() -> dist.Store:
    """Key-value store of the default process group.

    Uses ``torch.distributed.distributed_c10d._get_default_store`` (2.11 to 2.13).
    """
    return dist.distributed_c10d._get_default_store()


def init_fsdp_root(root: FSDPModule) -> None:
    """Make ``root`` the root of the FSDP2 units inside it, as its first forward would; a no-op if it is one.

    Uses ``FSDPModule._get_fsdp_state`` and ``FSDPState._lazy_init`` (2.11 to 2.13).
    """
    root._get_fsdp_state()._lazy_init()


def local_shape_and_offset(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of the shard at any mesh ``coordinate``, not only at the calling rank's.

    Uses ``torch.distributed.tensor._utils._compute_local_shape_and_global_offset`` (2.11 to 2.13).
    """
    local_shape, offset = _utils._compute_local_shape_and_global_offset(
        tuple(shape), tuple(mesh_shape), list(coordinate), tuple(placements)
    )
    return tuple(local_shape), tuple(offset)
