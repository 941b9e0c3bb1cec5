"""What evaluation needs on shards: equal buffers, and no inference mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def avoid_inference_mode(trainer: Any) -> None:
    """Evaluate under ``no_grad``.

    FSDP2 keeps the tensors into which it gathers weights. Made in inference mode they could not be used by a later
    training step. Lightning makes the same exception for its FSDPStrategy.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


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
