"""FSDP2: which modules are units, equal initial weights, gradients that all ranks agree on."""
