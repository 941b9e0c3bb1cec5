"""fabric.save and fabric.load: resumed runs, other numbers of ranks and nodes, parts of a state, other readers."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DiLoCo, FlexDeMoConfig, ParallelMuon
from lightning_muon.checkpoint.saving import fits_one_file
from tests.integration.integrations.fabric.loop import adamw, end, launch, network, run_steps, set_up, weights
from tests.integration.training import VOCABULARY, max_difference
from tests.support.processes import ProcessPool


def _save(path: str, **options: Any) -> dict[str, Tensor]:
    fabric, model, optimizer = set_up(**options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    run_steps(fabric, model, optimizer, steps=range(2), scheduler=scheduler)
    fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 2})
    return end(fabric, model)


def test_what_is_small_is_one_file(gloo: ProcessPool, tmp_path: Path) -> None:
    expected, _ = gloo.run(_save, f"{tmp_path}/saved", save_distributed_checkpoint="auto", world_size=2)
    found = torch.load(tmp_path / "saved")  # As any program reads it.
    assert all(torch.equal(found["model"][name], weight) for name, weight in expected.items())
    optimizer = ParallelMuon(network(), lr=1.0)
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 3)
    columns = 2**12  # Of 2**17 bytes each, with three states of that size 2 GiB.
    fits = [fits_one_file(nn.Linear(columns - few, 2**15, bias=False, device="meta"), 3) for few in (1, 0)]
    assert fits == [True, False]


def _of_another_model(path: str, sharded: bool) -> str:
    fabric, model, _ = set_up(save_distributed_checkpoint=sharded)
    fabric.save(path, {"model": model})
    fabric.strategy.teardown()
    fabric = launch(save_distributed_checkpoint=sharded)
    module = network(num_blocks=4)
    module.head = nn.Linear(5, VOCABULARY)
    del module.embedding
    model, _ = fabric.setup(module, adamw(module))
    with pytest.raises(RuntimeError) as raised:
        fabric.load(path, {"model": model})
    fabric.strategy.teardown()
    assert raised.value.__cause__ is None
    return str(raised.value)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_of_another_model_is_a_short_error(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    message, other = gloo.run(_of_another_model, f"{tmp_path}/saved", sharded, world_size=2)
    assert message == other and len(message.splitlines()) <= 12 and max(map(len, message.splitlines())) < 400
    for words in (
        "does not fit Network:",
        r"\d+ missing in the checkpoint: .*blocks\.2\.\S+; .*\.\.\.",
        r"(?m)1 unexpected: \S+$",
        r"1 of another size: head.weight \(\d+, \d+\) in the checkpoint, \(\d+, 5\) in the model",
    ):
        assert re.search(words, message), words
    assert "strict=False" not in message, "it cannot help with sizes"


def _parts(path: str, sharded: bool) -> list[str]:
    """Save a model without its head, and load that into another one, with too many keys and with too few; warnings."""
    fabric, model, optimizer = set_up(save_distributed_checkpoint=sharded)
    run_steps(fabric, model, optimizer, steps=range(1))
    content = {"first.model": model, "step": 7, "note": "x"}
    fabric.save(path, content, filter={"first.model": lambda name, _: "head" not in name})
    saved = end(fabric, model)
    fabric, model, optimizer = set_up(seed=1, save_distributed_checkpoint=sharded)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*head\.(weight|bias)).*; strict=False .* loads what fits"):
        fabric.load(path, {"first.model": model})
    there = r"it has \['first.model', 'note', 'step'\]"
    for strict, asked, message in (
        (True, {"first.model": model, "optimizer": optimizer}, f"no 'optimizer'; {there}, and strict=False"),
        (True, {"net": model, "note": ""}, f"no 'net'; {there}, and strict=False"),
        (False, {"net": model}, f"no 'net'; {there}, and so nothing"),
    ):
        with pytest.raises(KeyError, match=message):
            fabric.load(path, asked, strict=strict)
    more = {"first.model": model, "optimizer": optimizer, "epoch": 5}
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert fabric.load(path, more, strict=False) == {"step": 7, "note": "x"}
    assert more["epoch"] == 5
    if sharded:
        with pytest.raises(ValueError, match="is a directory of shards"):
            fabric.load_raw(path, model)
    for name, weight in end(fabric, model).items():
        assert torch.equal(weight, (before if "head" in name else saved)[name]), name
    return [str(warning.message) for warning in caught if "has no" in str(warning.message)]


@pytest.mark.parametrize("sharded", [True, False])
def test_parts_of_a_state_are_saved_and_loaded(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    warned, others = gloo.run(_parts, str(tmp_path / "checkpoint"), sharded, world_size=2)
    assert len(warned) == 1 and "has no 'epoch', 'optimizer'; it has" in warned[0]
    assert others == [], "one rank warns for all"


def _save_between_averages(path: str, sharded: bool) -> tuple[dict[str, Tensor], ...]:
    """Weights of a node, of the last average, and of what was saved."""
    options = {"optimizer": FlexDeMoConfig(base="adamw", replicator=DiLoCo(period=2)), "replicate_size": 2}
    fabric, model, optimizer = set_up(**options, shard_size=1, save_distributed_checkpoint=sharded)
    run_steps(fabric, model, optimizer, steps=range(3))
    fabric.save(path, {"model": model})
    own = weights(model)
    with optimizer.optimizer.common_weights():
        common = weights(model)
    fabric.load(path, {"model": model})
    return own, common, weights(model)


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_are_saved_that_all_nodes_have_in_common(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    own, common, found = gloo.run(_save_between_averages, str(tmp_path / "saved"), sharded, world_size=2)[0]
    assert max_difference(found, common) == 0.0 < max_difference(own, common)
