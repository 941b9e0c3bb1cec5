"""Kinds of ops of an optimizer step."""

MOMENTUM = "momentum"
"""Update the momentum of the local pieces of a chunk and pack what goes to the owners."""
GATHER = "gather"
"""Bring the pieces to the owners."""
NEWTON_SCHULZ = "newton_schulz"
"""Unpack, orthogonalize the owned matrices, and pack the updates."""
SCATTER = "scatter"
"""Bring the updates back to the ranks that hold the pieces."""
UPDATE = "update"
"""Weight decay and update of the local pieces of the weights."""
ADAMW = "adamw"
"""AdamW for all parameters that are no matrices."""
BACKWARD = "backward"
"""The part of backward that ends with the last gradient of a chunk."""

STEP_KINDS = (MOMENTUM, GATHER, NEWTON_SCHULZ, SCATTER, UPDATE)
"""The ops of one chunk, in their order."""
