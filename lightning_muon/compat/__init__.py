"""Adapters: every private name of torch and of the frameworks that the package uses."""
