"""A transformers Trainer with ParallelMuon, told of it or not: weights, resumed runs, other numbers of ranks."""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import transformers
import transformers.trainer
from packaging.version import Version
from torch import Tensor
from transformers import LlamaForCausalLM

import lightning_muon.hf
from lightning_muon import FlexDeMo, FlexDeMoConfig, Full, ParallelMuon
from lightning_muon.cli.launch import replace_accelerator
from lightning_muon.cli.main import main
from lightning_muon.integrations.accelerate.accelerator import Accelerator, TrainerAccelerator
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool

_VERSION = Version(transformers.__version__)
_RESUMES_DDP = pytest.mark.skipif(
    Version("5.18") > _VERSION, reason="before 5.18 transformers loads the state of DDP on CPUs to 'cpu:0', an error"
)


def _train(directory: str, parallel: str, *, tied: bool = False, **options: Any) -> dict[str, Tensor]:
    with runs.accelerator_of(parallel):
        run = runs.trainer(directory, runs.causal_lm(tied=tied), **options)
        run.train()
        return runs.whole_weights(run.accelerator.unwrap_model(run.model))


def _evaluate_and_train(directory: str) -> None:
    with runs.accelerator_of("ddp"):
        run = runs.trainer(directory, runs.causal_lm())
        run.evaluate()
        run.train()


def test_gradients_that_nothing_averages_are_an_error(gloo: ProcessPool, tmp_path: Path) -> None:
    """Transformers leaves DDP out where an evaluation comes first; with its own optimizer the ranks drift apart."""
    match = r"the ranks have different gradients, .* call train\(\) first"
    gloo.expect_error_on_all_ranks(
        _evaluate_and_train, str(tmp_path), world_size=2, exception=RuntimeError, match=match
    )


def _train_in_two(
    directory: str, parallel: str, *, resume: str = "", variables: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and evaluations of four steps, of which two are saved; or of the last two from a checkpoint."""
    with runs.accelerator_of(parallel, **(variables or {})):
        saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        run = runs.trainer(directory, runs.causal_lm(seed=1 if resume else 0), **(saving | options))
        run.train(resume_from_checkpoint=resume or None)
        return runs.whole_weights(run.accelerator.unwrap_model(run.model)), runs.logged(run, "eval_loss")


@pytest.mark.parametrize(
    ("parallel", "world_size", "variables"),
    [
        pytest.param("ddp", 2, {}, marks=_RESUMES_DDP),
        ("fsdp", 2, {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
        ("fsdp", 2, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal(
    gloo: ProcessPool, tmp_path: Path, parallel: str, world_size: int, variables: dict[str, str]
) -> None:
    run = {"variables": variables, "accumulate": 2, "max_grad_norm": 0.3}
    weights, losses = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=world_size, **run)[0]
    run["resume"] = f"{tmp_path}/checkpoint-2"
    resumed = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=world_size, **run)[0]
    assert resumed[1] == losses and len(losses) == 2
    assert all(torch.equal(resumed[0][name], weights[name]) for name in weights)
    if variables.get("FSDP_STATE_DICT_TYPE") == "SHARDED_STATE_DICT":
        other, _ = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=4, **run)[0]
        assert max_difference(other, runs.written_out(max_norm=0.3)) < 1e-6


def _train_sharded(
    directory: str, *trainings: tuple[dict[str, int], str], fsdp: str = "false"
) -> list[dict[str, Tensor]]:
    """Weights after four steps of models that ``from_pretrained`` has sharded; saved after two, or begun there."""
    found = list[dict[str, Tensor]]()
    for sizes, resume in trainings:
        # What tensor parallelism needs of Accelerate there is on CUDA alone.
        with runs.accelerator_of("fsdp", ACCELERATE_USE_FSDP=fsdp):
            config = transformers.DistributedConfig(**sizes)
            model = LlamaForCausalLM.from_pretrained(f"{directory}/model", distributed_config=config)
            # An evaluation leaves the root of FSDP2 whole, before it is saved.
            evaluating = {} if resume else {"eval_strategy": "steps", "eval_steps": 2}
            options = evaluating | {"max_grad_norm": 0.3, "ranks_per_sample": sizes.get("tp_size", 1)}
            options |= {"save_strategy": "steps", "save_steps": 2}
            run = runs.trainer(directory, model, kind=lightning_muon.hf.Trainer, **options)
            run.train(resume_from_checkpoint=resume or None)
            found.append(runs.whole_weights(run.model))
    return found


@pytest.mark.skipif(Version("5.23") > _VERSION, reason="before 5.23 transformers has no dp_replicate_size")
def test_models_sharded_at_load_time_train_and_resume(gloo: ProcessPool, tmp_path: Path) -> None:
    """On other ranks, with another division: FSDP2, HSDP, tensor parallel."""
    runs.causal_lm(kv_heads=2).save_pretrained(tmp_path / "model")
    expected, saved = runs.written_out(max_norm=0.3, kv_heads=2), f"{tmp_path}/checkpoint-2"
    both = {"fsdp_size": 2, "tp_size": 2}
    first, resumed = gloo.run(_train_sharded, str(tmp_path), (both, ""), (both, saved), world_size=4)[0]
    assert all(torch.equal(resumed[name], value) for name, value in first.items())
    main(["verify", f"{saved}/sharded"])
    others = [({"fsdp_size": 2}, saved), ({"dp_replicate_size": 2}, saved), ({"tp_size": 2}, saved)]
    for weights in (first, *gloo.run(_train_sharded, str(tmp_path), *others, world_size=2)[0]):
        assert max_difference(weights, expected) < 1e-6
    message = "Accelerate is to shard it again; start the program with torchrun"
    gloo.expect_error_on_all_ranks(
        _train_sharded, str(tmp_path), ({"fsdp_size": 2}, ""), world_size=2, fsdp="true", match=message
    )
    whole = LlamaForCausalLM.from_pretrained(f"{tmp_path}/checkpoint-4").state_dict()
    assert max_difference(whole, expected) < 1e-6


def _train_again(directory: str) -> tuple[set[float], int, float]:
    with runs.accelerator_of("fsdp"):
        run = runs.trainer(directory, runs.causal_lm(), bf16=True, max_steps=4, lr_scheduler_type="constant")
        run.train()
        optimizer: Any = run.optimizer.optimizer
        run.train()
        assert run.optimizer.optimizer is optimizer
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        return steps, len(optimizer.state), float(run.evaluate()["eval_loss"])


def test_a_second_call_of_train_goes_on_with_the_state(gloo: ProcessPool, tmp_path: Path) -> None:
    for steps, num_states, loss in gloo.run(_train_again, str(tmp_path), world_size=2):
        assert steps == {8.0} and num_states == len(list(runs.causal_lm().parameters()))
        # log(37) is 3.61.
        assert loss < 3.5


def _under_ours(directory: str, options: dict[str, Any], *, resume: str = "", **arguments: Any) -> dict[str, Tensor]:
    """A Trainer as it is, whose Accelerator is ours, as ``lightning-muon launch`` makes it; saves after two steps."""
    ours = partial(TrainerAccelerator, options=options)
    with runs.accelerator_of("hsdp"), mock.patch.object(transformers.trainer, "Accelerator", ours):
        model = runs.causal_lm(seed=1 if resume else 0)
        run = runs.trainer(directory, model, accumulate=2, save_strategy="steps", save_steps=2, **arguments)
        run.train(resume_from_checkpoint=resume or None)
        return runs.whole_weights(run.accelerator.unwrap_model(run.model))


_DENSE = FlexDeMoConfig(
    base="adamw", replicator=Full(), value_format="fp32", lr=runs.LR, weight_decay=runs.WEIGHT_DECAY
)


def test_flexdemo_that_sends_everything_trainingsand_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options, chosen = {"optimizer": _DENSE}, lightning_muon.hf.optimizer(_DENSE)
    weights = gloo.run(_under_ours, str(tmp_path), options, optimizer_cls_and_kwargs=chosen)[0]
    assert max_difference(weights, runs.written_out(has_muon=False)) < 1e-6
    again = {"resume": f"{tmp_path}/checkpoint-2", "optimizer_cls_and_kwargs": chosen}
    resumed = gloo.run(_under_ours, str(tmp_path), options, **again)[0]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_flexdemo_with_a_stock_accelerator_is_an_error(gloo: ProcessPool, tmp_path: Path) -> None:
    chosen = lightning_muon.hf.optimizer(_DENSE)
    gloo.expect_error_on_all_ranks(
        _train, str(tmp_path), "hsdp", optimizer_cls_and_kwargs=chosen, match="lightning-muon launch"
    )


_EXACT = "optimizer: {compute_dtype: float32, wire_dtype: float32}\n"
_FLEXDEMO = "optimizer: {class_path: lightning_muon.FlexDeMoConfig, init_args: {base: adamw}}\n"


@contextmanager
def _launched(directory: str, parallel: str, **variables: str) -> Generator[None]:
    """As in a script that ``lightning-muon launch`` starts with ``options.yaml``."""
    with ExitStack() as stack:
        for module in (accelerate, accelerate.accelerator, transformers.trainer):
            stack.enter_context(mock.patch.object(module, "Accelerator", module.Accelerator))
        stack.enter_context(mock.patch.object(transformers.Trainer, "save_model", transformers.Trainer.save_model))
        stack.enter_context(runs.accelerator_of(parallel, **variables))
        stack.enter_context(mock.patch.dict(os.environ, {"LIGHTNING_MUON_CONFIG": f"{directory}/options.yaml"}))
        replace_accelerator()
        yield


def _trained(directory: str, parallel: str, *, resume: str = "", **options: Any) -> tuple[str, dict[str, Tensor]]:
    """The optimizer and the weights of a Trainer that was told of AdamW."""
    with _launched(directory, parallel):
        run = runs.trainer(
            f"{directory}/out",
            runs.causal_lm(seed=0 if parallel == "none" or resume else int(os.environ["RANK"])),
            optimizer_cls_and_kwargs=None,
            learning_rate=runs.LR,
            weight_decay=runs.WEIGHT_DECAY,
            accumulate=2,
            **options,
        )
        assert isinstance(run.accelerator, Accelerator)
        run.train(resume_from_checkpoint=resume or None)
        result = type(run.optimizer.optimizer).__name__, runs.whole_weights(run.model)
        run.accelerator.free_memory()
        return result


@pytest.mark.parametrize(
    ("world_size", "parallel", "text"),
    [(4, "hsdp", _FLEXDEMO), pytest.param(2, "ddp", f"{_EXACT}sharding: ddp\n", marks=_RESUMES_DDP)],
)
def test_an_unchanged_trainer_resumes_bit_for_bit(
    gloo: ProcessPool, tmp_path: Path, world_size: int, parallel: str, text: str
) -> None:
    (tmp_path / "options.yaml").write_text(text)
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    name, whole = gloo.run(_trained, str(tmp_path), parallel, world_size=world_size, **saving)[0]
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    _, resumed = gloo.run(_trained, str(tmp_path), parallel, resume=checkpoint, world_size=world_size)[0]
    assert name == (FlexDeMo if text == _FLEXDEMO else ParallelMuon).__name__
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def _best(directory: str) -> tuple[str | None, float, list[float]]:
    """The best checkpoint, the loss after the training, and the losses before."""
    with _launched(directory, "fsdp", FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT"):
        run = runs.trainer(
            f"{directory}/out",
            runs.causal_lm(),
            optimizer_cls_and_kwargs=None,
            learning_rate=runs.LR,
            load_best_model_at_end=True,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
        )
        run.train()
        best, losses = run.state.best_model_checkpoint, runs.logged(run, "eval_loss")
        result = best, run.evaluate()["eval_loss"], losses
        run.accelerator.free_memory()
        return result


def test_the_last_model_is_loaded_if_it_is_the_best(gloo: ProcessPool, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(_EXACT)
    for best, after, losses in gloo.run(_best, str(tmp_path), world_size=2):
        assert best == str(tmp_path / "out" / f"checkpoint-{runs.NUM_STEPS}")
        assert after == losses[-1] == min(losses)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("sharding: zero2\n", "set distributed_type: FSDP"),
        (_FLEXDEMO, "set distributed_type: FSDP"),
        (
            "sharding: none\npipeline_size: 2\n",
            "no Trainer of transformers, trains a pipeline; use",
        ),
    ],
)
def test_a_division_that_a_trainer_would_not_save_is_refused(
    gloo: ProcessPool, tmp_path: Path, text: str, match: str
) -> None:
    (tmp_path / "options.yaml").write_text(text)
    gloo.expect_error_on_all_ranks(_trained, str(tmp_path), "ddp", match=match, world_size=2)
