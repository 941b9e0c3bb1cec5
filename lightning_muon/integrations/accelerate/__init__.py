"""Hugging Face Accelerate with this package's sharding of models, optimizers and checkpoints."""
