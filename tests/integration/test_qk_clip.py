"""``QKClip``: trainings against one process with whole weights that are scaled by hand; what it refuses."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_muon
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration import training
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

KINDS = ("separate", "grouped", "blocks", "heads")
HEADS, SIZE = 3, 5
WIDTH = HEADS * SIZE  # 15 rows of 3 heads: over 2 ranks 8 + 7, over 4 ranks 4 + 4 + 4 + 3.
THRESHOLD = 1.2
# The gradient of a key's bias is 0 but for rounding errors, of which AdamW with a small eps makes steps.
HYPER = {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.8, 0.9), "eps": 1e-3}
SAMPLES, GLOBAL_BATCH, ACCUMULATED, EPOCHS = 48, 12, 2, 2  # Two steps per epoch.


class Attention(nn.Module):
    """Causal self-attention; ``kind`` says how queries and keys are made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("separate", "grouped"):
            self.wq = nn.Linear(WIDTH, WIDTH)
            self.wk, self.wv = (nn.Linear(WIDTH, WIDTH if kind == "separate" else SIZE) for _ in range(2))
        else:
            self.add_module("qkv" if kind == "blocks" else "query_key_value", nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():  # So that some heads exceed the threshold.
            for parameter in self.parameters():
                parameter.mul_(2.5)

    def heads(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values: (batch, heads, positions, size)."""
        if self.kind in ("separate", "grouped"):
            rows = [layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.wq, self.wk, self.wv)]
        elif self.kind == "blocks":
            rows = [part.unflatten(-1, (HEADS, SIZE)) for part in self.qkv(x).chunk(3, -1)]
        else:
            rows = self.query_key_value(x).unflatten(-1, (HEADS, 3, SIZE)).unbind(-2)
        return [part.transpose(1, 2) for part in rows]

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.kind == "grouped")
        return self.out(seen.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def largest_logits(self, x: Tensor) -> list[float]:
        query, key, _ = self.heads(x)
        logits = query @ key.mT / math.sqrt(SIZE)
        hidden = torch.ones(logits.shape[-2:]).triu(1).bool()
        return logits.masked_fill(hidden, -math.inf).amax((0, 2, 3)).tolist()

    @torch.no_grad()
    def scale_by_hand(self, head: int, gamma: float) -> None:
        rows, root = slice(SIZE * head, SIZE * head + SIZE), math.sqrt(gamma)
        parts: list[tuple[nn.Linear, slice, float]]
        if self.kind == "separate":
            parts = [(self.wq, rows, root), (self.wk, rows, root)]
        elif self.kind == "grouped":
            parts = [(self.wq, rows, gamma)]
        elif self.kind == "blocks":
            parts = [(self.qkv, rows, root), (self.qkv, slice(WIDTH + rows.start, WIDTH + rows.stop), root)]
        else:
            first = 3 * SIZE * head
            parts = [(self.query_key_value, slice(first, first + 2 * SIZE), root)]
        for layer, which, factor in parts:
            layer.weight[which] *= factor
            layer.bias[which] *= factor


class Block(nn.Module):
    """Residual attention; the last ones run again in backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention.kind in ("blocks", "heads"):
            return x + checkpoint(self.attention, self.norm(x), use_reentrant=self.attention.kind == "heads")
        return x + self.attention(self.norm(x))


class Network(nn.Module):
    """Embedding, one block of each kind, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(training.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(map(Block, KINDS))
        self.head = nn.Linear(WIDTH, training.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), **HYPER)


def _train(options: dict[str, Any], **clip: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights in the end, and the largest logit of each measured step; validation runs between the epochs."""
    pl = training.load()
    module = training.language_model(pl, network=Network, configure=_adamw)
    largest: list[float] = []

    log = module.log

    def listen(name: str, value: Any, **given: Any) -> None:
        if name == "max_attention_logit":
            largest.append(float(value))
        log(name, value, **given)

    module.log = listen
    del type(module).on_train_batch_end  # For which values of "zero2" would arrive in the step.
    trainer = training.trainer(
        pl,
        strategy=lightning_muon.ParallelMuonStrategy(optimizer=training.EXACT, **options),
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[lightning_muon.QKClip(THRESHOLD, **clip)],
    )
    loader = training.loader(GLOBAL_BATCH, num_samples=SAMPLES)
    trainer.fit(module, loader, training.loader(GLOBAL_BATCH, num_samples=SAMPLES))
    weights = training.full_weights(module.network)
    trainer.strategy.teardown()
    return weights, largest


def _reference(every_n_steps: int = 1) -> tuple[dict[str, Tensor], list[float], set[bool]]:
    """The same in one process, and whether heads were clipped."""
    torch.manual_seed(0)
    network = Network()
    names = [name for name, p in network.blocks.named_parameters(prefix="blocks") if p.ndim == 2]
    optimizer = MuonAndAdamW(network, names, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **HYPER)
    inputs: dict[Attention, list[Tensor]] = {block.attention: [] for block in network.blocks}
    for attention, seen in inputs.items():
        attention.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
    largest, clipped = list[float](), set[bool]()
    batches = [
        batch
        for epoch in range(EPOCHS)
        for batch in training.plain_loader(epoch, global_batch=GLOBAL_BATCH, num_samples=SAMPLES)
    ]
    for step in range(len(batches) // ACCUMULATED):
        network.zero_grad()
        for seen in inputs.values():
            seen.clear()
        for tokens, targets in batches[ACCUMULATED * step : ACCUMULATED * (step + 1)]:
            (training.loss_of(network(tokens), targets) / ACCUMULATED).backward()
        measured = step % every_n_steps == 0
        maxima = {attention: attention.largest_logits(torch.cat(seen)) for attention, seen in inputs.items()}
        optimizer.step()
        for attention, found in maxima.items() if measured else ():
            for head, logit in enumerate(found):
                clipped.add(logit > THRESHOLD)
                attention.scale_by_hand(head, min(1.0, THRESHOLD / max(logit, THRESHOLD)))
        if measured:
            largest.append(max(max(found) for found in maxima.values()))
        optimizer.muon.matrices = {name: optimizer.parameters[name].detach() for name in names}
    return dict(network.state_dict()), largest, clipped


@pytest.mark.parametrize(
    ("world_size", "options", "clip"),
    [
        (1, {"sharding": "none"}, {}),
        (2, {}, {}),
        (3, {}, {"every_n_steps": 3}),
        (2, {"sharding": "zero2"}, {}),
        (4, {"replicate_size": 2, "shard_size": 2}, {}),
    ],
)
def test_a_training_is_that_of_one_process(
    gloo: ProcessPool, world_size: int, options: dict[str, Any], clip: dict[str, Any]
) -> None:
    weights, largest = gloo.run(_train, options, **clip, world_size=world_size)[0]
    expected, expected_largest, clipped = _reference(**clip)
    assert clipped == {True, False}
    assert largest == pytest.approx(expected_largest, rel=1e-5)
    assert training.max_difference(weights, expected) <= 1e-5


def _fit(strategy: Any, **options: Any) -> None:
    pl = training.load()
    module = training.language_model(pl, network=Network, configure=_adamw)
    if isinstance(strategy, dict):
        strategy = lightning_muon.ParallelMuonStrategy(**strategy)
    trainer = training.trainer(pl, strategy=strategy, callbacks=[lightning_muon.QKClip(**options)])
    trainer.fit(module, training.loader(4))


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ({"pipeline_size": 2}, "QKClip does not work with pipeline_size=2: stages"),
        ({"context_size": 2}, "QKClip does not work with context_size=2: a rank sees"),
        ({"early_all_gather": True}, "QKClip does not work with early_all_gather=True: the next forward"),
        ("flexdemo", "QKClip does not work with FlexDeMo"),
        ("ddp", "QKClip needs strategy='parallel_muon'"),
    ],
)
def test_other_strategies_are_refused(gloo: ProcessPool, strategy: Any, match: str) -> None:
    gloo.expect_error_on_all_ranks(_fit, strategy, world_size=2, match=match)


def test_wrong_names_are_an_error_on_all_ranks(gloo: ProcessPool) -> None:
    match = (
        "QKClip cannot clip .*network.blocks.0.attention: Attention has no layer .* named .'q', 'k'.*Pass projections="
    )
    gloo.expect_error_on_all_ranks(
        _fit, "parallel_muon", projections={"*.attention": ("q", "k")}, world_size=2, match=match
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threshold": 0.0}, "a logit larger than 0"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"projections": {"*": "qkv"}}, "must have the names of a query and a key projection"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lightning_muon.QKClip(**options)


def _skip_a_step() -> tuple[bool, bool]:
    """Whether a step that is skipped, and the one after it, leave the weights of a first projection as they are."""
    pl = training.load()
    module = training.language_model(pl, network=Network, configure=_adamw)
    del type(module).on_train_batch_end
    before: list[Tensor] = []

    def training_step(batch: Sequence[Tensor]) -> Tensor:
        before.append(module.network.blocks[0].attention.wq.weight.full_tensor().detach().clone())
        return training.loss_of(module(batch[0]), batch[1]) * (math.nan if len(before) == 1 else 1.0)

    module.training_step = training_step
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    config = lightning_muon.MuonConfig(max_skipped_steps=1)
    trainer = training.trainer(
        pl,
        strategy=lightning_muon.ParallelMuonStrategy(optimizer=config),
        max_steps=3,
        callbacks=[lightning_muon.QKClip(0.1)],
    )
    trainer.fit(module, training.loader(4))
    trainer.strategy.teardown()
    first, second, third = before
    return torch.equal(first, second), torch.equal(second, third)


def test_a_skipped_step_does_not_clip(gloo: ProcessPool) -> None:
    assert gloo.run(_skip_a_step, world_size=2)[0] == (True, False)
