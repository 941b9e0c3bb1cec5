"""What the strategy says before there is a module: precision, mesh, options."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.integrations.registry import strategy_class


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
