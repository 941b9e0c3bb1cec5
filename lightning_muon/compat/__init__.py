"""Adapters: every private name of torch and of Lightning that the package uses."""
