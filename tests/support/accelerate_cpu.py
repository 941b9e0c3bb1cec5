"""Runs Accelerate with FSDP2 on CPUs and gloo, which Accelerate itself does on accelerators only.

Accelerate takes ``ACCELERATE_USE_FSDP`` into account only where it has found CUDA or the like. Here it is told that it
has, while ``ACCELERATE_TORCH_DEVICE`` keeps everything on the CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState


@contextmanager
def fsdp2_on_cpu(
    *, replicate_size: int | None = None, shard_size: int | None = None, mixed_precision: str = "no", **variables: str
) -> Iterator[None]:
    """Inside, ``Accelerator()`` is one of FSDP2 on the CPU, in a process group with gloo.

    The environment is that which ``accelerate launch`` makes of a config file, and ``variables``. Without any size
    there is no ``parallelism_config``.
    """
    environment = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    environment["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    if replicate_size is not None or shard_size is not None:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(replicate_size or 1)
        environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(shard_size or 1)
    with (
        fresh_accelerate(environment | variables),
        # PartialState asks it for (backend, distributed_type). A method, not its result, because TrainingArguments
        # forgets the state and makes it anew.
        mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU)),
    ):
        yield


@contextmanager
def ddp_on_cpu(*, mixed_precision: str = "no", **variables: str) -> Iterator[None]:
    """Inside, ``Accelerator()`` is one of several CPU processes without FSDP."""
    with fresh_accelerate({"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": mixed_precision} | variables):
        yield


@contextmanager
def fresh_accelerate(environment: dict[str, str]) -> Iterator[None]:
    """Inside, Accelerate knows nothing of earlier Accelerators, and ``environment`` is set."""
    _forget()
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
