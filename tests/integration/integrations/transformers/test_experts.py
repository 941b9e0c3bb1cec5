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


def _fit(
    directory: str,
    sizes: dict[str, Any],
    resume: str = "",
    *,
    sharding: Any = "fsdp",
    prepare: Callable[[nn.Module], None],
) -> dict[str, Tensor]:
    """As :func:`runs.train_sharded`, with a Trainer of Lightning, two steps an epoch."""
    pl, size = training.load(), int(os.environ["WORLD_SIZE"])

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                config = transformers.DistributedConfig(**sizes) if sizes else None
                self.net = Qwen3MoeForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
                prepare(self.net)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return F.cross_entropy(self.net(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return training.adamw(self)

    loader = DataLoader(torch.stack([sample["input_ids"] for sample in runs.samples(16)]), batch_size=8 // size)
    strategy = ParallelMuonStrategy(optimizer=training.EXACT, sharding=sharding if size > 1 else "none")
    saves = pl.callbacks.ModelCheckpoint(f"{directory}/out", filename="checkpoint-{epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saves]} if sizes and not resume else {}
    module = Module()
    fitter = training.trainer(pl, strategy=strategy, gradient_clip_val=NORM, **options)
    fitter.fit(module, loader, ckpt_path=resume or None)
    return weights_of(module)


@pytest.mark.parametrize("prepare", [_as_it_is, _force_routes])
@pytest.mark.parametrize(
    ("train", "saved", "others", "tolerance"),
    [
        (runs.train_sharded, "checkpoint-2", [(2, {"fsdp_size": 2}, {})], 1e-6),
        # Four steps at a high rate.
        (_fit, "checkpoint-epoch=0.ckpt", [(4, {}, {"sharding": mode}) for mode in ("fsdp", "zero2", "ddp")], 3e-6),
    ],
)
def test_experts_train_like_one_process_and_go_on_on_other_ranks(
    gloo: ProcessPool, tmp_path: Path, train: Any, saved: str, others: Any, tolerance: float, prepare: Any
) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected, resume = gloo.run(train, str(tmp_path), {}, prepare=prepare, world_size=1)[0], ""
    divided = {"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 4, "ep_size": 4}
    divided += ({"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},)
    for world_size, sizes, options in [*((4, {**each, **_EXCHANGE}, {}) for each in divided), *others]:
        given = {"prepare": prepare, "world_size": world_size, **options}
        found = gloo.run(train, str(tmp_path), sizes, resume, **given)[0]
        assert max_difference(found, expected) < tolerance, (sizes, options)
        resume = f"{tmp_path}/out/{saved}"
