"""A transformers Trainer with ParallelMuon, told of it or not: weights, resumed runs, other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import LlamaForCausalLM

from lightning_muon.cli.main import main
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

_VERSION = Version(transformers.__version__)


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


@pytest.mark.skipif(Version("5.23") > _VERSION, reason="before 5.23 transformers has no dp_replicate_size")
def test_models_sharded_at_load_time_train_and_resume(gloo: ProcessPool, tmp_path: Path) -> None:
    """On other ranks, with another division: FSDP2, HSDP, tensor parallel."""
    runs.causal_lm(kv_heads=2).save_pretrained(tmp_path / "model")
    train, saved, both = runs.train_sharded, f"{tmp_path}/out/checkpoint-2", {"fsdp_size": 2, "tp_size": 2}
    expected = gloo.run(train, str(tmp_path), {}, world_size=1)[0]
    first = gloo.run(train, str(tmp_path), both, world_size=4)[0]
    main(["verify", f"{saved}/sharded"])
    resumed = gloo.run(train, str(tmp_path), both, saved, world_size=4)[0]
    assert all(torch.equal(resumed[name], value) for name, value in first.items())
    for sizes in ({"fsdp_size": 2}, {"dp_replicate_size": 2}, {"tp_size": 2}):
        found = gloo.run(train, str(tmp_path), sizes, saved, world_size=2)[0]
        assert max_difference(found, expected) < 1e-6, sizes
    message = "Accelerate is to shard it again; start the program with torchrun"
    gloo.expect_error_on_all_ranks(train, str(tmp_path), both, world_size=4, fsdp="true", match=message)
    whole = LlamaForCausalLM.from_pretrained(f"{tmp_path}/out/checkpoint-4").state_dict()
    assert max_difference(whole, expected) < 1e-6


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
            "losses": [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry],
            "after": run.evaluate()["eval_loss"],
        }
        weights = weights_of(run.model)
        run.accelerator.free_memory()
        return found, weights


def test_flexdemo_in_an_unchanged_trainer_trains_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options = (str(tmp_path), "hsdp", {"optimizer": _FLEXDEMO})
    found, weights = gloo.run(_trained, *options, save_steps=2, accumulate=2)[0]
    assert found["optimizer"] == "FlexDeMo"
    alone = gloo.run(_trained, str(tmp_path), "none", {"optimizer": "keep"}, world_size=1)[0][1]
    assert max_difference(weights, alone) < 1e-6
    again = {"resume": f"{tmp_path}/out/checkpoint-2", "accumulate": 2}
    _, resumed = gloo.run(_trained, *options, **again)[0]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_the_last_model_is_loaded_if_it_is_the_best(gloo: ProcessPool, tmp_path: Path) -> None:
    each_step = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options = (str(tmp_path), "fsdp", _EXACT)
    for found, _ in gloo.run(_trained, *options, state="SHARDED_STATE_DICT", **each_step, world_size=2):
        assert found["best"] == str(tmp_path / "out" / f"checkpoint-{runs.NUM_STEPS}")
        assert found["after"] == found["losses"][-1] == min(found["losses"])


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
