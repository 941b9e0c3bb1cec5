"""torch.compile of the units or of the whole model: the weights of one process."""

import pytest
import torch
from torch import Tensor

from tests.distributed.sharding.training import Run, Training, largest_difference, mesh_of, train_alone
from tests.support.processes import ProcessPool

_RUN = Run(accumulate=2, max_norm=0.3)


def _train(mode: str, what: str) -> tuple[dict[str, Tensor], int]:
    """Weights, and the number of compiled graphs."""
    torch.compiler.reset()
    training, graphs = Training.start(mode, mesh_of((2,)), bucket_bytes=600), list[None]()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(None)
        return graph

    for module in training.net.blocks if what == "units" else (training.net,):
        module.compile(backend=backend)
    for step in range(_RUN.steps):
        training.step(_RUN, step)
    return training.weights(), len(graphs)


@pytest.mark.parametrize("what", ["units", "model"])
@pytest.mark.parametrize("mode", ["fsdp", "zero2", "ddp"])
def test_weights_are_those_of_one_process(gloo: ProcessPool, mode: str, what: str) -> None:
    expected = train_alone(_RUN, 2)
    for weights, num_graphs in gloo.run(_train, mode, what, world_size=2):
        assert largest_difference(weights, expected)[0] < 1e-6
        assert num_graphs > 0
