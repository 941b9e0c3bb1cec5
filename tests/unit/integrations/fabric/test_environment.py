"""What the strategy says before there is a module: precision, mesh, options."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.integrations.registry import fabric_strategy as strategy_class
from tests.support.processes import ProcessPool


def _fabric(package: str, **options: Any) -> Any:
    fabric = pytest.importorskip(package)
    return fabric.Fabric(accelerator="cpu", devices=4, strategy=strategy_class(package)(), **options)


@pytest.mark.parametrize("precision", ["16-true", "64-true", "16-mixed"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="precision="):
        _fabric("lightning.fabric", precision=precision)


def test_a_trainer_that_refuses_it_says_what_to_do() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    with pytest.raises(ValueError, match="for Fabric; the names 'parallel_muon' and 'flexdemo' find the right class"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=strategy_class("lightning.fabric")())


def test_there_is_no_mesh_before_the_processes() -> None:
    with pytest.raises(RuntimeError, match=r"before fabric\.launch"):
        _ = _fabric("lightning.fabric").strategy.device_mesh


def _launch(sizes: dict[str, int]) -> Any:
    from tests.integration.integrations.fabric.loop import launch

    strategy = launch(**sizes).strategy
    sampler = strategy.distributed_sampler_kwargs
    return strategy.device_mesh.mesh_dim_names, tuple(strategy.device_mesh.shape), sampler


def test_ranks_that_share_sequences_share_samples(gloo: ProcessPool) -> None:
    found = gloo.run(_launch, {"replicate_size": 1, "context_size": 2}, world_size=4)
    for rank, (names, shape, sampler) in enumerate(found):
        assert (names, shape) == (("replicate", "shard", "context"), (1, 2, 2))
        assert sampler == {"num_replicas": 2, "rank": rank // 2}
