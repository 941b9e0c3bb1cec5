"""A Trainer whose nodes exchange components of momenta: weights, resumed runs, checkpoints, other numbers of nodes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import DCTTopK, Full, NoReplication
from tests.integration import training
from tests.support.processes import ProcessPool

# So small that matrices of the test are compressed, but biases and norms travel dense.
_SPARSE = {"replicator": DCTTopK(chunk_size=8, top_k=4), "dense_below": 100, "lr": 1e-2, "check_every": 1}
# All of each momentum travels, so nodes compute what one process would.
_MEAN: dict[str, Any] = {
    "replicator": Full(), "value_format": "fp32", "decay": 0.0, "merge": "mean", "check_every": 1,
}  # fmt: skip


class _Net(training.Network):
    """With a frozen and an unused layer, and a 0-d weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * super().forward(tokens) + self.head(self.frozen(self.embedding(tokens)))


def _fit(
    directory: str = "",
    *,
    config: dict[str, Any] | None = None,
    nodes: int = 2,
    scheduled: bool = False,
    resume: str | None = None,
    single_file: bool = False,
    drifting: bool = False,
    **options: Any,
) -> tuple[list[float], Any, dict[str, Tensor]]:
    """Losses, whole weights (rank 0; if nodes drift each rank's shards after each epoch), residuals of all nodes."""
    pl = training.load()
    configure = _adamw_scheduled if scheduled else None
    model = training.language_model(pl, configure=configure, network=_Net, seed=dist.get_rank() if resume else 0)
    if directory:
        callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
        options |= {"callbacks": [callback], "enable_checkpointing": True}
    chosen = training.strategy_class()(
        replicate_size=nodes,
        optimizer=FlexDeMoConfig(**(_SPARSE | (config or {}))),
        save_distributed_checkpoint=not single_file,
    )
    shards: list[dict[str, Tensor]] = []

    def on_train_epoch_end(module: Any) -> None:
        shards.append({name: _local(parameter.detach()).clone() for name, parameter in module.named_parameters()})

    type(model).on_train_epoch_end = on_train_epoch_end
    fitter = training.trainer(pl, strategy=chosen, **({"max_epochs": 2} | options))
    fitter.fit(
        model, training.loader(), training.loader() if options.get("limit_val_batches") else None, ckpt_path=resume
    )
    optimizer = fitter.optimizers[0]
    names = {parameter: name for name, parameter in model.named_parameters()}
    residuals = {
        names[parameter]: state["residual"].full_tensor().clone()
        for parameter, state in optimizer.state.items()
        if parameter.requires_grad and "residual" in state
    }
    if drifting:
        return model.losses, shards, residuals
    _require_equal_nodes(model)
    return model.losses, training.full_weights(model), residuals


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _require_equal_nodes(module: nn.Module) -> None:
    """All ranks have bit-equal whole weights."""
    for name, parameter in module.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()
        first = whole.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, whole), name


def _adamw_scheduled(module: nn.Module) -> Any:
    parameters = list(module.parameters())
    groups = [{"params": parameters[:4], "lr": 5e-3}, {"params": parameters[4:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05, betas=(0.8, 0.9), eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _loop(shape: tuple[int, int], config: dict[str, Any], accumulate: int, *, scheduled: bool) -> dict[str, Tensor]:
    """What ``_fit`` does, without Lightning and without the sharding modes."""
    torch.manual_seed(0)
    net = nn.Module()
    net.network = _Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    # Without gradients of the unused layer FSDP2 waits for nothing; 0-d weights are not for it.
    scale = net.network.scale
    for block in net.network.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net.network, mesh=mesh["shard"], ignored_params={scale})
    options = _SPARSE | config | {"mesh": mesh}
    parameters: Any = list(net.named_parameters())
    if scheduled:
        options |= {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.8, 0.9), "adamw_eps": 1e-6}
        parameters = [{"params": parameters[:4], "lr": 5e-3}, {"params": parameters[4:], "weight_decay": 0.0}]
    optimizer = FlexDeMo(parameters, **options)
    optimizer.attach(net)
    rates = [group["lr"] for group in optimizer.param_groups]
    sampler = DistributedSampler(training.dataset(), shuffle=True, seed=0)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(DataLoader(training.dataset(), batch_size=8 // dist.get_world_size(), sampler=sampler))
        for first in range(0, len(batches), accumulate):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + step) if scheduled else rate
            window = batches[first : first + accumulate]
            for index, (tokens, targets) in enumerate(window):
                net.network.set_requires_gradient_sync(index == len(window) - 1)
                (training.loss_of(net.network(tokens), targets) / accumulate).backward()
            dist.all_reduce(scale.grad, group=mesh.get_group("shard"))
            scale.grad /= shape[1]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return training.full_weights(net)


@pytest.mark.parametrize(
    ("shape", "config", "options"),
    [
        ((2, 1), {"base": "adamw"}, {"scheduled": True, "accumulate_grad_batches": 2}),
        ((2, 2), {"base": "muon", "compute_dtype": "float32", "wire_dtype": "float32"}, {}),
    ],
    ids=str,
)
def test_weights_are_those_of_a_plain_loop(
    gloo: ProcessPool, shape: tuple[int, int], config: dict[str, Any], options: dict[str, Any]
) -> None:
    size = shape[0] * shape[1]
    _, weights, _ = gloo.run(_fit, config=config, world_size=size, **options)[0]
    accumulate = options.get("accumulate_grad_batches", 1)
    plain = gloo.run(_loop, shape, config, accumulate, scheduled="scheduled" in options, world_size=size)[0]
    # FSDP2 units differ, and with them the order of sums; sign and top-k may turn a difference over.
    assert training.max_difference(weights, plain) < 1e-5


_EVERYTHING = {
    "gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "precision": "bf16-mixed", "limit_val_batches": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "config", "options"),
    [
        (2, {"base": "muon"}, _EVERYTHING | {"scheduled": True}),
        (2, {"base": "adamw"}, {"precision": "bf16-true", "single_file": True}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal(
    gloo: ProcessPool, tmp_path: Path, world_size: int, config: dict[str, Any], options: dict[str, Any]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    kind = {"config": config, "world_size": world_size, **options}
    whole = gloo.run(_fit, first, **kind)
    checkpoint = f"{first}/epoch=0.ckpt"
    assert Path(checkpoint).is_dir() != options.get("single_file", False)
    resumed = gloo.run(_fit, second, resume=checkpoint, **kind)
    assert resumed[0][0] == whole[0][0][len(whole[0][0]) // 2 :]
    assert all(torch.equal(resumed[0][1][name], whole[0][1][name]) for name in whole[0][1])
    for before, after in zip(whole, resumed, strict=True):
        assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert any(residual.any() for residual in whole[-1][2].values()), "there is something to keep"


@pytest.mark.parametrize(("saved", "loaded", "single_file"), [((2, 2), (3, 1), False), ((3, 1), (2, 1), True)])
def test_other_nodes_and_shards_keep_the_mean_of_residuals(
    gloo: ProcessPool, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], single_file: bool
) -> None:
    kind = {"single_file": single_file, "max_epochs": 1, "limit_train_batches": 2}
    sizes = {"nodes": saved[0], "world_size": saved[0] * saved[1]}
    _, weights, before = gloo.run(_fit, str(tmp_path), **kind, **sizes)[0]
    # A run that has ended is loaded, and trains no further.
    sizes = {"nodes": loaded[0], "world_size": loaded[0] * loaded[1]}
    losses, same_weights, after = gloo.run(_fit, resume=f"{tmp_path}/epoch=0.ckpt", **kind, **sizes)[0]
    assert not losses and after.keys() == before.keys()
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
    assert any(not torch.equal(tensor[0], tensor[1]) for tensor in before.values()), "nodes have residuals of their own"
    for name, tensor in before.items():
        assert after[name].shape == (loaded[0], *tensor.shape[1:])
        assert all(torch.equal(own, tensor.mean(0)) for own in after[name])
    # The nodes of now go on, with equal weights after each step.
    losses = gloo.run(_fit, resume=f"{tmp_path}/epoch=0.ckpt", **kind | {"max_epochs": 2}, **sizes)[0][0]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_independent_nodes_resume_with_equal_bits(gloo: ProcessPool, tmp_path: Path) -> None:
    """Saved after half of the steps."""
    kind: dict[str, Any] = {"config": {"replicator": NoReplication()}, "drifting": True, "single_file": True}
    whole = gloo.run(_fit, str(tmp_path / "first"), **kind)
    checkpoint = f"{tmp_path}/first/epoch=0.ckpt"
    resumed = gloo.run(_fit, str(tmp_path / "second"), resume=checkpoint, **kind)
    for before, after in zip(whole, resumed, strict=True):
        assert after[0] == before[0][len(before[0]) // 2 :]
        assert all(torch.equal(after[1][-1][name], value) for name, value in before[1][-1].items())
    saved = gloo.run(_saved_weights, checkpoint, world_size=2)[0]
    first, second = whole[0][1][0], whole[2][1][0]
    assert any(not torch.equal(first[name], second[name]) for name in first), "the nodes differ"
    whole_saved = {name: saved[name][: len(shard)] if shard.ndim else saved[name] for name, shard in first.items()}
    assert all(torch.equal(whole_saved[name], shard) for name, shard in first.items())


def _saved_weights(checkpoint: str) -> dict[str, Tensor]:
    """What a run with ParallelMuon finds in a checkpoint."""
    pl = training.load()
    model = training.language_model(pl, network=_Net, seed=9)
    fitter = training.trainer(pl)
    fitter.validate(model, training.loader(), ckpt_path=checkpoint, verbose=False)
    return training.full_weights(model)


def _summed(nodes: int) -> dict[str, Tensor]:
    """Each rank sums over other numbers of tokens."""
    pl = training.load(training.PACKAGES[1])
    model = training.language_model(pl, configure=None)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        num_tokens = 1 + dist.get_rank()
        self.trainer.strategy.report_tokens(num_tokens)
        return num_tokens * training.loss_of(self(batch[0]), batch[1])

    type(model).training_step = training_step
    del type(model).on_train_batch_end
    config = FlexDeMoConfig(lr=0.05, sign=False, **_MEAN)
    chosen = training.strategy_class(training.PACKAGES[1])(
        replicate_size=nodes, optimizer=config, loss_scaling="tokens"
    )
    training.trainer(pl, strategy=chosen, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1e9).fit(
        model, training.loader()
    )
    return training.full_weights(model)


def test_gradients_by_tokens_ignore_the_number_of_nodes(gloo: ProcessPool) -> None:
    one, two = (gloo.run(_summed, nodes, world_size=2)[0] for nodes in (1, 2))
    # The same numbers are added up in another order.
    assert training.max_difference(two, one) < 1e-5


def _with_adagrad() -> None:
    pl = training.load(training.PACKAGES[1])
    model = training.language_model(pl, configure=lambda module: torch.optim.Adagrad(module.parameters()))
    training.trainer(pl, strategy="flexdemo").fit(model, training.loader())


def test_an_optimizer_that_lets_nodes_drift_apart_is_an_error(gloo: ProcessPool) -> None:
    match = "cannot stand in for the Adagrad that configure_optimizers"
    gloo.expect_error_on_all_ranks(_with_adagrad, world_size=2, match=match)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))
        self.critic = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(child.parameters(), lr=1e-2) for child in (self.generator, self.critic)]

    def generator_loss(self, tokens: Tensor) -> Tensor:
        fake = self.generator(tokens.float() / 20)
        return (fake - tokens[:, :4] / 9).square().mean() - self.critic(fake).mean()

    def critic_loss(self, tokens: Tensor) -> Tensor:
        real, fake = tokens[:, :4] / 9, self.generator(tokens.float() / 20).detach()
        return self.critic(fake).mean() - self.critic(real).mean() + self.critic(real).square().mean()


def _gan(toggle: bool) -> dict[str, Tensor]:
    pl = training.load()

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            pair = _Pair()
            self.generator, self.critic = pair.generator, pair.critic

        def configure_optimizers(self) -> Any:
            return _Pair.optimizers(self), []  # type: ignore[arg-type]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, loss in zip(self.optimizers(), (_Pair.generator_loss, _Pair.critic_loss), strict=True):
                if toggle:
                    self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(self, batch[0]))  # type: ignore[arg-type]
                optimizer.step()
                if toggle:
                    self.untoggle_optimizer(optimizer)

    config = FlexDeMoConfig(base="adamw", dense_below=0, **_MEAN)
    model = Gan()
    chosen = training.strategy_class()(replicate_size=2, optimizer=config)
    training.trainer(pl, strategy=chosen, max_epochs=1).fit(model, training.loader())
    return training.full_weights(model)


def _plain_gan() -> dict[str, Tensor]:
    torch.manual_seed(0)
    pair = _Pair()
    optimizers = pair.optimizers()
    for tokens, _ in training.plain_loader(0):
        for optimizer, loss in zip(optimizers, (pair.generator_loss, pair.critic_loss), strict=True):
            optimizer.zero_grad()
            loss(tokens).backward()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in pair.named_parameters()}


@pytest.mark.parametrize(("toggle", "world_size"), [(True, 2), (False, 4)])
def test_each_of_several_optimizers_exchanges_its_own(gloo: ProcessPool, toggle: bool, world_size: int) -> None:
    weights = gloo.run(_gan, toggle, world_size=world_size)[0]
    # The same numbers are added up in another order, and AdamW divides by them.
    assert training.max_difference(weights, _plain_gan()) < 1e-4


def _from_meta() -> dict[str, Tensor]:
    pl = training.load()
    model = training.language_model(pl, configure=None, network=nn.Identity)

    def configure_model(self: Any) -> None:
        if isinstance(self.network, nn.Identity):
            with torch.device("meta"):
                self.network = training.Network()

    type(model).configure_model = configure_model
    torch.manual_seed(7 * dist.get_rank() + 1)
    config = FlexDeMoConfig(**_SPARSE)
    chosen = training.strategy_class()(replicate_size=2, optimizer=config)
    training.trainer(pl, strategy=chosen, max_epochs=1).fit(model, training.loader())
    _require_equal_nodes(model)
    return training.full_weights(model)


def test_nodes_start_equal_from_the_meta_device(gloo: ProcessPool) -> None:
    weights = gloo.run(_from_meta, world_size=4)[0]
    assert all(tensor.isfinite().all() and tensor.any() for tensor in weights.values())
