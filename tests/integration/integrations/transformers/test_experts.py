"""Experts that transformers divides over ranks, DistributedConfig(ep_size=...): trained, saved and resumed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_muon import ParallelMuonStrategy
from tests.integration import training
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        Version("5.23") > Version(transformers.__version__), reason="before 5.23 transformers has no ep_size to train"
    ),
]
NORM = 0.3
_EXCHANGE = {"ep_implementation": "all_to_all"}  # How tokens get to their experts.


def _model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=runs.VOCABULARY,
        hidden_size=16,
        intermediate_size=19,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=False,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


def _experts_of(sample: int) -> tuple[int, int]:
    """Experts 2 and 3 are idle in the first step, 3 then has one row in eight, 0 ends idle, and 2 never has a token."""
    step, row = divmod(sample, runs.GLOBAL_BATCH)
    return (1, 3) if step == 3 else (0, 3) if step and row == 2 else (0, 1)


def _as_it_is(_: nn.Module) -> None:
    """The router of the model decides."""


def _force_routes(model: nn.Module) -> None:
    """Let each row say which two experts take its tokens, on any rank."""
    samples = {tuple(each["input_ids"].tolist()): index for index, each in enumerate(runs.samples())}
    chosen = list[Tensor]()

    def read(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        tokens = args[0] if args else kwargs["input_ids"]
        experts = torch.tensor([_experts_of(samples[tuple(row)]) for row in tokens.tolist()])
        chosen[:] = [experts.repeat_interleave(tokens.shape[1], 0)]

    def route(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return output[0], output[0].softmax(-1).gather(1, chosen[0]), chosen[0]

    model.register_forward_pre_hook(read, with_kwargs=True)
    for layer in model.get_submodule("model.layers").children():
        layer.get_submodule("mlp.gate").register_forward_hook(route)


@pytest.mark.parametrize("prepare", [_as_it_is, _force_routes])
def test_experts_train_like_one_process_and_go_on_on_other_ranks(
    gloo: ProcessPool, tmp_path: Path, prepare: Callable[[nn.Module], None]
) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected = gloo.run(runs.train_sharded, str(tmp_path), {}, prepare=prepare, world_size=1)[0]
    for world_size, resume, sizes in (
        (4, "", {"fsdp_size": 4, "ep_size": 2, **_EXCHANGE}),
        (4, f"{tmp_path}/out/checkpoint-2", {"fsdp_size": 4, "ep_size": 4, **_EXCHANGE}),
        (4, f"{tmp_path}/out/checkpoint-2", {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2, **_EXCHANGE}),
        (2, f"{tmp_path}/out/checkpoint-2", {"fsdp_size": 2}),
    ):
        found = gloo.run(runs.train_sharded, str(tmp_path), sizes, resume, prepare=prepare, world_size=world_size)[0]
        assert max_difference(found, expected) < 1e-6, sizes


def _fit(
    directory: str,
    sizes: dict[str, Any] | None,
    *,
    epochs: int = 2,
    resume: str | None = None,
    sharding: Any = "fsdp",
    prepare: Callable[[nn.Module], None],
) -> dict[str, Tensor]:
    """The same with a Trainer of Lightning, two steps an epoch; saved at the end."""
    pl = training.load()

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                config = None if sizes is None else transformers.DistributedConfig(**sizes)
                self.net = Qwen3MoeForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
                prepare(self.net)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return training.adamw(self)

    tokens = torch.stack([sample["input_ids"] for sample in runs.samples(16)])
    size = int(os.environ["WORLD_SIZE"])
    strategy = ParallelMuonStrategy(optimizer=training.EXACT, sharding=sharding)
    trainer = training.trainer(pl, strategy=strategy, max_epochs=epochs, gradient_clip_val=NORM)
    module = Module()
    trainer.fit(module, DataLoader(tokens, batch_size=8 // size), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(f"{directory}/saved")
    return weights_of(module)


@pytest.mark.parametrize("prepare", [_as_it_is, _force_routes])
def test_lightning_trains_experts_like_one_process_and_goes_on(
    gloo: ProcessPool, tmp_path: Path, prepare: Callable[[nn.Module], None]
) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected = gloo.run(_fit, str(tmp_path), None, sharding="none", prepare=prepare, world_size=1)[0]
    first = {"fsdp_size": 4, "ep_size": 2, **_EXCHANGE}
    gloo.run(_fit, str(tmp_path), first, epochs=1, prepare=prepare, world_size=4)
    for sizes, sharding in (
        ({"fsdp_size": 4, "ep_size": 4, **_EXCHANGE}, "fsdp"),
        ({"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2, **_EXCHANGE}, "fsdp"),
        *((None, mode) for mode in ("fsdp", "zero2", "ddp")),
    ):
        resume = f"{tmp_path}/saved"
        found = gloo.run(_fit, str(tmp_path), sizes, resume=resume, sharding=sharding, prepare=prepare, world_size=4)[0]
        assert max_difference(found, expected) < 3e-6, (sizes, sharding)  # Four steps at a high rate.
