"""Checkpoints: what is saved of a training, written so that a kill loses nothing, and read on any number of ranks."""
