"""Ray Train: lets ``ray.train.lightning.prepare_trainer`` accept the strategies of this package.

Import it in the training function, before ``prepare_trainer`` is imported from Ray::

    import lightning_muon.ray
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    trainer = Trainer(
        strategy="parallel_muon", devices="auto", plugins=[RayLightningEnvironment()], callbacks=[AutoResume(FOLDER)]
    )
    prepare_trainer(trainer).fit(model, loader)

After a failure Ray starts the training function again, and ``AutoResume`` goes on from the newest valid checkpoint in
its folder, which all nodes must share. Ray's own ``RayTrainReportCallback`` works, too; it gives each node a folder of
its own, so that with more than one node the strategy needs ``save_distributed_checkpoint=False``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

try:
    import ray.train
    import ray.train.lightning
    import ray.train.torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lightning_muon.ray needs Ray Train and Lightning ({error}): pip install "lightning-muon[ray]"',
        name=error.name,
    ) from error
import torch.distributed as dist
from ray.train.lightning import RayLightningEnvironment

from lightning_muon.integrations.strategy import MuonStrategy


def _accepting(of_ray: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(of_ray)
    def prepare_trainer(trainer: Any) -> Any:
        if not isinstance(trainer.strategy, MuonStrategy):
            return of_ray(trainer)
        _take_workers(trainer.strategy)
        return trainer

    return prepare_trainer


def _take_workers(strategy: Any) -> None:
    """Let the strategy have the ranks and the device that Ray has given. Collective; every worker must call it."""
    if not isinstance(strategy.cluster_environment, RayLightningEnvironment):
        raise RuntimeError(
            "Ray Train has started the processes: give the Trainer plugins=[RayLightningEnvironment()] of "
            f"ray.train.lightning; its cluster environment is {type(strategy.cluster_environment).__name__}"
        )
    context = ray.train.get_context()
    sizes: list[Any] = [None] * context.get_world_size()
    dist.all_gather_object(sizes, context.get_local_world_size())
    if len(set(sizes)) > 1:
        raise RuntimeError(
            f"the strategy needs equal numbers of workers on all nodes, and ranks have {sizes} on theirs; set "
            "placement_strategy and resources_per_worker of ScalingConfig so that nodes are alike"
        )
    strategy.parallel_devices = [ray.train.torch.get_device()] * sizes[0]
    strategy.num_nodes = len(sizes) // sizes[0]


# Ray compares with a list of its own classes, and Lightning would take a subclass of one for DDP, FSDP1 or DeepSpeed.
prepare_trainer = ray.train.lightning.prepare_trainer = _accepting(ray.train.lightning.prepare_trainer)
