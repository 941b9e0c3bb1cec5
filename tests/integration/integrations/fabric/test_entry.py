"""Methods other than forward, evaluation, inference mode, and whole programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.integration.integrations.fabric import loop
from tests.integration.training import Network, loss_of, max_difference
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, program_environment, run_program
from tests.support.worker import free_port


class _Model(Network):
    """With methods that use the root's own weights, and an inner model that generates."""

    def predict(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)

    def loss(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        return loss_of(self.head(self.blocks[1](self.blocks[0](self.embedding(tokens)))), targets)


def _model() -> Any:
    torch.manual_seed(0)
    return _Model()


def _train() -> tuple[dict[str, Tensor], Tensor, list[bool]]:
    """Train through a marked method, with evaluations in between."""
    fabric = loop.launch(reshard_after_forward=False)  # Weights stay whole for a backward pass that may come.
    model = _model()
    model, optimizer = fabric.setup(model, loop.adamw(model))
    model.mark_forward_method("loss")
    model.mark_forward_method("predict")
    found = torch.empty(0)
    are_shards = []
    for step in range(4):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            found = model.predict(loop.micro_batch(step, 0)[0]).clone()
        are_shards.append(all(isinstance(parameter, DTensor) for parameter in model.parameters()))
        optimizer.zero_grad()
        for index in range(2):
            tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(model.loss(tokens, targets=targets) / 2)
        optimizer.step()
    result = loop.weights(model)
    fabric.strategy.teardown()
    return result, found, are_shards


def test_marked_methods_train_and_evaluate(gloo: ProcessPool) -> None:
    found, predicted, are_shards = gloo.run(_train, world_size=2)[0]
    assert max_difference(found, loop.reference()) <= 1e-6
    assert are_shards == [True] * 4
    alone = _model()
    alone.load_state_dict(loop.reference(steps=3))
    with torch.no_grad():
        assert torch.equal(predicted, alone.predict(loop.micro_batch(3, 0)[0]))


def _make_lightning_module() -> Any:
    """A LightningModule, whose steps Fabric knows."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = Network()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return loss_of(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **loop.HYPER)

    return Module()


def _lightning_module() -> dict[str, Tensor]:
    fabric = loop.launch()
    module = _make_lightning_module()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for step in range(4):
        optimizer.zero_grad()
        for index in range(2):
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(model.training_step(loop.own_rows(fabric, loop.micro_batch(step, index))) / 2)
        optimizer.step()
    return loop.end(fabric, model)


def test_steps_of_a_lightning_module_work_in_fabric(gloo: ProcessPool) -> None:
    expected = {f"network.{name}": value for name, value in loop.reference().items()}
    assert max_difference(gloo.run(_lightning_module, world_size=2)[0], expected) <= 1e-6


def _compiled() -> dict[str, Tensor]:
    fabric = loop.launch()
    plain = _model()
    optimizer: Any = loop.adamw(plain)
    model, optimizer = fabric.setup(torch.compile(plain, backend="eager"), optimizer)
    loop.run_steps(fabric, model, optimizer)
    result = loop.weights(model._orig_mod if hasattr(model, "_orig_mod") else model)
    fabric.strategy.teardown()
    return result


@pytest.mark.timeout(120)
def test_a_compiled_module_stays_compiled(gloo: ProcessPool) -> None:
    assert max_difference(gloo.run(_compiled, world_size=2, timeout=100)[0], loop.reference()) <= 1e-6


def test_the_example_learns_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    words = (ROOT / "examples" / "fabric_loop.py", "--directory", tmp_path, "--steps", "40", "--devices", "2")
    text = run_program(*words, directory=ROOT, num_ranks=2)
    (loss,) = re.findall(r"step 40 loss ([\d.]+)", text)
    assert float(loss) < 1.0, "an untrained model has log(32) = 3.5"
    assert text.count("AdamW -> ParallelMuon") == 1
    saved = torch.load(tmp_path / "checkpoint" / "meta.pt")
    assert saved["step"] == saved["scheduler"]["last_epoch"] == 40


_FAILS = """
import torch.distributed as dist
from tests.integration.integrations.fabric import loop
dist.init_process_group("gloo")
fabric = loop.launch(sharding="zero2")
network = loop.network()
model, optimizer = fabric.setup(network, loop.adamw(network))
loop.run_steps(fabric, model, optimizer, steps=range(2))
if fabric.global_rank == 0:
    raise OSError("file 4")
loop.run_steps(fabric, model, optimizer, steps=range(2, 4))
"""


def test_an_exception_of_a_rank_is_the_last_error_of_all() -> None:
    """It is rank 0, whose process serves the store; only a process that really ends knows of such an exception."""
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    common = program_environment() | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _FAILS],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [program.communicate(timeout=100)[1].strip().splitlines() for program in programs]
    assert all(program.returncode for program in programs)
    assert errors[0][-1].endswith("OSError: file 4")
    assert errors[1][-1].endswith("rank 0 has failed: OSError: file 4")
