"""Numbers that a device has computed, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def start_reading(tensors: Sequence[Tensor]) -> Callable[[], list[list[Any]]]:
    """Begin to copy small tensors to the host; the result waits for the copy and gives the elements of each, flat.

    On CUDA all tensors of a device travel as one copy to pinned memory with one event behind it. So the host waits for
    what the device was given before this call, and not for what it is given afterwards. Local.

    Args:
        tensors: Of any dtypes and devices; may change after the call.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    pending = {
        device: _start_reading([tensors[index] for index in indices], device) for device, indices in by_device.items()
    }

    def read() -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in tensors]
        for device, indices in by_device.items():
            for index, values in zip(indices, pending[device](), strict=True):
                found[index] = values
        return found

    return read


def _start_reading(tensors: Sequence[Tensor], device: torch.device) -> Callable[[], list[list[Any]]]:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if device.type != "cuda":
        kept = [part.clone() for part in flat]
        return lambda: [part.tolist() for part in kept]
    # As bytes, since one dtype for all would round large integers.
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in flat])
    host = torch.empty(packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.current_stream(device).record_event()

    def read() -> list[list[Any]]:
        copied.synchronize()
        parts = host.split([part.numel() * part.element_size() for part in flat])
        # Copied, because a view of another dtype must begin at a multiple of its size.
        return [part.clone().view(whole.dtype).tolist() for part, whole in zip(parts, flat, strict=True)]

    return read
