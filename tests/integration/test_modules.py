"""What modules do themselves: configure_model creates or divides them, they are compiled, and optimize by hand."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_muon import DCTTopK, FlexDeMoConfig
from tests.integration import training
from tests.matrix.rows import MEAN
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


def _network(inputs: int, width: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    layers = (nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs))
    return nn.Sequential(*layers)


def _gan(pl: Any, *, toggle: bool = True, accumulate: bool = False, shared: bool = False) -> Any:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = _network(4, 16 if shared else 24, 6, nn.Tanh)
            self.discriminator = _network(6, 16, 1, nn.ReLU)
            self.log_temperature, self.scale = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(6))
            if shared:
                self.first = self.generator[0]  # Held twice.
                self.discriminator[2].weight = self.generator[2].weight
            else:
                self.log_temperature.requires_grad_(False)
                self.scale.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = F.one_hot(batch[0] % 5, 6).float()[:, :, :].mean(1)
            noise = torch.stack([real[:, 0], real[:, 1] - 1, batch[0].float().mean(1) / 9, real[:, 2]], 1)
            generator, discriminator = self.optimizers()
            synchronize = not accumulate or batch_idx % 2 == 1
            with discriminator.toggle_model(sync_grad=synchronize) if toggle else nullcontext():
                fake = self.generator(noise).detach() * self.scale
                d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
                self.manual_backward(d_loss)
                if synchronize:
                    discriminator.step()
                    discriminator.zero_grad()
            with generator.toggle_model(sync_grad=synchronize) if toggle else nullcontext():
                fake = self.generator(noise) * self.scale / self.log_temperature.exp()
                g_loss = F.softplus(-self.discriminator(fake)).mean()
                self.manual_backward(g_loss)
                if synchronize:
                    generator.step()
                    generator.zero_grad()
            if not toggle:
                discriminator.zero_grad()

        def configure_optimizers(self) -> Any:
            kwargs = {"lr": 2e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)}
            return [torch.optim.AdamW(parameters, **kwargs) for parameters in self.parts()]

        def parts(self) -> list[list[nn.Parameter]]:
            generator, discriminator = list(self.generator.parameters()), list(self.discriminator.parameters())
            first = [*generator, self.log_temperature, self.scale] if shared else generator
            return [first, [p for p in discriminator if all(p is not other for other in generator)]]

    return Gan()


def _train_gan(strategy: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[str], float]:
    """Weights, the optimizers, and how far a weight has moved."""
    pl = training.load()
    model = _gan(pl, **options)
    start = model.generator[2].weight.detach().clone()
    fitter = training.trainer(pl, strategy=training.strategy_class()(**strategy))
    fitter.fit(model, training.loader())
    weights = training.full_weights(model)
    moved = (weights["generator.2.weight"] - start).abs().max().item() if weights else 0.0
    return weights, [type(optimizer).__name__ for optimizer in fitter.optimizers], moved


_MEAN = {"optimizer": FlexDeMoConfig(**MEAN, dense_below=0), "replicate_size": 2}


@pytest.mark.parametrize(
    ("world_size", "is_nodes", "options"),
    [
        (4, False, {"shared": True}),
        (2, False, {"toggle": False}),
        (2, False, {"accumulate": True, "shared": True}),
        (4, True, {}),
    ],
)
def test_a_gan_trains_as_in_one_process(
    gloo: ProcessPool, world_size: int, is_nodes: bool, options: dict[str, Any]
) -> None:
    chosen = _MEAN if is_nodes else {"optimizer": training.EXACT}
    weights, kinds, moved = gloo.run(_train_gan, chosen, world_size=world_size, **options)[0]
    assert kinds == 2 * ["FlexDeMo" if is_nodes else "ParallelMuon"]
    assert moved > 1e-2
    alone = {"sharding": "none", "optimizer": "keep" if is_nodes else training.EXACT}
    assert training.max_difference(weights, gloo.run(_train_gan, alone, world_size=1, **options)[0][0]) < 2e-4
