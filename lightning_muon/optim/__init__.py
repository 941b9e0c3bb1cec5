"""Optimizers: they read a plan and call the rooms below, in order."""
