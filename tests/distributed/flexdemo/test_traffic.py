"""What FlexDeMo says that it sends, against the bytes that processes really write."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, FlexDeMoConfig, Full, Random
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool

# Rows that do not divide, a stack, a convolution, a bias and a small matrix that travel dense, several buckets.
SHAPES = ((397, 211), (256, 512), (3, 100, 65), (64, 32, 3, 3), (1001,), (30, 30))
# Most that is written beside the messages, by number of nodes: headers of gloo for each of up to three buckets, the
# agreement on each step and the barrier. Seen are 1008 and 5097 bytes.
OVERHEAD = {2: 2_000, 3: 8_000}
_COUNTER = Path("/proc/self/io")


def _written() -> int:
    """Bytes that this process has handed to ``write``, sockets included."""
    return int(_COUNTER.read_text().split("wchar:")[1].split()[0])


def _written_per_step(config: FlexDeMoConfig) -> tuple[float, int]:
    """Bytes that this rank writes in one step, and what its optimizer says of them; each rank is a node."""
    torch.manual_seed(dist.get_rank())
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = FlexDeMo.from_config(parameters, config, mesh=mesh_of((dist.get_world_size(), 1)))
    written = list[int]()
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        dist.barrier()  # The last message has been written when everybody has it.
        written.append(_written())
    # The first step makes groups and connections. Not the mean: other threads of the process write now and then.
    return median(after - before for before, after in pairwise(written)), optimizer.sent_bytes_per_step


@pytest.mark.skipif(not _COUNTER.exists(), reason="counts the bytes that the Linux kernel reports for a process")
@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        (FlexDeMoConfig(replicator=DCTTopK(top_k=32), value_format="fp32", bucket_bytes=300_000), 3),
        (FlexDeMoConfig(), 2),
        (FlexDeMoConfig(replicator=Random(1 / 4), base="adamw", bucket_bytes=300_000), 3),
        (FlexDeMoConfig(replicator=Full()), 2),
        (FlexDeMoConfig(replicator=DiLoCo(period=1)), 3),
    ],
    ids=["dct fp32", "default", "random, summed on the way", "full", "diloco"],
)
def test_the_said_bytes_are_those_that_a_process_writes(config: FlexDeMoConfig, nodes: int, gloo: ProcessPool) -> None:
    for written, said in gloo.run(_written_per_step, config, world_size=nodes):
        assert said <= written <= said + OVERHEAD[nodes]
