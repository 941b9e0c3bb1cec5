"""Ways to divide parameters, gradients and optimizer state among ranks; one file each, found by name."""
