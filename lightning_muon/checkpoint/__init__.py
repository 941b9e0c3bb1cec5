"""Checkpoints: saved so that a kill loses nothing, and read on any number of ranks."""
