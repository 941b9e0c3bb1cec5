"""Small LightningModules of either package, and Trainers that run inside the workers of the gloo pool."""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_muon
from lightning_muon.integrations import registry

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
VOCABULARY, WIDTH, LENGTH = 23, 16, 6
# In bfloat16 the order of sums shows in the third digit.
EXACT = lightning_muon.MuonConfig(compute_dtype="float32", wire_dtype="float32")


class Block(nn.Module):
    """Residual block: repeated, so that it becomes an FSDP2 unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *, num_blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


HYPER = {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.8, 0.9)}


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), **HYPER)


def dataset(num_samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    return TensorDataset(tokens, (3 * tokens + 1) % VOCABULARY)


def load(package: str = PACKAGES[0]) -> Any:
    """One of the two packages of Lightning, in a worker of the pool, which launches no further processes."""
    if "RANK" in os.environ:  # A process of the pool.
        os.environ["TORCHELASTIC_RUN_ID"] = "pool"
    return importlib.import_module(package)


def language_model(
    pl: Any,
    *,
    configure: Callable[[nn.Module], Any] | None = adamw,
    network: Callable[[], nn.Module] = Network,
    seed: int = 0,
) -> Any:
    """A LightningModule that logs ``loss`` and ``val``."""

    class LanguageModel(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.network = network()
            self.losses: list[float] = []

        def forward(self, tokens: Tensor) -> Tensor:
            return self.network(tokens)

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            loss = loss_of(self(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            # Not in a hook after a step, which would have to wait for the weights.
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
            return loss

        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("val", loss_of(self(batch[0]), batch[1]), sync_dist=True)

        def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("test", loss_of(self(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0]).argmax(-1)

    if configure is not None:
        LanguageModel.configure_optimizers = lambda self: configure(self)
    return LanguageModel()


def trainer(pl: Any, *, strategy: Any = "parallel_muon", **kwargs: Any) -> Any:
    """A quiet Trainer over all ranks of the pool's call."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return pl.Trainer(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **(quiet | kwargs))


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def loader(*, num_samples: int = 32) -> DataLoader[Any]:
    """The same batches of 8 on all ranks together, in the same order, at every number of ranks."""
    return DataLoader(dataset(num_samples), batch_size=8 // int(os.environ["WORLD_SIZE"]))


def strategy_class(package: str = PACKAGES[0]) -> Any:
    """The class, whose checkpoints are directories of shards, as those of large models are."""
    return partial(registry.strategy_class(package), save_distributed_checkpoint=True)


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name, on rank 0; nothing elsewhere. Collective."""
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.clone() for name, tensor in state.items()}


def max_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)
