"""Sharding modes: FSDP2 units, equal initial weights, gradients that all ranks agree on, replicas, ZeRO-2."""
