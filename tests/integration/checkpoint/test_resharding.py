"""A checkpoint goes on with other numbers of ranks, divided in other ways: the same weights and states, bit by bit.

Each group of ranks saves, or loads all that was saved, in all its modes: processes are what takes time here.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon import forward_backward
from tests.integration.integrations.fabric.loop import launch, own_rows
from tests.integration.training import EXACT
from tests.support.processes import ProcessPool

_VOCABULARY, _WIDTH, _ROWS = 13, 7, 24
_COPY, _ORIGINAL = "parts.3.weight", "parts.0.weight"  # In a pipeline the tied head is a copy.
Tensors = dict[str, Tensor]


class _Divided(nn.Module):
    """Layers for a plan of tensor ranks, and a matrix of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(_WIDTH, bias=False), nn.Linear(_WIDTH, 1, bias=False)
        self.up, self.down = nn.Linear(_WIDTH, 14), nn.Linear(14, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gate(x)


class _Odd(nn.Module):
    """Matrices of 13 x 7 and 7 x 13, one that is not used, and one that is frozen after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 13, bias=False), nn.Linear(13, _WIDTH, bias=False)
        self.frozen, self.unused = nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.frozen(x))))


class _Model(nn.Module):
    """Two layers between tied embeddings, in parts that a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.parts = nn.ModuleList([nn.Embedding(_VOCABULARY, _WIDTH), _Divided(), _Odd(), head])
        head.weight = self.parts[0].weight

    def pipeline_parts(self) -> list[nn.Module]:
        return list(self.parts)

    def pipeline_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(output, target, reduction="sum"), torch.tensor(len(target))

    def forward(self, tokens: Tensor) -> Tensor:
        for part in self.parts:
            tokens = part(tokens)
        return tokens


def _stages(size: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"pipeline_size": size, "pipeline_schedule": schedule, "pipeline_microbatches": 4, **more}


# With state for the rows of matrices.
_OPTIMIZER = replace(EXACT, normuon=True)
# World size -> name -> options.
_MODES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {"sharding": "none"}},
    2: {"2": {}, "2 stages": _stages(2)},
    3: {"3": {}},
    4: {
        "1x4": {"shard_size": 4},
        "2x2": {"replicate_size": 2, "shard_size": 2},
        "4x1": {"replicate_size": 4, "shard_size": 1},
        "zero2": {"sharding": "zero2"},
        "ddp": {"sharding": "ddp"},
        "fsdp x tp": {"shard_size": 2, "tensor_size": 2},
        "2 stages x 2": _stages(2, "interleaved_1f1b", shard_size=2),
        "4 stages": _stages(4),
        "one file": {"save_distributed_checkpoint": False},
    },
    8: {"1x8": {"shard_size": 8}},
}
_SAVED = {1: ["none"], 4: ["1x4", "2x2", "zero2", "fsdp x tp", "2 stages x 2", "one file"]}
# Mode -> those of whose checkpoints it goes on.
_LOADED = {
    "none": [*_SAVED[1], *_SAVED[4]],
    "2": ["1x4", "fsdp x tp"],
    "2 stages": ["none", "2 stages x 2", "one file"],
    "3": ["1x4", "2 stages x 2"],
    "1x4": ["2x2", "fsdp x tp"],
    "4x1": ["2x2"],
    "zero2": ["1x4"],
    "ddp": ["zero2"],
    "fsdp x tp": ["none", "1x4", "one file"],
    "4 stages": ["2 stages x 2"],
    "1x8": ["1x4", "2x2"],
}


class _Run:
    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        torch.manual_seed(seed)
        self.fabric, module = launch(**{"optimizer": _OPTIMIZER, **options}), _Model()
        if "tensor_size" in options:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(module.parts[1], self.fabric.strategy.device_mesh["tensor"], plan)
        given = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.8, 0.9))
        self.model, self.optimizer = self.fabric.setup(module, given)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "scheduler": scheduler, "step": 0}
        self.is_pipeline = "pipeline_size" in options

    def step(self) -> None:
        tokens = torch.randint(0, _VOCABULARY, (_ROWS,), generator=torch.Generator().manual_seed(0))
        batch = own_rows(self.fabric, (tokens, (3 * tokens + 1) % _VOCABULARY))
        if self.is_pipeline:
            forward_backward(self.model, batch)
        else:
            self.fabric.backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        self.optimizer.step()
        self.state["scheduler"].step()
        self.state["step"] += 1

    def freeze(self) -> None:
        for part in self.model.module.modules():
            if isinstance(part, _Odd):
                part.frozen.requires_grad_(False)

    def gathered(self) -> Tensors:
        """Whole weights and states of the parameters of this rank, without functions of the package."""
        own = {parameter: name for name, parameter in self.model.module.named_parameters()}
        names = [own[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        found = {name: parameter.detach() for parameter, name in own.items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"{names[number]} {entry}": value for entry, value in entries.items()}
        return {name: (value.full_tensor() if isinstance(value, DTensor) else value) for name, value in found.items()}

    def scramble(self) -> None:
        """Other weights and states than those that a load must bring."""
        state = self.optimizer.state_dict()
        with torch.no_grad():
            for parameter in self.model.module.parameters():
                parameter.fill_(7.0)
        for value in (value for entries in state["state"].values() for value in entries.values()):
            value.fill_(7.0)
        self.optimizer.load_state_dict(state)


def _save(folder: str) -> None:
    """Take a step, and save in each mode; beside it what the ranks have then."""
    for name in _SAVED[dist.get_world_size()]:
        run = _Run(0, _MODES[dist.get_world_size()][name])
        run.step()
        run.freeze()
        run.fabric.save(f"{folder}/{name}", run.state)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, run.gathered())
        run.fabric.strategy.teardown()
        whole = {key: value for part in parts for key, value in part.items()}
        assert any("second_momentum_buffer" in key for key in whole)
        assert all(torch.equal(whole[key], value) for part in parts for key, value in part.items())
        if dist.get_rank() == 0:
            torch.save(whole, f"{folder}/{name}.expected")


def _load(folder: str) -> list[tuple[str, str, str]]:
    """What differs after each load: mode, checkpoint, and what it is."""
    found: list[tuple[str, str, str]] = []
    for mode, options in _MODES[dist.get_world_size()].items():
        run = _Run(1, options) if mode in _LOADED else None
        for name in _LOADED.get(mode, ()):
            assert run is not None
            run.freeze()
            run.scramble()
            assert run.fabric.load(f"{folder}/{name}", run.state) == {}
            assert run.optimizer.param_groups[0]["lr"] == 5e-3 and run.state["step"] == 1
            expected = torch.load(f"{folder}/{name}.expected")
            for key, value in run.gathered().items():
                wanted = expected.get(key, expected[key.replace(_COPY, _ORIGINAL)])
                found += [] if torch.equal(value, wanted) else [(mode, name, key)]
        if run is not None:
            run.fabric.strategy.teardown()
    return found


@pytest.fixture(scope="module")
def folder(gloo: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all modes have saved."""
    path = str(tmp_path_factory.mktemp("saved"))
    for world_size in _SAVED:
        gloo.run(_save, path, world_size=world_size)
    return path


@pytest.mark.parametrize("world_size", _MODES)
def test_states_are_the_same_in_other_modes(gloo: ProcessPool, folder: str, world_size: int) -> None:
    assert gloo.run(_load, folder, world_size=world_size) == [[]] * world_size


def _load_without_rows(folder: str) -> list[Tensor]:
    """The state of a matrix that goes on with NorMuon after a checkpoint without them."""
    found: list[Tensor] = []
    for name, options in (("shards", {}), ("one file", {"save_distributed_checkpoint": False})):
        before = _Run(0, options | {"optimizer": EXACT})
        before.step()
        before.fabric.save(f"{folder}/{name}", before.state)
        before.fabric.strategy.teardown()
        run = _Run(1, options)
        run.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fabric.load(f"{folder}/{name}", run.state)
        said = [str(each.message) for each in caught if "second moments begin with zeros" in str(each.message)]
        assert len(said) == (dist.get_rank() == 0)
        after = run.gathered()
        key = next(key for key in after if key.endswith("up.weight momentum_buffer"))
        assert not after[key.replace("momentum_buffer", "second_momentum_buffer")].any()
        found.append(after[key])
        run.fabric.strategy.teardown()
    return found


def test_a_checkpoint_without_values_of_rows_begins_them(gloo: ProcessPool, tmp_path: Path) -> None:
    for shards, file in gloo.run(_load_without_rows, str(tmp_path), world_size=2):
        assert shards.any() and torch.equal(shards, file)
