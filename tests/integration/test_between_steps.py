"""What a program does to gradients and weights between backward, step and the next forward, with every sharding."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_muon import ParallelMuon
from tests.integration import training
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of


def _optimizer(parameters: Any) -> ParallelMuon:
    return ParallelMuon(parameters, lr=1e-2, compute_dtype="float32", wire_dtype="float32")


def _two_optimizers(module: Any) -> tuple[list[ParallelMuon], list[Any]]:
    head = ParallelMuon(module.network.head.parameters(), lr=1e-2, algorithm="adamw")
    both = [_optimizer(module.network.blocks.parameters()), head]
    return both, [torch.optim.lr_scheduler.StepLR(each, 1) for each in both]


def _loss(module: Any, batch: Sequence[Tensor]) -> Tensor:
    return training.loss_of(module.network(batch[0]), batch[1])


def _manual(change: Callable[[Any, Any, Sequence[Tensor], int], None]) -> Callable[[Any, Any], None]:
    def prepare(pl: Any, model: Any) -> None:
        model.automatic_optimization = False

        def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> None:
            change(self, self.optimizers(), batch, batch_idx)

        type(model).training_step = training_step

    return prepare


def _clip(module: Any, optimizer: Any, batch: Sequence[Tensor], index: int) -> None:
    (module if index % 3 else optimizer).zero_grad()
    if index % 2:
        module.manual_backward(_loss(module, batch))
        module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        module.log("grad_norm", 1.0, prog_bar=True)  # A name that the strategy logs, too.
    else:
        _loss(module, batch).backward()  # Not manual_backward: nobody is told.
        module.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    optimizer.step()


def _zero_between_passes(module: Any, optimizers: Any, batch: Sequence[Tensor], index: int) -> None:
    blocks, head = optimizers
    blocks.zero_grad()
    module.manual_backward(3 * _loss(module, batch))
    head.zero_grad()
    module.manual_backward(_loss(module, batch))
    blocks.step()
    head.step()


def _clamp_in_a_hook(pl: Any, model: Any) -> None:
    def on_after_backward(self: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)

    type(model).on_after_backward = on_after_backward


def _clamp_in_optimizer_step(pl: Any, model: Any) -> None:
    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        pl.LightningModule.optimizer_step(self, *args, **kwargs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.15, 0.15)

    type(model).optimizer_step = optimizer_step


def _loss_of_gradients(pl: Any, model: Any) -> None:
    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        positions = self.network.embedding(batch[0]).detach().requires_grad_()
        energy = self.network.blocks[1](self.network.blocks[0](positions)).sum()
        return _loss(self, batch) + torch.autograd.grad(energy, positions, create_graph=True)[0].square().mean()

    type(model).training_step = training_step


def _follow(where: str, first_batch: int = 0) -> Callable[[Any, Any], None]:
    """A frozen copy follows the network, from ``first_batch`` on."""

    def follow(self: Any, *_: Any) -> None:
        self.trainer.strategy.finish_parameters()
        for own, other in zip(self.target.parameters(), self.network.parameters(), strict=True):
            own.data.lerp_(other.data, 0.5)

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if where == "training_step" and batch_idx >= first_batch:
            follow(self)
        return _loss(self, batch) + F.mse_loss(self.network(batch[0]), self.target(batch[0] // 2))

    def prepare(pl: Any, model: Any) -> None:
        model.target = deepcopy(model.network).requires_grad_(False)
        type(model).training_step = training_step
        if where.startswith("on_"):
            setattr(type(model), where, follow)

    return prepare


def _limit_norms(pl: Any, model: Any) -> None:
    model.network.embedding.max_norm = 0.5


def _train(sharding: str, case: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights at the end, and as a callback's ``on_train_end`` sees them."""
    pl = training.load()
    prepare, optimizers = CASES[case]
    model = training.language_model(pl, configure=optimizers or (lambda module: _optimizer(module.parameters())))
    prepare(pl, model)
    seen: dict[str, Tensor] = {}

    class Reader(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.update(weights_of(pl_module))
            names = [each.name for each in trainer.lr_scheduler_configs]
            assert names in ([], ["lr-ParallelMuon", "lr-ParallelMuon-1"]), "as LearningRateMonitor calls them"

    strategy = training.strategy_class()(sharding=sharding, optimizer=training.EXACT)
    training.trainer(pl, strategy=strategy, callbacks=[Reader()], max_epochs=1).fit(
        model, training.loader(num_samples=48)
    )
    return training.full_weights(model), seen


CASES: dict[str, tuple[Callable[[Any, Any], None], Any]] = {
    "manual clipping": (_manual(_clip), None),
    "weights clamped in optimizer_step": (_clamp_in_optimizer_step, None),
    "zero_grad between two passes": (_manual(_zero_between_passes), _two_optimizers),
    "a loss of gradients": (_loss_of_gradients, None),
    "gradients clamped in on_after_backward": (_clamp_in_a_hook, None),
    "a copy follows in on_train_batch_end": (_follow("on_train_batch_end"), None),
    "a copy follows in training_step": (_follow("training_step"), None),
    "a copy follows later": (_follow("training_step", 3), None),
    "a copy follows in on_before_zero_grad": (_follow("on_before_zero_grad"), None),
    "an embedding with a largest norm": (_limit_norms, None),
}
# With zero2 no rank has whole gradients in a hook.
_SHARDINGS = {
    "gradients clamped in on_after_backward": ("ddp",),
    "a copy follows in on_train_batch_end": ("zero2", "ddp", "fsdp"),
}
# What is written to gathered weights -> the module.
_FORGOTTEN = dict.fromkeys(("a copy follows later", "a copy follows in on_before_zero_grad"), "target")
_FORGOTTEN |= {"a copy follows in training_step": "target", "an embedding with a largest norm": "network"}


@pytest.mark.parametrize("case", [case for case in CASES if _FORGOTTEN.get(case) != "network"])
def test_weights_are_those_of_one_process(gloo: ProcessPool, case: str) -> None:
    expected, _ = gloo.run(_train, "none", case, world_size=1)[0]
    for sharding in _SHARDINGS.get(case, ("zero2", "ddp")):
        for weights, seen in gloo.run(_train, sharding, case, world_size=2):
            assert training.max_difference(weights, expected) < 1e-5 if weights else True
            assert seen and training.max_difference(seen, expected) < 1e-5, sharding


@pytest.mark.parametrize(("case", "module"), _FORGOTTEN.items())
def test_what_fsdp2_would_forget_is_an_error(gloo: ProcessPool, case: str, module: str) -> None:
    match = rf"written to \d gathered weights \({module}\.embedding\.weight.*Change weights between steps"
    gloo.expect_error_on_all_ranks(_train, "fsdp", case, world_size=2, exception=RuntimeError, match=match)


def test_a_loss_of_gradients_is_an_error_with_fsdp(gloo: ProcessPool) -> None:
    match = r"create_graph=True .* reaches 'network.blocks.1' \(Block\).*; use sharding='zero2' or 'ddp'"
    case = "a loss of gradients"
    gloo.expect_error_on_all_ranks(_train, "fsdp", case, world_size=2, exception=RuntimeError, match=match)


def _fit_in_parts(sharding: str, own: str, parts: Sequence[int]) -> list[Any]:
    """Weights and rate after one fit for each part, with one optimizer and scheduler that the module keeps."""
    pl = training.load()
    kept: list[Any] = []

    def configure(module: Any) -> Any:
        assert not module.trainer.strategy._running_engine.mode.options.wait_for_parameters, "values hide in no forward"
        if not kept:
            made = _optimizer(module) if own == "ParallelMuon" else torch.optim.Adam(module.parameters(), lr=1e-3)
            kept.extend((made, torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)))
        return [kept[0]], [kept[1]]

    model = training.language_model(pl, configure=configure)
    for epochs in parts:
        strategy = training.strategy_class()(sharding=sharding)
        batches = training.loader(num_samples=16)
        training.trainer(pl, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False).fit(model, batches)
    return [training.full_weights(model), kept[0].param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("sharding", "own"), [("fsdp", "Adam"), ("zero2", "Adam"), ("zero2", "ParallelMuon"), ("ddp", "ParallelMuon")]
)
def test_a_second_fit_goes_on_with_the_same_optimizer(gloo: ProcessPool, sharding: str, own: str) -> None:
    (once, rate), *_ = gloo.run(_fit_in_parts, sharding, own, (2,), world_size=2)
    (twice, other_rate), *_ = gloo.run(_fit_in_parts, sharding, own, (1, 1), world_size=2)
    assert rate == other_rate
    assert once and all(torch.equal(once[name], weight) for name, weight in twice.items())
