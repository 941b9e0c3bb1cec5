"""What evaluation needs on shards."""

from __future__ import annotations

from typing import Any


def avoid_inference_mode(trainer: Any) -> None:
    """Evaluate under ``no_grad``.

    FSDP2 keeps the tensors into which it gathers weights. Made in inference mode they could not be used by a later
    training step. Lightning makes the same exception for its FSDPStrategy.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False
