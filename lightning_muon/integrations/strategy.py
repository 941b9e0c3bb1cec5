"""What the strategies of Trainer and Fabric have in common: options, processes, the mesh, the samples of a rank."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import nn

from lightning_muon.checkpoint.background import BackgroundSaves
from lightning_muon.comm.groups import own_gloo_group_of_all
from lightning_muon.compat.lightning import LightningPackage, start_process_group
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.model_setup import mixed_precision_policy
from lightning_muon.engine.options import Options, StrategyOptions
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.integrations.registry import STRATEGIES
from lightning_muon.monitor.watchdog import Watchdog, watch_setup


class MuonStrategy:
    """A strategy for one package of Lightning, whose ``ModelParallelStrategy`` is the class beside it."""

    package: ClassVar[LightningPackage]
    user: ClassVar[str]  # Who takes such a strategy; `{}` stands for the name of the package.
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
        self._meshes: Meshes | None = None
        self._saves: BackgroundSaves | None = None
        self._watchdog: Watchdog | None = None  # Until the first engine has it.
        self._begin(process_group_backend=self.options.process_group_backend, timeout=self.options.timeout)

    def _begin(self, **arguments: Any) -> None:
        """The rest of the constructor; ``arguments`` are those that the class beside it has, too."""
        super().__init__(**arguments)

    def __repr__(self) -> str:
        # A Trainer, or a Fabric of the other package, quotes it when it refuses the strategy.
        names = " and ".join(map(repr, STRATEGIES))
        user = self.user.format(self.package.name)
        return f"<{type(self).__name__} for {user}; the names {names} find the right class for each package>"

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Replicas and shards have samples of their own; context and tensor ranks share them."""
        if self._meshes is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": self._meshes.num_data_ranks, "rank": self._meshes.data_rank}

    def _start_processes(self) -> Meshes:
        """Start the process group and make the meshes. Collective over all ranks."""
        layout = {"num_nodes": self.num_nodes, "num_processes": self.num_processes}
        store = None
        if is_in_shared_store() and not dist.is_initialized():
            environment = self.cluster_environment
            store = store_of_attempt(environment.global_rank(), environment.world_size(), self.options.timeout)
        start_process_group(self, self.package, store)
        if self._meshes is None:  # A second run of the program keeps its process groups.
            by_nodes = self.options.has_nodes
            self._meshes = self.options.make(self.root_device.type, by_nodes=by_nodes, **layout)
            if self.options.async_save:
                self._saves = BackgroundSaves(own_gloo_group_of_all())
        if self._watchdog is None:
            self._watchdog = watch_setup(self, silence=self.options.max_silence)
        return self._meshes

    def finish_saving(self) -> None:
        """Wait until what ``async_save=True`` writes is written. Collective over all ranks.

        The end of ``Trainer.fit`` does it. In a Fabric program call it before anything reads the checkpoint, before a
        save that came earlier is removed, and at the end, where it raises if the last save has failed.
        """
        if self._saves is not None:
            self._saves.finish()

    def _make_engine(
        self, module: nn.Module, precision: str, *, wait_for_parameters: bool, shard_root: bool = True, **arguments: Any
    ) -> TrainingEngine:
        assert self._meshes is not None, "setup_environment (fabric.launch) comes first"
        rank_zero = self.package.fabric("utilities.rank_zero")
        mode_options = replace(
            self.options.mode_options,
            mp_policy=mixed_precision_policy(precision, module),
            shard_root=shard_root,
            wait_for_parameters=wait_for_parameters,
        )
        watchdog, self._watchdog = self._watchdog, None
        return TrainingEngine(
            module,
            self.options,
            self._meshes,
            mode_options=mode_options,
            saves=self._saves,
            watchdog=watchdog,
            info=rank_zero.rank_zero_info,
            warn=rank_zero.rank_zero_warn,
            **arguments,
        )


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
