"""Models that configure_model creates: on the meta device, sharded by the user, or compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_muon import MuonConfig
from tests.integration import training
from tests.support.processes import ProcessPool

_FLOAT32 = MuonConfig(compute_dtype="float32")


def _on_meta(pl: Any, *, shard: bool = False, tied: bool = False, network: Any = training.Network) -> Any:
    model = training.language_model(pl, network=nn.Identity)

    def configure_model(self: Any) -> None:
        if isinstance(self.network, nn.Identity):
            with torch.device("meta"):
                self.network = network(tied=tied)
            if shard:
                mesh = self.device_mesh["data_parallel"]
                for block in self.network.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.network, mesh=mesh)

    type(model).configure_model = configure_model
    return model


class _Initialized(training.Network):
    """Initializes layers of its blocks again, which are sharded by then."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.blocks[0].up.weight, -3, 3)


def _train_from_meta(sizes: dict[str, int], **options: Any) -> dict[str, Any]:
    pl = training.load()
    torch.manual_seed(3)  # The same on all ranks: shards must differ nevertheless.
    model = _on_meta(pl, network=_Initialized, **options)
    fitter = training.trainer(pl, strategy=training.strategy_class()(**sizes))
    captured: dict[str, Tensor] = {}

    class Capture(pl.Callback):
        def on_fit_start(self, _: Any, module: Any) -> None:
            captured.update(training.full_weights(module))

    fitter.callbacks.append(Capture())
    fitter.fit(model, training.loader(), training.loader())
    is_tied = model.network.head.weight is model.network.embedding.weight
    return {"losses": model.losses, "initial": captured, "tied": is_tied}


@pytest.mark.parametrize(("sizes", "options"), [({}, {}), ({"replicate_size": 2}, {"tied": True})])
def test_a_model_on_the_meta_device_is_initialized_unit_by_unit(gloo: ProcessPool, sizes: Any, options: Any) -> None:
    outcomes = gloo.run(_train_from_meta, sizes, world_size=4 if sizes else 2, **options)
    initial = outcomes[0]["initial"]
    assert all(torch.isfinite(tensor).all() for tensor in initial.values())
    # As nn.Linear initializes itself: uniform in +- 1 / sqrt(inputs).
    up = initial["network.blocks.1.up.weight"]
    assert 0.2 < up.abs().max() <= 0.25
    assert torch.linalg.matrix_rank(up) == 16
    again = initial["network.blocks.0.up.weight"]
    assert 2.5 < again.abs().max() <= 3 and torch.linalg.matrix_rank(again) == 16
    assert not torch.equal(*again.chunk(2)), "two ranks drew the same shard"
    assert initial["network.embedding.weight"].std() == pytest.approx(1.0, abs=0.2)
    assert outcomes[0]["tied"] == options.get("tied", False)
    assert all(outcome["losses"] == outcomes[0]["losses"] for outcome in outcomes)
    assert outcomes[0]["losses"][-1] < outcomes[0]["losses"][0]


def test_what_the_user_sharded_on_meta_is_initialized(gloo: ProcessPool) -> None:
    outcomes = gloo.run(_train_from_meta, {"data_parallel_size": 2}, shard=True, world_size=2)
    up = outcomes[0]["initial"]["network.blocks.0.up.weight"]
    assert torch.isfinite(up).all()
    assert torch.linalg.matrix_rank(up) == 16
    assert not torch.equal(*up.chunk(2)), "two ranks drew the same shard"
    assert outcomes[0]["losses"][-1] < outcomes[0]["losses"][0]


def _fit(*, shard: bool) -> tuple[list[float], dict[str, Any], list[str]]:
    pl = training.load()
    model = training.language_model(pl)

    def configure_model(self: Any) -> None:
        if not isinstance(self.network.blocks[0], FSDPModule):
            for block in self.network.blocks:
                fully_shard(block.up, mesh=self.device_mesh["shard"])

    if shard:
        type(model).configure_model = configure_model
    fitter = training.trainer(pl, strategy=training.strategy_class()(optimizer=_FLOAT32), gradient_clip_val=0.3)
    fitter.fit(model, training.loader())
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return model.losses, training.full_weights(model), units


def test_units_of_the_user_are_left_alone(gloo: ProcessPool) -> None:
    losses, weights, units = gloo.run(_fit, shard=True, world_size=2)[0]
    single = gloo.run(_fit, shard=False, world_size=1)[0]
    assert "network.blocks.0.up" in units
    assert losses == pytest.approx(single[0], abs=1e-4)
    assert training.max_difference(weights, single[1]) < 1e-4


def _compiled(where: str, directory: str = "") -> tuple[list[float], dict[str, Any], list[str]]:
    pl = training.load()
    model = training.language_model(pl)
    if where == "network":
        model.network = torch.compile(model.network, backend="eager")
    elif where == "blocks":
        for index, block in enumerate(model.network.blocks):
            model.network.blocks[index] = torch.compile(block, backend="eager")
    elif where == "in place":
        model.network.compile(backend="eager")
    strategy = training.strategy_class()(optimizer=_FLOAT32, save_distributed_checkpoint=False)
    fitter = training.trainer(pl, strategy=strategy, max_epochs=1)
    fitter.fit(model, training.loader(), training.loader())
    names = sorted(model.state_dict())
    if directory:
        fitter.save_checkpoint(f"{directory}/whole.ckpt")
    return model.losses, training.full_weights(model), names


def test_compiled_modules_train_as_plain_ones(gloo: ProcessPool, tmp_path: Any) -> None:
    plain = gloo.run(_compiled, "", world_size=2)[0]
    for where in ("network", "blocks", "in place"):
        losses, weights, names = gloo.run(_compiled, where, str(tmp_path), world_size=2)[0]
        assert losses == pytest.approx(plain[0], abs=1e-5)
        assert training.max_difference(weights, plain[1]) < 1e-5
        saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
        assert sorted(saved) == names, "those of the module itself, so that load_state_dict takes them"
