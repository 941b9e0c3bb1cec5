"""The optimizers of this package for ``transformers.Trainer``."""
