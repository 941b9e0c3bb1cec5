"""Ranks of one run with different programs: the same error on all of them, with what differs, within 10 seconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_muon import FlexDeMoConfig, MuonConfig
from tests.integration.training import Network, Stream, adamw, dataset, language_model, load, strategy_class, trainer
from tests.support.processes import ProcessPool


class _Evaluation(Network):
    """Its evaluation runs two units of the same size in another order."""

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = self.blocks if self.training else reversed(self.blocks)
        return self.head(second(first(self.embedding(tokens))))


def _changed(change: Callable[[Network], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        change(network := Network())
        return network

    return make


def _widen(network: Network) -> None:
    network.blocks[1].up, network.blocks[1].down = nn.Linear(16, 40), nn.Linear(40, 16)


def _with_schedule(module: nn.Module) -> Any:
    """The learning rate changes with the third step."""
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step >= 2))
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _adamw(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda module: torch.optim.AdamW(module.parameters(), **({"lr": 1e-2} | options))


_FLEX = {"optimizer": FlexDeMoConfig(), "replicate_size": 2}
# Kind -> what is in the place of the ordinary on all ranks, and what on rank 1; what the error names.
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "frozen": ({}, {"network": _changed(lambda network: network.head.requires_grad_(False))}, "network.head.weight"),
    "dtype": ({}, {"network": _changed(lambda network: network.blocks[0].double())}, "float64"),
    "shape": ({}, {"network": _changed(_widen)}, r"\(40, 16\)|\(40,"),
    "seed": ({}, {"seed": 1}, ""),
    "lr": ({}, {"configure": _adamw(lr=1e-3)}, "lr of the group of .* 0.01, rank 1 has .* 0.001"),
    "weight decay": ({}, {"configure": _adamw(weight_decay=0.7)}, "weight_decay of the group of .* 0.7"),
    "kind of optimizer": (
        {}, {"configure": lambda module: torch.optim.SGD(module.parameters())}, "what configure_optimizers returned",
    ),
    **{
        f"schedule, {options}": ({"strategy": options}, {"configure": _with_schedule}, "lr.* 0.005")
        for options in ({}, {"sharding": "zero2"}, {"sharding": "ddp"}, _FLEX, {"optimizer": "keep"})
    },
    "momentum": ({}, {"strategy": {"optimizer": MuonConfig(momentum=0.9)}}, "momentum=0.9"),
    "routing": ({}, {"strategy": {"optimizer": MuonConfig(adamw_patterns=("*.up.weight",))}}, "up.weight"),
    "plan": ({}, {"strategy": {"optimizer": MuonConfig(look_ahead=1)}}, "look_ahead=1"),
    "mesh": ({}, {"strategy": {"replicate_size": 2, "shard_size": 1}}, "'replicate_size' auto, rank 1 has .* 2"),
    "mesh that does not fit": ({}, {"strategy": {"replicate_size": 3}}, "3 replicas x 1 shards = 3 ranks, but there "),
    "sharding": ({}, {"strategy": {"sharding": "zero2"}}, "sharding.*zero2"),
    "units": ({}, {"strategy": {"wrap_policy": ("Linear",)}}, "Linear|FSDP2 unit"),
    "replicator": ({"strategy": _FLEX}, {"strategy": _FLEX | {"optimizer": FlexDeMoConfig(decay=0.5)}}, "decay=0.5"),
    "version of torch": ({}, {"version": ("torch.__version__", "2.0.0")}, "'torch' 2.0.0"),
    "version of lightning_muon": (
        {}, {"version": ("lightning_muon.engine.training.VERSION", "9.9")}, "'lightning_muon' 9.9",
    ),
    "a weight that one rank gathers alone": ({}, {"gathers": True}, "Rank 1: waits in redistribute_local_tensor"),
    "length of data": ({}, {"samples": 24}, "'batches of the epoch' 8, rank 1 has .* 6"),
    "length of a stream": ({"stream": True}, {"samples": 24}, "The ranks wait for each other in different places"),
    "accumulated batches": ({}, {"trainer": {"accumulate_grad_batches": 2}}, "'accumulate_grad_batches' .* 2"),
    "clipping": ({}, {"trainer": {"gradient_clip_val": 0.1}}, "'gradient_clip_val' .* 'gradient_clip_val' 0.1"),
    "steps": ({}, {"trainer": {"max_steps": 3}}, "'max_steps' .* 'max_steps' 3"),
    "precision": ({}, {"trainer": {"precision": "bf16-mixed"}}, "bfloat16|bf16"),
    "units of an evaluation": ({"evaluates": True}, {"network": _Evaluation}, r"network\.blocks\.[01]"),
}  # fmt: skip


def _fit(kind: str) -> tuple[str, float]:
    common, own, _ = _KINDS[kind]
    chosen: dict[str, Any] = common | (own if dist.get_rank() == 1 else {})
    pl = load()
    model = language_model(
        pl, network=chosen.get("network", Network), configure=chosen.get("configure", adamw), seed=chosen.get("seed", 0)
    )
    if "gathers" in chosen:
        model.on_train_batch_end = lambda *_: model.network.blocks[1].norm.weight.full_tensor()
    samples = Subset(dataset(), range(chosen.get("samples", 32)))
    batches = DataLoader(Stream(samples) if "stream" in chosen else samples, batch_size=4)
    strategy = strategy_class()(**chosen.get("strategy", {}))
    began = time.monotonic()
    try:
        with mock.patch(*chosen.get("version", ("torch.__version__", torch.__version__))):
            fitter = trainer(pl, strategy=strategy, use_distributed_sampler=False, **chosen.get("trainer", {}))
            (fitter.validate if chosen.get("evaluates") else fitter.fit)(model, batches)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


# For each other, until the watchdog ends them.
_WAIT = ("length of a stream", "a weight that one rank gathers alone")


@pytest.mark.parametrize("kind", _WAIT)
def test_ranks_that_wait_in_different_places_end_with_the_reason(gloo: ProcessPool, kind: str) -> None:
    gloo.expect_end_of_all_ranks(_fit, kind, match=f"ends: .*({_KINDS[kind][2]})", world_size=2)


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind not in _WAIT])
def test_a_disagreement_is_named_on_all_ranks(gloo: ProcessPool, kind: str) -> None:
    results = gloo.run(_fit, kind, world_size=2, timeout=60)
    for message, seconds in results:
        assert seconds < 10
        if match := _KINDS[kind][2]:
            assert re.search(match, message), message
        else:
            assert not message
    # A rank that raises by itself keeps the type of its error; the others say whose it is.
    said = [message.partition("differs between ranks")[2] or message.partition(": ")[2] for message, _ in results]
    assert max(said, key=len).endswith(min(said, key=len)), said
