"""Hugging Face Accelerate with this package's division of models, optimizers and checkpoints."""
