"""Experts that transformers divides over ranks, DistributedConfig(ep_size=...): trained, saved and resumed."""

import os
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

import lightning_muon.hf
from lightning_muon import ParallelMuon, ParallelMuonStrategy
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration import training
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        Version("5.23") > Version(transformers.__version__), reason="before 5.23 transformers has no ep_size to train"
    ),
]
NORM = 0.3
MODES = ("fsdp", "zero2", "ddp")
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


def _alone(*, forced: bool = False) -> dict[str, Tensor]:
    """Weights of one process without any framework."""
    model, data, schedule = _model(), runs.samples(), runs.linear(0, runs.NUM_STEPS)
    if forced:
        _force_routes(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named.items() if "norm" not in name], "weight_decay": runs.WEIGHT_DECAY},
        {"params": [(name, p) for name, p in named.items() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = ParallelMuon(
        groups, lr=runs.LR, muon_lr_factor=MEASURED_MUON_LR_FACTOR, compute_dtype="float32", wire_dtype="float32"
    )
    optimizer.attach(model)
    for step in range(runs.NUM_STEPS):
        window = data[step * runs.GLOBAL_BATCH % len(data) :][: runs.GLOBAL_BATCH]
        tokens, labels = (torch.stack([sample[key] for sample in window]) for key in ("input_ids", "labels"))
        logits = model(tokens).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        for group in optimizer.param_groups:
            group["lr"] = runs.LR * schedule(step)
        optimizer.step()
        optimizer.zero_grad()
    return runs.whole_weights(model)


def _train(directory: str, sizes: dict[str, Any], resume: str = "", *, forced: bool = False) -> dict[str, Tensor]:
    """Weights after four steps; saved after two, or begun there."""
    with runs.accelerator_of("fsdp", ACCELERATE_USE_FSDP="false"):
        config = transformers.DistributedConfig(**sizes)
        model = Qwen3MoeForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
        if forced:
            _force_routes(model)
        ranks = sizes.get("tp_size", 1)
        options = {"max_grad_norm": NORM, "ranks_per_sample": ranks, "save_strategy": "steps", "save_steps": 2}
        run = runs.trainer(directory, model, kind=lightning_muon.hf.Trainer, **options)
        run.train(resume_from_checkpoint=resume or None)
        held = [p.to_local().numel() / p.numel() for name, p in run.model.named_parameters() if ".experts." in name]
        assert {1 / (sizes["fsdp_size"])} == set(held)  # As lightning-muon plan counts them, with any ep_size.
        return runs.whole_weights(run.model)


def test_experts_train_like_one_process_and_go_on_on_other_ranks(gloo: ProcessPool, tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected, saved = _alone(), f"{tmp_path}/checkpoint-2"
    first = gloo.run(_train, str(tmp_path), {"fsdp_size": 4, "ep_size": 2, **_EXCHANGE}, world_size=4)[0]
    assert max_difference(first, expected) < 1e-6
    for world_size, sizes in (
        (4, {"fsdp_size": 4, "ep_size": 4, **_EXCHANGE}),
        (4, {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2, **_EXCHANGE}),
        (2, {"fsdp_size": 2}),
    ):
        resumed = gloo.run(_train, str(tmp_path), sizes, saved, world_size=world_size)[0]
        assert max_difference(resumed, expected) < 1e-6, sizes


def _fit(
    directory: str,
    sizes: dict[str, Any] | None,
    *,
    epochs: int = 2,
    resume: str | None = None,
    sharding: Any = "fsdp",
    forced: bool = False,
) -> dict[str, Tensor]:
    """The same with a Trainer of Lightning, two steps an epoch; saved at the end."""
    pl = training.load()

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                config = None if sizes is None else transformers.DistributedConfig(**sizes)
                self.net = Qwen3MoeForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
                if forced:
                    _force_routes(self.net)

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
    trainer.save_checkpoint(f"{directory}/saved")
    return runs.whole_weights(module)


def test_lightning_trains_experts_like_one_process_and_goes_on(gloo: ProcessPool, tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected = gloo.run(_fit, str(tmp_path), None, sharding="none", world_size=1)[0]
    gloo.run(_fit, str(tmp_path), {"fsdp_size": 4, "ep_size": 2, **_EXCHANGE}, epochs=1, world_size=4)
    for sizes in ({"fsdp_size": 4, "ep_size": 4}, {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}):
        found = gloo.run(_fit, str(tmp_path), {**sizes, **_EXCHANGE}, resume=f"{tmp_path}/saved", world_size=4)[0]
        assert max_difference(found, expected) < 3e-6, sizes  # Four steps at a high rate.


def test_experts_without_tokens_on_a_rank_or_anywhere(gloo: ProcessPool, tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "model")
    expected = _alone(forced=True)
    for sizes in ({"fsdp_size": 4, "ep_size": 2}, {"fsdp_size": 4, "ep_size": 4}, {"fsdp_size": 4}):
        found = gloo.run(_train, str(tmp_path), sizes | _EXCHANGE, forced=True, world_size=4)[0]
        assert max_difference(found, expected) < 1e-6, sizes
    expected = gloo.run(_fit, str(tmp_path), None, sharding="none", forced=True, world_size=1)[0]
    for sizes, sharding in (({"fsdp_size": 4, "ep_size": 4, **_EXCHANGE}, "fsdp"), *((None, mode) for mode in MODES)):
        found = gloo.run(_fit, str(tmp_path), sizes, sharding=sharding, forced=True, world_size=4)[0]
        assert max_difference(found, expected) < 3e-6, (sizes, sharding)
