"""A transformers Trainer with ParallelMuon, told of it or not: weights, resumed runs, other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import LlamaForCausalLM

import lightning_muon.hf
from lightning_muon.cli.main import main
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool

_VERSION = Version(transformers.__version__)


def _alone(directory: str, *, kv_heads: int = 1, **options: Any) -> dict[str, Tensor]:
    """Weights of a Trainer in one process; tests/matrix compares it with the algorithms."""
    with runs.accelerator_of("none"):
        run = runs.trainer(directory, runs.causal_lm(kv_heads=kv_heads), **options)
        run.train()
        return runs.whole_weights(run.model)


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
    expected = gloo.run(_alone, f"{tmp_path}/alone", kv_heads=2, max_grad_norm=0.3, world_size=1)[0]
    saved = f"{tmp_path}/checkpoint-2"
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


_EXACT = {"optimizer": {"compute_dtype": "float32", "wire_dtype": "float32"}}
_DENSE = {"base": "adamw", "value_format": "fp32", "lr": runs.LR, "weight_decay": runs.WEIGHT_DECAY}
_FLEXDEMO = {
    "class_path": "lightning_muon.FlexDeMoConfig",
    "init_args": _DENSE | {"replicator": {"class_path": "lightning_muon.Full"}},
}


_ADAMW = {"optimizer_cls_and_kwargs": None, "learning_rate": runs.LR, "weight_decay": runs.WEIGHT_DECAY}


def _trained(
    directory: str, parallel: str, text: dict[str, Any], *, resume: str = "", state: str = "", **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """A Trainer that was told of AdamW and has trained, and its weights."""
    variables = {"FSDP_STATE_DICT_TYPE": state} if state else {}
    with runs.accelerator_of(parallel, **variables), runs.launched(directory, text):
        model = runs.causal_lm(seed=1 if resume else 0)
        run = runs.trainer(f"{directory}/out", model, save_strategy="steps", **_ADAMW, **options)
        run.train(resume_from_checkpoint=resume or None)
        found = {
            "optimizer": type(run.optimizer.optimizer).__name__,
            "best": run.state.best_model_checkpoint,
            "losses": [*runs.logged(run, "eval_loss"), run.evaluate()["eval_loss"]],
        }
        weights = runs.whole_weights(run.model)
        run.accelerator.free_memory()
        return found, weights


def test_flexdemo_in_an_unchanged_trainer_trains_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options = (str(tmp_path), "hsdp", {"optimizer": _FLEXDEMO})
    found, weights = gloo.run(_trained, *options, save_steps=2, accumulate=2)[0]
    assert found["optimizer"] == "FlexDeMo"
    assert max_difference(weights, gloo.run(_alone, f"{tmp_path}/alone", **_ADAMW, world_size=1)[0]) < 1e-6
    again = {"resume": f"{tmp_path}/out/checkpoint-2", "accumulate": 2}
    _, resumed = gloo.run(_trained, *options, **again)[0]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_the_last_model_is_loaded_if_it_is_the_best(gloo: ProcessPool, tmp_path: Path) -> None:
    each_step = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options = (str(tmp_path), "fsdp", _EXACT)
    for found, _ in gloo.run(_trained, *options, state="SHARDED_STATE_DICT", **each_step, world_size=2):
        *losses, after = found["losses"]
        assert found["best"] == str(tmp_path / "out" / f"checkpoint-{runs.NUM_STEPS}")
        assert after == losses[-1] == min(losses)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sharding": "zero2"}, "set distributed_type: FSDP"),
        ({"optimizer": _FLEXDEMO}, "set distributed_type: FSDP"),
        ({"sharding": "none", "pipeline_size": 2}, "no Trainer of transformers, trains a pipeline; use"),
    ],
)
def test_a_division_that_a_trainer_would_not_save_is_refused(
    gloo: ProcessPool, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_trained, str(tmp_path), "ddp", options, match=match, world_size=2)
