"""Tensors in, tensors out: no process group, no DTensor, no optimizer state."""
