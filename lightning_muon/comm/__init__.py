"""Moves bytes between ranks; knows nothing of Muon."""
