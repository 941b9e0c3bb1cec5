"""A Trainer whose nodes exchange components of momenta: weights, resumed runs, checkpoints, other numbers of nodes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, NoReplication
from tests.integration import training
from tests.support.processes import ProcessPool

# So small that matrices of the test are compressed, but biases and norms travel dense.
_SPARSE = {"replicator": DCTTopK(chunk_size=8, top_k=4), "dense_below": 100, "lr": 1e-2, "check_every": 1}


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
    resume: str | None = None,
    single_file: bool = False,
    drifting: bool = False,
    **options: Any,
) -> tuple[list[float], Any, dict[str, Tensor]]:
    """Losses, whole weights (rank 0; if nodes drift each rank's shards after each epoch), residuals of all nodes."""
    pl = training.load()
    model = training.language_model(pl, configure=None, network=_Net, seed=dist.get_rank() if resume else 0)
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
    fitter.fit(model, training.loader(), ckpt_path=resume)
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
