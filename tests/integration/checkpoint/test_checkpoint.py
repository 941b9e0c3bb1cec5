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
from tests.integration.integrations.fabric.loop import (
    adamw,
    launch,
    micro_batch,
    network,
    own_rows,
    run_steps,
    set_up,
    weights,
)
from tests.integration.training import VOCABULARY, loss_of, max_difference
from tests.support.processes import ProcessPool


class _Run:
    """A training with a scheduler and a counter."""

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self.fabric = launch(**options)
        model: Any = network(seed=seed)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": scheduler, "step": 0}

    def train(self, until: int) -> None:
        steps = range(self.state["step"], until)
        run_steps(self.fabric, self.model, self.optimizer, steps=steps, scheduler=self.state["scheduler"])
        self.state["step"] = until

    def finish(self) -> dict[str, Tensor]:
        """Whole weights, on rank 0."""
        result = weights(self.model)
        self.fabric.strategy.teardown()
        return result


def _save(path: str, **options: Any) -> dict[str, Tensor]:
    run = _Run(**options)
    run.train(2)
    run.fabric.save(path, run.state)
    return run.finish()


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
    run = _Run(save_distributed_checkpoint=sharded)
    run.fabric.save(path, {"model": run.model})
    run.fabric.strategy.teardown()
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
    run = _Run(save_distributed_checkpoint=sharded)
    run.train(1)
    content = {"first.model": run.model, "step": 7, "note": "x"}
    run.fabric.save(path, content, filter={"first.model": lambda name, _: "head" not in name})
    saved = weights(run.model)
    run.fabric.strategy.teardown()
    run = _Run(seed=1, save_distributed_checkpoint=sharded)
    before = weights(run.model)
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*head\.(weight|bias)).*; strict=False .* loads what fits"):
        run.fabric.load(path, {"first.model": run.model})
    there = r"it has \['first.model', 'note', 'step'\]"
    for strict, asked, message in (
        (True, {"first.model": run.model, "optimizer": run.optimizer}, f"no 'optimizer'; {there}, and strict=False"),
        (True, {"net": run.model, "note": ""}, f"no 'net'; {there}, and strict=False"),
        (False, {"net": run.model}, f"no 'net'; {there}, and so nothing"),
    ):
        with pytest.raises(KeyError, match=message):
            run.fabric.load(path, asked, strict=strict)
    more = {"first.model": run.model, "optimizer": run.optimizer, "epoch": 5}
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert run.fabric.load(path, more, strict=False) == {"step": 7, "note": "x"}
    assert more["epoch"] == 5
    for name, weight in run.finish().items():
        assert torch.equal(weight, (before if "head" in name else saved)[name]), name
    return [str(warning.message) for warning in caught if "has no" in str(warning.message)]


@pytest.mark.parametrize("sharded", [True, False])
def test_parts_of_a_state_are_saved_and_loaded(gloo: ProcessPool, tmp_path: Path, sharded: bool) -> None:
    warned, others = gloo.run(_parts, str(tmp_path / "checkpoint"), sharded, world_size=2)
    assert len(warned) == 1 and "has no 'epoch', 'optimizer'; it has" in warned[0]
    assert others == [], "one rank warns for all"


def _evaluated_after_loading(path: str) -> list[float]:
    """Losses with weights that were loaded, in two formats, after a forward pass has seen others."""
    run = _Run(seed=1)
    batch = own_rows(micro_batch(9, 0))
    losses: list[float] = []
    for load in (
        lambda: run.fabric.load(path, {"model": run.model}),
        lambda: run.fabric.load_raw(f"{path}.raw", run.model),
    ):
        run.model.load_state_dict({name: torch.zeros_like(value) for name, value in run.model.state_dict().items()})
        with torch.no_grad():
            run.model(batch[0])
            load()
            losses.append(float(run.fabric.all_reduce(loss_of(run.model(batch[0]), batch[1]))))
    with pytest.raises(ValueError, match="is a directory of shards"):
        run.fabric.load_raw(path, run.model)
    run.fabric.strategy.teardown()
    return losses


def test_loaded_weights_are_those_of_the_next_forward(gloo: ProcessPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = gloo.run(_save, path, world_size=2)[0]
    torch.save(saved, f"{path}.raw")
    alone = network()
    alone.load_state_dict(saved)
    tokens, targets = micro_batch(9, 0)
    expected = float(loss_of(alone(tokens), targets).detach())
    for losses in gloo.run(_evaluated_after_loading, path, world_size=2):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


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
