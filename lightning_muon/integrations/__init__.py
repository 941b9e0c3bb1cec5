"""Thin layers between ParallelMuon and the frameworks that train with it."""
