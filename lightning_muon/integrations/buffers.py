"""Buffers, which FSDP2 leaves to each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers of rank 0. Collective over all ranks; every rank must call it.

    Each rank updates running statistics from its own batches. DDP sends those of rank 0 before every forward pass;
    FSDP2 never does, and a checkpoint of shards would take each buffer from another rank.
    """
    if dist.get_world_size() == 1:
        return
    pending = []
    for buffer in module.buffers():
        if isinstance(buffer, DTensor) or buffer.numel() == 0:
            continue
        # Bytes travel: backends do not carry every dtype.
        payload = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
        pending.append((buffer, payload, dist.broadcast(payload, src=0, async_op=True)))
    for buffer, payload, work in pending:
        work.wait()
        buffer.copy_(payload.view(buffer.dtype).view(buffer.shape))
