"""Fails where an op would add up in an order that CUDA does not fix."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# By atomic additions, or (bincount, cumsum) with a sum whose order depends on the run:
# https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
_ATOMIC = (
    *("index_add", "scatter_add", "scatter_reduce", "index_reduce", "index_put", "put_", "bincount", "histc"),
    *("cumsum", "_embedding_bag_dense_backward", "embedding_dense_backward", "kthvalue", "median"),
)


class NoAtomics(TorchDispatchMode):
    """A context in which such an op is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(_ATOMIC), f"{name} may give other bits on other nodes"
        return func(*args, **(kwargs or {}))
