"""Gradients between backward and the optimizer: reductions that start early, scaling, clipping, finite checks."""
