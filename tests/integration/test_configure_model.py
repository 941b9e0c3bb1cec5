"""Models that configure_model creates or divides: on the meta device, by FSDP2 or tensor parallelism, or compiled."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_muon import DCTTopK, FlexDeMoConfig
from tests.integration import training
from tests.support.processes import ProcessPool

# All weights are compared after each step.
_NODES = FlexDeMoConfig(base="adamw", replicator=DCTTopK(chunk_size=8, top_k=4), check_every=1)


def _divide(network: Any, mesh: Any) -> None:
    """Its blocks are tensor parallel."""
    for block in network.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _on_meta(pl: Any, *, shard: bool = False, divides: bool = False, tied: bool = False) -> Any:
    model = training.language_model(pl, network=nn.Identity)

    def configure_model(self: Any) -> None:
        if not isinstance(self.network, nn.Identity):
            return
        with torch.device("meta"):
            self.network = _Initialized(tied=tied)
        if divides:
            _divide(self.network, self.device_mesh["tensor"])
        for unit in [*self.network.blocks, self.network] if shard else ():
            fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    type(model).configure_model = configure_model
    return model


class _Initialized(training.Network):
    """Initializes layers of its blocks again, which are sharded by then."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.blocks[0].up.weight, -3, 3)


def _train_from_meta(sizes: dict[str, Any], **options: Any) -> dict[str, Any]:
    pl = training.load()
    # The same on all ranks, whose shards must differ nevertheless; other ones on those of nodes, which must not.
    torch.manual_seed(3 + ("optimizer" in sizes) * dist.get_rank())
    model, initial = _on_meta(pl, **options), dict[str, Tensor]()
    capture = pl.callbacks.LambdaCallback(on_fit_start=lambda _, module: initial.update(training.full_weights(module)))
    fitter = training.trainer(pl, strategy=training.strategy_class()(**sizes), callbacks=[capture])
    fitter.fit(model, training.loader(), training.loader())
    is_tied = model.network.head.weight is model.network.embedding.weight
    return {"losses": model.losses, "initial": initial, "tied": is_tied}


@pytest.mark.parametrize(
    ("sizes", "options", "world_size"),
    [
        ({}, {}, 2),
        ({"replicate_size": 2}, {"tied": True}, 4),
        ({"replicate_size": 2, "optimizer": _NODES}, {}, 4),
        ({}, {"shard": True}, 2),
        ({"tensor_size": 2}, {"divides": True}, 4),
    ],
)
def test_a_model_on_the_meta_device_is_initialized_unit_by_unit(
    gloo: ProcessPool, sizes: dict[str, Any], options: dict[str, Any], world_size: int
) -> None:
    outcomes = gloo.run(_train_from_meta, sizes, world_size=world_size, **options)
    initial, losses = outcomes[0]["initial"], outcomes[0]["losses"]
    assert all(torch.isfinite(tensor).all() for tensor in initial.values())
    # As nn.Linear initializes itself: uniform in +- 1 / sqrt(inputs).
    up = initial["network.blocks.1.up.weight"]
    assert 0.2 < up.abs().max() <= 0.25 and torch.linalg.matrix_rank(up) == 16
    again = initial["network.blocks.0.up.weight"]
    assert 2.5 < again.abs().max() <= 3 and torch.linalg.matrix_rank(again) == 16
    assert not torch.equal(*again.chunk(2)), "two ranks drew the same shard"
    assert initial["network.embedding.weight"].std() == pytest.approx(1.0, abs=0.2)
    assert outcomes[0]["tied"] == options.get("tied", False)
    assert all(outcome["losses"] == losses for outcome in outcomes) and losses[-1] < losses[0]


_AS_LIGHTNING = "as for Lightning's strategy"


def _fit(options: dict[str, Any], user: str = "") -> tuple[dict[str, Tensor], list[str]]:
    """Weights after an epoch of a model that the user divides, and its units."""
    pl = training.load()
    model = training.language_model(pl)
    del type(model).on_train_batch_end

    def configure_model(self: Any) -> None:
        if user == _AS_LIGHTNING:
            _divide(self.network, self.device_mesh["tensor_parallel"])
        for block in self.network.blocks if user else ():
            unit = block.up if user == "layers" else block
            if not isinstance(unit, FSDPModule):
                fully_shard(unit, mesh=self.device_mesh["shard" if user == "layers" else "data_parallel"])

    type(model).configure_model = configure_model
    strategy = training.strategy_class()(optimizer=training.EXACT, **options)
    data = DataLoader(training.dataset(), batch_size=4 if user else 8)  # There are two data ranks.
    training.trainer(pl, strategy=strategy, gradient_clip_val=0.3, max_epochs=1).fit(model, data)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return training.full_weights(model), units


@pytest.mark.parametrize(
    ("options", "user", "world_size", "unit"),
    [
        ({}, "layers", 2, "network.blocks.0.up"),
        ({}, _AS_LIGHTNING, 2, "network.blocks.0"),
        ({"tensor_size": 2, "replicate_size": 2}, _AS_LIGHTNING, 4, "network.blocks.0"),
    ],
)
def test_units_of_the_user_are_left_alone(
    gloo: ProcessPool, options: dict[str, Any], user: str, world_size: int, unit: str
) -> None:
    weights, units = gloo.run(_fit, options, user, world_size=world_size)[0]
    assert unit in units
    assert training.max_difference(weights, gloo.run(_fit, {}, world_size=1)[0][0]) < 5e-6


def _compiled(where: str, directory: str) -> tuple[dict[str, Any], list[str]]:
    pl = training.load()
    model = training.language_model(pl)
    if where == "network":
        model.network = torch.compile(model.network, backend="eager")
    elif where == "blocks":
        for index, block in enumerate(model.network.blocks):
            model.network.blocks[index] = torch.compile(block, backend="eager")
    elif where == "in place":
        model.network.compile(backend="eager")
    strategy = training.strategy_class()(optimizer=training.EXACT, save_distributed_checkpoint=False)
    fitter = training.trainer(pl, strategy=strategy, max_epochs=1)
    fitter.fit(model, training.loader(), training.loader())
    fitter.save_checkpoint(f"{directory}/whole.ckpt")
    return training.full_weights(model), sorted(model.state_dict())


def test_compiled_modules_train_as_plain_ones(gloo: ProcessPool, tmp_path: Any) -> None:
    plain, _ = gloo.run(_compiled, "", str(tmp_path), world_size=2)[0]
    for where in ("network", "blocks", "in place"):
        weights, names = gloo.run(_compiled, where, str(tmp_path), world_size=2)[0]
        assert training.max_difference(weights, plain) < 1e-5
        saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
        assert sorted(saved) == names, "those of the module itself, so that load_state_dict takes them"
