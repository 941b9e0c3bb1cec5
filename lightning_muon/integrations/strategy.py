"""What the strategies of Trainer and Fabric have in common: options, processes, the mesh, the samples of a rank."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import nn

from lightning_muon.compat.lightning import LightningPackage, start_process_group
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.model_setup import mixed_precision_policy
from lightning_muon.engine.options import Options, StrategyOptions
from lightning_muon.engine.session import Session
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.integrations.registry import STRATEGIES


class MuonStrategy:
    """A strategy for one package of Lightning, whose ``ModelParallelStrategy`` is the class beside it."""

    package: ClassVar[LightningPackage]
    user: ClassVar[str]  # Who takes such a strategy; `{}` stands for the name of the package.
    of_base: ClassVar[Mapping[str, Any]] = {}  # What else the constructor of the class beside it takes.
    options: Options
    # Of the class beside it.
    root_device: torch.device
    accelerator: Any
    cluster_environment: Any
    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int

    def __init__(self, **options: Unpack[StrategyOptions]) -> None:
        self.options = Options(**options)
        log = self.package.fabric("utilities.rank_zero")
        self._session = Session(self.options, info=log.rank_zero_info, warn=log.rank_zero_warn)
        backend, timeout = self.options.process_group_backend, self.options.timeout
        super().__init__(process_group_backend=backend, timeout=timeout, **self.of_base)  # type: ignore[call-arg]

    def __repr__(self) -> str:
        # A Trainer, or a Fabric of the other package, quotes it when it refuses the strategy.
        names = " and ".join(map(repr, STRATEGIES))
        user = self.user.format(self.package.name)
        return f"<{type(self).__name__} for {user}; the names {names} find the right class for each package>"

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Replicas and shards have samples of their own; context and tensor ranks share them."""
        meshes = self._session.meshes
        if meshes is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": meshes.num_data_ranks, "rank": meshes.data_rank}

    def _start_processes(self) -> Meshes:
        """Start the process group and make the meshes. Collective over all ranks."""
        store = None
        if is_in_shared_store() and not dist.is_initialized():
            environment = self.cluster_environment
            store = store_of_attempt(environment.global_rank(), environment.world_size(), self.options.timeout)
        start_process_group(self, self.package, store)
        options, layout = self.options, {"num_nodes": self.num_nodes, "num_processes": self.num_processes}
        return self._session.begin(lambda: options.make(self.root_device.type, by_nodes=options.has_nodes, **layout))

    def finish_saving(self) -> None:
        """Wait until what ``async_save=True`` writes is written. Collective over all ranks.

        The end of ``Trainer.fit`` does it. In a Fabric program call it before anything reads the checkpoint, before a
        save that came earlier is removed, and at the end, where it raises if the last save has failed.
        """
        self._session.finish_saving()

    def _shard(
        self, module: nn.Module, plugin: Any, *, wait_for_parameters: bool, shard_root: bool = True, **of_loop: Any
    ) -> TrainingEngine:
        """Shard a module that computes with this precision plugin. Collective over all ranks."""
        mode_options = replace(
            self.options.mode_options,
            mp_policy=mixed_precision_policy(plugin.precision, module),
            shard_root=shard_root,
            wait_for_parameters=wait_for_parameters,
        )
        return self._session.shard(module, self.root_device, mode_options=mode_options, **of_loop)


# The agent of torchrun keeps one store through all attempts (unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), so a process
# that was started again finds the addresses of processes that are gone, and waits for them.
_PREFIX = "lightning_muon/attempt"
_SECONDS_BETWEEN_LOOKS = 0.05


def is_in_shared_store() -> bool:
    """Whether an agent of torchrun started this process, with a store that outlives it; local."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(rank: int, num_ranks: int, timeout: timedelta) -> dist.Store:
    """A store that no earlier process has written to. Every process that torchrun has started must call it.

    Rank 0 names the attempt. The others cannot read the name under a fixed key, where that of an earlier one may be:
    each asks by a new word, which rank 0 answers, until all have agreed.

    Raises:
        TimeoutError: On this rank, if the others do not come.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        waiting = set(range(1, num_ranks))
        while waiting:
            for other in sorted(waiting):
                if store.check([f"{_PREFIX}/{word}/{other}"]):
                    waiting.discard(other)
                elif store.check([f"{_PREFIX}/ask/{other}"]):
                    store.set(f"{_PREFIX}/answer/{store.get(f'{_PREFIX}/ask/{other}').decode()}", word)
            _pause(deadline, f"ranks {sorted(waiting)} have not come")
        return dist.PrefixStore(f"{_PREFIX}/{word}", store)
    store.set(f"{_PREFIX}/ask/{rank}", word)
    while not store.check([f"{_PREFIX}/answer/{word}"]):
        _pause(deadline, "rank 0 has not come")
    name = store.get(f"{_PREFIX}/answer/{word}").decode()
    store.set(f"{_PREFIX}/{name}/{rank}", "here")
    return dist.PrefixStore(f"{_PREFIX}/{name}", store)


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"the processes of this attempt did not meet: {problem}")
    time.sleep(_SECONDS_BETWEEN_LOOKS)
