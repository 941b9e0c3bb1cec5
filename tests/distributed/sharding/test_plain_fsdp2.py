"""A plain loop over FSDP2 is told of a failed backward."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_muon import ParallelMuon
from lightning_muon.compat import torch as compat
from tests.distributed.sharding.training import mesh_of, optimizer_for
from tests.matrix.row import Row
from tests.support.faults import OutOfMemoryError, fail_in
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, whole

ROW = Row(ranks=2, parts=("frozen", "unused", "tied"))


def _sharded(net: nn.Module) -> Any:
    for unit in (*net.blocks, net):  # type: ignore[misc]
        fully_shard(unit, mesh=mesh_of((2,)))
    return net


def _backward(net: nn.Module, step: int) -> None:
    ROW.loss(net, ROW.batch(step, 0, dist.get_rank())).backward()


def _plain(*, reset: str, knows_module: bool) -> tuple[list[str], bool]:
    """A loop of fully_shard and ParallelMuon alone, one batch of which fails.

    What the steps after it raise, and whether weights and state are those of a run that never saw the batch.
    """
    problems, results = list[str](), list[list[Tensor]]()
    for fails in (False, True):
        net = _sharded(ROW.make_model())
        optimizer = optimizer_for(net) if knows_module else ParallelMuon(net.named_parameters())
        for step in range(5):
            if step == 2 and fails:
                fault = fail_in(net.blocks[0], "backward")
                with pytest.raises(OutOfMemoryError):
                    _backward(net, 77)
                fault.remove()
                {"no": lambda _: None, "by torch": compat.reset_fsdp, "by hand": compat.reset_fsdp_by_hand}[reset](net)
                optimizer.zero_grad()
            _backward(net, step)
            try:
                optimizer.step()
            except RuntimeError as problem:
                problems.append(str(problem))
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        results.append([whole(each) for each in (*net.parameters(), *states) if isinstance(each, Tensor)])
    return problems, are_equal(*results)


@pytest.mark.parametrize(
    ("reset", "knows_module"), [("no", True), ("no", False), ("by torch", True), ("by hand", True)]
)
def test_a_plain_loop_that_resets_fsdp2_goes_on_exactly_and_another_is_told_to(
    gloo: ProcessPool, reset: str, knows_module: bool
) -> None:
    for problems, is_equal in gloo.run(_plain, reset=reset, knows_module=knows_module, world_size=2):
        assert len(problems) == (3 if reset == "no" else 0) and is_equal == (reset != "no")
        assert all("still in the middle of that pass" in problem for problem in problems)
