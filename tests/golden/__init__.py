"""Weights, losses and plans of now, to the bit: what a change that is meant to change none of them is held against."""
