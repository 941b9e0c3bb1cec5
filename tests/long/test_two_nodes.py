"""Two nodes: an agent of torchrun in each of two network namespaces, started by recipes/launch/torchrun.sh."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.namespaces import ADDRESSES, DEVICE, TwoNodes, why_not
from tests.support.programs import ROOT, program_environment, run_program
from tests.support.warm_python import warm_python

_REASON = why_not()
_PROGRAM = """
import os, signal, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_muon import AutoResume, ParallelMuonStrategy

num_nodes, kill_at = map(int, sys.argv[1:])
is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13))

    def training_step(self, batch):
        if is_first_attempt and self.global_step == kill_at and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return (self.net(batch[0]) - batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        sys.stdout.write(f"rank {self.global_rank}, step {self.global_step}: {outputs['loss'].item()!r}\\n")
        sys.stdout.flush()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self):
        sizes = dict(zip(self.device_mesh.mesh_dim_names, self.device_mesh.shape))
        sys.stdout.write(f"node {self.trainer.node_rank} of {self.trainer.num_nodes}, mesh {sizes}\\n")

strategy = "parallel_muon" if num_nodes > 1 else ParallelMuonStrategy(replicate_size=2)
trainer = Trainer(
    accelerator="cpu", devices=2 // num_nodes, num_nodes=num_nodes, strategy=strategy, max_steps=6, logger=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[AutoResume("saved", every_n_train_steps=2)],
)
rows = torch.randn(96, 13, generator=torch.Generator().manual_seed(1))
trainer.fit(Module(), DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))
"""


def _losses(printed: str) -> list[str]:
    return sorted(line for line in printed.splitlines() if line.startswith("rank "))


def _on_two_nodes(program: Path, *arguments: str) -> str:
    """What both nodes have printed; each has one rank."""
    folder = program.parent
    environment = program_environment() | {
        "PYTHON": warm_python(), "RANKS_PER_NODE": "1", "MASTER_ADDR": ADDRESSES[0], "INTERFACE": DEVICE
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
    printed = _on_two_nodes(program, "2", "5")
    for node in (0, 1):
        assert f"node {node} of 2, mesh {{'replicate': 2, 'shard': 1}}" in printed
    whole = _losses(run_program(program, "1", "-1", directory=alone, num_ranks=2))
    assert len(whole) == 2 * 6
    assert set(_losses(printed)) == set(whole)
    # The killed rank was in step 5; the newest checkpoint was that of step 4.
    assert len(_losses(printed)) in (13, 14)
