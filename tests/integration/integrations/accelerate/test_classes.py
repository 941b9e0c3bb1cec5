"""An Accelerator that the program has made itself becomes one of ours."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_muon.accelerate
from lightning_muon.integrations.accelerate.classes import class_over
from tests.integration.integrations.accelerate.loop import run_steps
from tests.integration.integrations.fabric.loop import adamw, network, reference
from tests.integration.training import EXACT, max_difference
from tests.support.accelerate_cpu import ddp_on_cpu, fsdp2_on_cpu
from tests.support.processes import ProcessPool


class _Own(Accelerator):
    """Of a program that has its own."""

    num_backward = 0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.num_backward += 1
        super().backward(loss, **kwargs)


def _converted(*, own: bool) -> dict[str, Tensor]:
    with ddp_on_cpu() if own else fsdp2_on_cpu(replicate_size=2, shard_size=2):
        accelerator = (_Own if own else Accelerator)(gradient_accumulation_steps=2)
        model: Any = network()
        scheduler: Any
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, scheduler, optimizer = lightning_muon.accelerate.prepare(
            accelerator, model, scheduler, optimizer, options={"optimizer": EXACT}
        )
        assert isinstance(accelerator, lightning_muon.accelerate.Accelerator) != own
        run_steps(accelerator, model, optimizer, clip=lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
        if own:
            assert isinstance(accelerator, _Own) and accelerator.num_backward == 8
        result = accelerator.get_state_dict(model)
        accelerator.free_memory()
        return result


@pytest.mark.parametrize("own", [False, True])
def test_weights_are_those_of_one_process(gloo: ProcessPool, own: bool) -> None:
    found = gloo.run(_converted, own=own, world_size=4)[0]
    assert max_difference(found, reference(max_norm=0.1)) <= 1e-6


def test_the_class_over_ours_is_ours() -> None:
    ours = lightning_muon.accelerate.Accelerator
    assert class_over(ours) is ours
    assert class_over(Accelerator) is ours
    assert class_over(_Own).__name__ == "_Own" and issubclass(class_over(_Own), _Own)


def _wrong(what: str) -> None:
    with ddp_on_cpu():
        model: Any = network()
        ours = what == "ours"
        accelerator = lightning_muon.accelerate.Accelerator() if ours else Accelerator()
        if what == "prepared":
            accelerator.prepare(model)
        options = {"timeout": timedelta(seconds=60)} if what == "timeout" else {}
        lightning_muon.accelerate.prepare(accelerator, model, adamw(model), options=options)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("ours", "the Accelerator has its own already"),
        ("prepared", "has prepared a model already"),
        ("timeout", "come too late"),
    ],
)
def test_what_comes_too_late_is_an_error(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_wrong, what, match=match, world_size=2)


_PAGE = Path(lightning_muon.accelerate.__file__).parents[1] / "docs" / "accelerate.md"


def _page(directory: str) -> int:
    """Runs the program of the page on a small model; how many optimizer steps it took."""
    program = _PAGE.read_text().split("```python\n", 2)[1].split("```")[0]
    os.chdir(directory)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    names: dict[str, Any] = {"model": model, "loader": DataLoader(torch.randn(24, 4), batch_size=2)}
    with fsdp2_on_cpu():
        exec(program, names)
        names["accelerator"].free_memory()
    assert Path("state", "optimizer_0", ".metadata").exists()
    return names["scheduler"].scheduler.last_epoch // 2


def test_the_program_of_the_page_runs(gloo: ProcessPool, tmp_path: Path) -> None:
    assert gloo.run(_page, str(tmp_path), world_size=2) == [3, 3]
