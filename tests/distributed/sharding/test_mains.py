"""Float32 main weights of zero2: what is loaded, written, saved."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import full_state_dict
from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Format, OptimizerState, Weights, save
from tests.distributed.sharding.training import Training, mesh_of, model
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

BFLOAT = torch.bfloat16


def _start(shape: tuple[int, ...] = (), **options: Any) -> Training:
    return Training.start("zero2", mesh_of(shape or (dist.get_world_size(),)), net=model(BFLOAT), **options)


def _mains(training: Training) -> dict[str, Tensor]:
    """Whole ones, on every rank."""
    found = [{key: value.clone() for key, value in full_state_dict(training.net).items()}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _agree(training: Training) -> bool:
    """Whether the weights are the roundings of the main ones."""
    mains, weights = _mains(training), training.weights()
    return all(torch.equal(mains[name].to(BFLOAT), weight) for name, weight in weights.items())


def _followed() -> None:
    """What the program writes into weights counts, and what it leaves keeps all bits."""
    training = _start()
    training.step(0)
    before, held = _mains(training), training.weights()
    weight: Any = training.net.get_parameter("blocks.0.up.weight")
    weight.data[2:4].clamp_(-0.01, 0.01)
    training.net.load_state_dict({"embedding.weight": held["embedding.weight"]}, strict=False)
    now = _mains(training)
    changed = held["blocks.0.up.weight"].abs() > 0.01
    changed[:2] = changed[4:] = False
    assert changed.any()
    expected = torch.where(changed, weight.detach().float(), before["blocks.0.up.weight"])
    assert torch.equal(now.pop("blocks.0.up.weight"), expected)
    assert all(torch.equal(now[name], before[name]) for name in now)
    training.step(1)
    assert _agree(training)
    # A weight that is frozen has none, until it trains.
    assert training.mode.layout.local(training.net.tail.frozen.weight).dtype == BFLOAT  # type: ignore[union-attr]
    training.net.requires_grad_(True)
    before = _mains(training)["tail.frozen.weight"]
    for step in (2, 3):
        training.step(step)
    assert _agree(training) and not torch.equal(before, _mains(training)["tail.frozen.weight"])


def _given_in_32_bits() -> None:
    """A whole state dict, as a program loads it by itself, before and after the optimizer is there."""
    training, generator = _start(), torch.Generator().manual_seed(5)
    training.step(0)
    state = {name: torch.randn(each.shape, generator=generator) for name, each in training.net.named_parameters()}
    state["tail.head.weight"] = state["embedding.weight"]
    training.net.load_state_dict(state)
    assert _agree(training)
    assert all(torch.equal(value, state[name]) for name, value in _mains(training).items())
    assert all(value.dtype == BFLOAT for value in training.net.state_dict().values()), "local, and of the module"


def _copied() -> None:
    """A copy of the module has weights of its own."""
    training = _start()
    training.step(0)
    for other in (copy.deepcopy(training.net), pickle.loads(pickle.dumps(training.net))):
        assert all(type(value) is Tensor for value in other.state_dict().values())
        other.load_state_dict({name: torch.ones_like(value).float() for name, value in other.state_dict().items()})
        assert all(value.dtype == BFLOAT for value in full_state_dict(other).values())
    assert _agree(training)


def _trained_again() -> None:
    """The module goes on where it was, also where parts now lie elsewhere; it may thaw, and have another layer."""
    training = _start()
    training.step(0)
    before = _mains(training)
    training.mode.close()
    assert all(torch.equal(value, before[name]) for name, value in _mains(training).items()), "saved after the end"
    assert all(each.grad_dtype == each.dtype for each in training.net.parameters())
    training.net.requires_grad_(True)
    torch.manual_seed(0)
    training.net.tail.qkv = nn.Linear(7, 21, bias=False, dtype=BFLOAT)
    again = Training.start("zero2", mesh_of((dist.get_world_size(),)), net=training.net)
    others = {name: value for name, value in _mains(again).items() if name != "tail.qkv.weight"}
    assert all(torch.equal(value, before[name]) for name, value in others.items())
    again.step(1)
    assert _agree(again)
    after = _mains(again)
    assert not torch.equal(before["tail.frozen.weight"], after["tail.frozen.weight"])
    assert not torch.equal(after["tail.qkv.weight"], after["tail.qkv.weight"].to(BFLOAT).float())


@pytest.mark.parametrize("check", [_followed, _given_in_32_bits, _copied, _trained_again])
def test_main_weights(gloo: ProcessPool, check: Callable[[], None]) -> None:
    gloo.run(check, world_size=3)


def _parts(training: Training) -> dict[str, Any]:
    return {
        "model": Weights(training.net, training.mode.mesh, [training.optimizer]),
        "optimizer": OptimizerState(training.net, training.optimizer),
    }


def _found(training: Training) -> dict[str, Tensor]:
    state: Any = training.optimizer.state_dict()["state"]
    named = {f"{number} {key}": value for number, entries in state.items() for key, value in entries.items()}
    return _mains(training) | wholes(named)


def _save(path: str, whole: bool) -> dict[str, Tensor]:
    training = _start((2, 2))
    for step in range(2):
        training.step(step)
    save({Path(path): _parts(training)}, Format(whole=whole))
    return _found(training)


def _load(path: str, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    training = Training.start(name, mesh_of((dist.get_world_size(),)), net=model(dtype))
    Checkpoint.open(Path(path), metadata_name=None, weights_only=False).load(_parts(training), {}, strict=True)
    return _found(training)


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_has_the_mains_for_any_ranks_and_mode(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    path = str(tmp_path / "saved")
    saved, *_ = gloo.run(_save, path, whole, world_size=4)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not torch.equal(value, value.to(BFLOAT).float()) for value in saved.values())
    for ranks, name, dtype in [(3, "zero2", BFLOAT), (2, "fsdp", torch.float32)]:
        for found in gloo.run(_load, path, name, dtype, world_size=ranks):
            assert all(torch.equal(value, saved[key]) for key, value in found.items()), (ranks, name)
