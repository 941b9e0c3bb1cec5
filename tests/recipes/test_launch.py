"""The files of recipes/launch, run under bash with stand-ins for srun, scontrol, torchrun and Python.

tests/long/test_two_nodes.py runs torchrun.sh for real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.support.programs import ROOT

LAUNCH = ROOT / "recipes" / "launch"


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment as on a node; what the stand-ins are told to do is in tmp_path/log, a line for each call."""
    log = tmp_path / "log"
    log.touch()
    _program(tmp_path, "scontrol", f'[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "scontrol $*" >> {log}')
    # Runs its command on both nodes, without --kill-on-bad-exit=1; passes SIGTERM on as srun does.
    _program(tmp_path, "srun",
        f'echo "srun $*" >> {log}; shift\n'
        'for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done\n'
        "trap 'kill -TERM \"${pids[@]}\"' TERM\n"
        'code=0; for pid in "${pids[@]}"; do wait $pid || code=$?; done; wait; exit $code')  # fmt: skip
    _program(tmp_path, "agent", f'echo "agent $*" >> {log}\ntrap "echo told >> {log}; exit 1" TERM\nsleep 30 & wait $!')
    _program(tmp_path, "torchrun", f'echo "$*" >> {log}')
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[7-8]"}
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "agent")} | slurm


def _launch(arguments: list[str]) -> Any:
    """What torchrun makes of its arguments; it ends the process if it does not know one."""
    return get_args_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"), [(0, 0, False), (1, 0, True), (137, 2, True), (1, 3, False), (143, 0, False)]
)
def test_slurm_requeues_what_has_failed(
    cluster: dict[str, str], tmp_path: Path, code: int, restarts: int, requeued: bool
) -> None:
    environment = cluster | {"PYTHON": "bash", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", LAUNCH / "slurm.sbatch", "-c", f"exit {code}"], env=environment, check=False)
    assert done.returncode == code
    assert ("scontrol requeue 77" in (tmp_path / "log").read_text()) == requeued


def test_slurm_gives_lightning_the_number_of_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["bash", LAUNCH / "slurm.sbatch"], env=cluster | {"PYTHON": "echo"}, check=True)
    called = (tmp_path / "log").read_text()
    assert "srun --kill-on-bad-exit=1 echo -m lightning_muon fit --config" in called
    assert "--trainer.num_nodes 2" in called


def test_agents_under_slurm_are_told_to_end_before_the_requeue(cluster: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = subprocess.Popen(["bash", LAUNCH / "slurm_torchrun.sbatch", "train.py", "--lr", "1"], cwd=ROOT, env=cluster)
    deadline = time.monotonic() + 20
    while log.read_text().count("agent ") < 2:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=20) == 0
    first, *lines, last = log.read_text().splitlines()
    assert first.startswith("srun") and last == "scontrol requeue 77" and lines.count("told") == 2
    agents = [_launch(line.split()[3:]) for line in lines if line.startswith("agent -m torch.distributed.run ")]
    assert {agent.rdzv_conf for agent in agents} == {"is_host=true", "is_host=false"}
    for agent in agents:
        assert (agent.nnodes, agent.rdzv_endpoint, agent.rdzv_id) == ("2", "node7:20077", "77")
        assert (agent.training_script, agent.training_script_args) == ("train.py", ["--lr", "1"])


@pytest.mark.parametrize("node", [0, 1])
def test_pods_and_virtual_machines_start_an_agent_each(cluster: dict[str, str], tmp_path: Path, node: int) -> None:
    jobset = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    pod = cluster | {"JOB_COMPLETION_INDEX": str(node)}
    subprocess.run(container["command"], env=pod, check=True)
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    names = {"NODE_RANK": node, "NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": 2, "NUM_GPUS_PER_NODE": 8}
    machine = cluster | {f"SKYPILOT_{name}": str(value) for name, value in names.items()}
    subprocess.run(["bash", "-c", task["run"]], cwd=ROOT, env=machine | {"PYTHON": "torchrun"}, check=True)
    of_pod, of_machine = map(str.split, (tmp_path / "log").read_text().splitlines())
    for agent in (_launch(of_pod), _launch(of_machine[2:])):
        assert int(agent.nnodes) == job["parallelism"] == job["completions"] == task["num_nodes"] == 2
        assert agent.rdzv_conf == f"is_host={'false' if node else 'true'}"
        assert agent.nproc_per_node == "8" and agent.training_script == "train.py"
    name = jobset["metadata"]["name"]
    assert _launch(of_pod).rdzv_endpoint == f"{name}-{group['name']}-0-0.{name}:29500"
