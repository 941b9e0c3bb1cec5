"""Optimizers: they read a plan and call the packages below, in order."""
