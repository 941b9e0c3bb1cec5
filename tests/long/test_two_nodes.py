"""Two nodes: an agent of torchrun in each of two network namespaces, started by recipes/launch/torchrun.sh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import ADDRESSES, DEVICE, TwoNodes, why_not
from tests.support.programs import ROOT, program_environment, run_program

_REASON = why_not()
_PROGRAM = f"""
import runpy, sys
import lightning.pytorch as pl
from lightning_muon import ParallelMuonStrategy

num_nodes = int(sys.argv.pop(1))

def tell(trainer, module):
    sizes = dict(zip(module.device_mesh.mesh_dim_names, module.device_mesh.shape))
    print(f"node {{trainer.node_rank}} of {{trainer.num_nodes}}, mesh {{sizes}}", flush=True)

class Trainer(pl.Trainer):
    def __init__(self, devices, strategy, callbacks, **options):
        options |= {{"devices": devices // num_nodes, "num_nodes": num_nodes}}
        callbacks = [*callbacks, pl.callbacks.LambdaCallback(on_train_start=tell)]
        strategy = strategy if num_nodes > 1 else ParallelMuonStrategy(replicate_size=2)
        super().__init__(strategy=strategy, callbacks=callbacks, **options)

pl.Trainer = Trainer
runpy.run_path({str(ROOT / "examples" / "restarts.py")!r}, run_name="__main__")
"""


def _losses(printed: str) -> list[str]:
    return sorted(line for line in printed.splitlines() if line.startswith("rank "))


def _on_two_nodes(program: Path, *arguments: str) -> str:
    """What both nodes have printed; each has one rank."""
    folder = program.parent
    environment = program_environment() | {
        "PYTHON": sys.executable, "RANKS_PER_NODE": "1", "MASTER_ADDR": ADDRESSES[0], "INTERFACE": DEVICE
    }  # fmt: skip
    script = str(ROOT / "recipes" / "launch" / "torchrun.sh")
    logs = [folder / f"node{node}" for node in (0, 1)]
    with TwoNodes() as nodes:
        agents = [
            nodes.start(
                node,
                [script, str(program), *arguments],
                cwd=folder,
                env=environment | {"NODE_RANK": str(node), "LOCAL_ADDR": ADDRESSES[node]},
                stdout=logs[node].open("wb"),
                stderr=subprocess.STDOUT,
            )
            for node in (0, 1)
        ]
        codes = [agent.wait(timeout=150) for agent in agents]
    printed = "".join(log.read_text(errors="replace") for log in logs)
    assert codes == [0, 0], printed[-8000:]
    return printed


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_two_nodes_train_and_restart_as_one_with_two_replicas(tmp_path: Path) -> None:
    """A rank of the second node is killed: both agents start all ranks again, with the losses of two ranks here."""
    program, alone = tmp_path / "program.py", tmp_path / "alone"
    program.write_text(_PROGRAM)
    alone.mkdir()
    short = ("--steps", "6", "--seconds-per-step", "0")
    printed = _on_two_nodes(program, "2", *short, "--kill-at", "5")
    for node in (0, 1):
        assert f"node {node} of 2, mesh {{'replicate': 2, 'shard': 1}}" in printed
    whole = _losses(run_program(program, "1", *short, directory=alone, num_ranks=2))
    assert len(whole) == 2 * 6
    assert set(_losses(printed)) == set(whole)
    # The killed rank was in step 5; the newest checkpoint was that of step 4.
    assert len(_losses(printed)) in (14, 15)
