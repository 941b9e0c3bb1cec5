"""What a loop or a module cannot mean is the same error on all ranks; what one process can check: unit/refusals."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_muon.accelerate
from lightning_muon import AutoResume, forward_backward
from tests.integration import training
from tests.integration.integrations.fabric import loop
from tests.integration.integrations.fabric.loop import adamw, network
from tests.integration.integrations.transformers.runs import causal_lm
from tests.integration.training import Network, loss_of
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool

_URL = "memory://bucket/run"


def _fabric_set_up(what: str) -> None:
    fabric = loop.launch()
    model: Any = network()
    foreign = adamw(Network())
    if what == "state":
        used = adamw(model)
        model(loop.micro_batch(0, 0)[0]).sum().backward()
        used.step()
        try:
            fabric.setup(model, used)
        finally:
            assert not any(each.name.startswith("lightning_muon") for each in threading.enumerate())
    if what == "ranks" and fabric.global_rank == 1:
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if what == "setup":
        model = fabric.setup_module(model)
        fabric.setup_optimizers(foreign)
    given = adamw(model)
    model, optimizer = fabric.setup(model, given)
    if what == "replaced":
        given.step()
    if what == "shared":
        fabric.setup(nn.Sequential(model.module), adamw(model))
    if what == "first":
        fabric.setup(model.module, adamw(model))
        optimizer.step()
    if what == "step":
        fabric.strategy.optimizer_step(foreign)
    if what == "norm":
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
    if what == "tokens":
        fabric.strategy.report_tokens(3)
    if what == "url":
        fabric.save(_URL, {})


def _fabric_files(what: str) -> None:
    fabric, model, _ = loop.set_up()
    if what in ("missing", "empty"):
        fabric.load("nothing", {"model": model} if what == "missing" else {})
    if what == "options":
        fabric.strategy.save_checkpoint("never", {}, storage_options={})
    if what == "filter":  # That of rank 1 raises.
        fabric.save("never", {"model": model}, filter={"model": lambda *_: torch.ones(1 + dist.get_rank()).view(1)})


def _fabric_step(what: str) -> None:
    fabric, model, optimizer = loop.set_up()
    tokens, targets = loop.own_rows(loop.micro_batch(0, 0))
    if what == "nan":
        fabric.backward(loss_of(model(tokens), targets) * (float("nan") if dist.get_rank() else 1.0))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    if what == "backward":
        loss_of(model(tokens), targets).backward()
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(model(tokens), targets))
    if what == "clip":
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


def _fabric_pipeline(what: str) -> None:
    fabric = loop.launch(**({} if what == "no pipeline" else {"pipeline_size": 2}))
    net = causal_lm()
    model, optimizer = fabric.setup(net, adamw(net))
    try:
        with fabric.no_backward_sync(model, enabled=what == "no_backward_sync"):
            loss = forward_backward(model, dict.fromkeys(("input_ids", "labels"), loop.micro_batch(0, 0)[0]))
        if what == "backward":
            fabric.backward(loss)
        if what == "save_pretrained":
            net.save_pretrained("never")
        if what == "state_dict":
            model.state_dict()
        optimizer.step()
    except ValueError as error:
        raise RuntimeError(str(error)) from error
    finally:
        fabric.strategy.teardown()


def _fabric_tokens(what: str) -> None:
    """A second backward pass of a step, or models that accumulate in turn."""
    fabric = loop.launch(loss_scaling="tokens", sharding="zero2" if what == "zero2" else "fsdp")
    models = [fabric.setup(module, adamw(module))[0] for module in (network(0), network(1))]
    for index in range(2):
        for model in models if what == "in turn" else models[:1]:
            tokens, targets = loop.own_rows(loop.micro_batch(0, index))
            with fabric.no_backward_sync(model, enabled=what == "in turn" and index == 0):
                fabric.strategy.report_tokens(targets.numel())
                fabric.backward(loop.summed_loss(model(tokens), targets))


def _accelerate(what: str) -> None:
    options = {"wrap_policy": [["Block"], ["Linear"]][dist.get_rank()]} if what == "ranks" else {}
    with fsdp2_on_cpu():
        accelerator = lightning_muon.accelerate.Accelerator(options=options)
        model: Any = network()
        optimizer: Any = adamw(model)
        if what == "meta":
            model.head.to("meta")
        if what == "clip":
            accelerator.clip_grad_norm_(accelerator.prepare(model).parameters(), 1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        if what == "again":
            accelerator.prepare(network())
        if what == "url":
            accelerator.save_state(_URL)
        for is_last in (False, True):  # A step that was reduced does not hide the next one.
            tokens, targets = loop.micro_batch(0, 0)
            with accelerator.no_sync(model) if is_last else contextlib.nullcontext():
                loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def _fit(what: str) -> None:
    """Of Lightning."""
    pl = training.load()
    model = training.language_model(pl)
    strategy: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}
    if what == "tokens":
        model.automatic_optimization, strategy = False, {"loss_scaling": "tokens"}
    if what == "whole gradients":
        strategy = {"sharding": "zero2"}
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "meta":
        model.automatic_optimization, model.scale = False, nn.Parameter(torch.ones(3, device="meta"))
    if what == "tensor":
        strategy = {"tensor_size": 2}
    if what == "EMA":
        kwargs["callbacks"] = [pl.callbacks.EMAWeightAveraging()]
    if what == "stop":
        model.val_dataloader, model.validation_step = training.loader, lambda *_: next(iter(()))
    if what == "url of a save":
        model.on_train_start = lambda: model.trainer.save_checkpoint(_URL)
    if what == "url of a callback":
        kwargs |= {"callbacks": [AutoResume(_URL)], "enable_checkpointing": True}
    if what.startswith("stages"):
        kind: Any = type(model)
        kind.pipeline_parts = lambda self: [self.network.embedding, *self.network.blocks, self.network.head]
        kind.pipeline_loss = lambda _, output, targets: (loss_of(output, targets), targets.numel())
        strategy = {"pipeline_size": 2}
    if what == "stages by hand":
        model.automatic_optimization = False
    if what == "stages accumulate":
        kwargs["accumulate_grad_batches"] = 2
    if what == "stages finetune":
        kwargs["callbacks"] = [pl.callbacks.BackboneFinetuning()]
    if what == "stages compiled":
        model.network.blocks[1].compile(backend="eager")
    if what == "stages frozen":  # configure_optimizers runs after the cut.
        for part in (model.network.embedding, *model.network.blocks):
            part.requires_grad_(False)
        model.configure_optimizers = lambda: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    path = _URL if what == "url to go on from" else None
    try:
        fitter = training.trainer(pl, strategy=training.strategy_class()(**strategy), **kwargs)
        fitter.fit(model, training.loader(), ckpt_path=path)
    except RuntimeError as error:  # Of a rank that says whose error it is.
        raise ValueError(str(error)) from error


_NO_FOLDER = f"are in folders, not at URLs such as {_URL}"
_NOT_REDUCED = "optimizer.step after micro-batches that were all inside"
_TWICE = r"a second backward pass of a step .* all but the last inside of no_backward_sync"
_ROWS: list[tuple[Callable[[str], None], str, type[Exception], str]] = [
    (_fabric_set_up, "state", ValueError, r"AdamW has state for \w+\.\S+, which was sharded since"),
    (_fabric_set_up, "ranks", RuntimeError, "the optimizers that were set up differs between ranks"),
    (_fabric_set_up, "setup", ValueError, "parameters of no module that was set up before it"),
    (_fabric_set_up, "replaced", RuntimeError, "a ParallelMuon has taken its place"),
    (_fabric_set_up, "step", ValueError, "this AdamW was not set up"),
    (_fabric_set_up, "shared", ValueError, r"Sequential shares parameters with \w*Network, which has been set up"),
    (_fabric_set_up, "first", ValueError, "this ParallelMuon was not set up"),
    (_fabric_set_up, "norm", ValueError, "norm_type=2.0"),
    (_fabric_set_up, "tokens", RuntimeError, "loss_scaling='tokens'"),
    (_fabric_set_up, "url", ValueError, _NO_FOLDER),
    (_fabric_files, "missing", FileNotFoundError, "is no checkpoint"),
    (_fabric_files, "empty", ValueError, "needs a state to load into"),
    (_fabric_files, "options", TypeError, "storage_options"),
    (_fabric_files, "filter", RuntimeError, "is invalid for input of size 2"),
    (_fabric_step, "nan", RuntimeError, "the norm of the gradients is nan"),
    (_fabric_step, "clip", RuntimeError, "clip_gradients .* after micro-batches"),
    (_fabric_step, "backward", RuntimeError, "call `fabric.backward"),
    (_fabric_pipeline, "no pipeline", RuntimeError, "is no stage of a pipeline; set it up with pipeline_size of 2 or"),
    (_fabric_pipeline, "backward", RuntimeError, "does not require grad"),
    (_fabric_pipeline, "no_backward_sync", RuntimeError, _NOT_REDUCED),
    (_fabric_pipeline, "save_pretrained", RuntimeError, "would write the part of the weights that this rank has"),
    (_fabric_pipeline, "state_dict", RuntimeError, r"state_dict would lack .* call lightning_muon\.full_state_dict"),
    (_fabric_tokens, "fsdp", RuntimeError, _TWICE),
    (_fabric_tokens, "zero2", RuntimeError, _TWICE),
    (_fabric_tokens, "in turn", RuntimeError, r"no_backward_sync of some models, but not of \w*Network"),
    (_accelerate, "ranks", RuntimeError, "the options of lightning_muon differs between ranks"),
    (_accelerate, "meta", ValueError, r"(head|table).weight .* is on the meta device on rank 0, too"),
    (_accelerate, "again", ValueError, "1 models after another one"),
    (_accelerate, "clip", RuntimeError, "a module that no optimizer was set up for"),
    (_accelerate, "url", ValueError, _NO_FOLDER),
    (_accelerate, "not reduced", RuntimeError, _NOT_REDUCED),
    (_fit, "tokens", ValueError, "needs automatic optimization"),
    (_fit, "whole gradients", ValueError, "divides the gradients that SGD reads whole"),
    (_fit, "meta", ValueError, "scale is on the meta device"),
    (_fit, "tensor", ValueError, "tensor_size=2, but no layer of LanguageModel is divided"),
    (_fit, "stop", ValueError, "validation_step raised StopIteration"),
    (_fit, "EMA", ValueError, "EMAWeightAveraging does not work.*EMAWeights"),
    *((_fit, f"url {where}", ValueError, _NO_FOLDER) for where in ("of a save", "of a callback", "to go on from")),
    (_fit, "stages by hand", ValueError, "set automatic_optimization = True"),
    (_fit, "stages accumulate", ValueError, "instead of accumulate_grad_batches=2"),
    (_fit, "stages finetune", ValueError, "BackboneFinetuning does not work with .*requires_grad_ in set"),
    (_fit, "stages compiled", ValueError, r"network\.blocks\.1 \(Block\) is compiled; .* remove torch.compile"),
    (_fit, "stages frozen", ValueError, "nothing in the stages of this rank is trained; give it all parameters"),
]


@pytest.mark.parametrize(("program", "what", "exception", "match"), _ROWS)
def test_it_is_an_error_on_all_ranks(
    gloo: ProcessPool, program: Callable[[str], None], what: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(program, what, exception=exception, match=match, world_size=2)
