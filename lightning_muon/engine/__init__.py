"""The life cycle of a training, the same for every framework: meshes, sharding, optimizers, steps, evaluation, end."""
