"""Models that differ between ranks are an error; a T5 keeps its ties."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import shard_model
from lightning_muon.sharding.units import fsdp_modules
from tests.distributed.sharding.models import (
    Block,
    assert_close,
    gradients_of,
    make_mesh,
)
from tests.support.processes import ProcessPool


def _shard_different(what: str) -> None:
    rank = dist.get_rank()
    model: nn.Module = nn.Sequential(nn.Linear(4, 4 + (rank if what == "shapes" else 0)), Block(), Block())
    policies: dict[str, Any] = {
        "shapes": "auto",
        "units": lambda name, _: name == str(1 + rank % 2),
        "class": ["Linear" if rank == 0 else "Missing"],
        "policy": lambda *_: {}["missing"] if rank == 1 else False,
    }
    try:
        shard_model(model, make_mesh((1, 3)), ModeOptions(wrap_policy=policies[what]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("shapes", r"Sequential differs .*'0.weight' \(4, 4\) float32.*\(5, 4\)"),
        ("units", "Sequential differs between ranks: .*FSDP2 unit"),
        ("class", "no module is a Missing"),
        ("policy", "KeyError"),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_all(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_shard_different, what, world_size=3, exception=RuntimeError, match=match)


def _t5(shape: tuple[int, int]) -> tuple[list[str], dict[str, Tensor | None], dict[str, Tensor | None]]:
    import transformers

    sizes = {"num_layers": 2, "d_model": 12, "d_kv": 3, "num_heads": 4, "d_ff": 20, "vocab_size": 33}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    tokens = torch.randint(1, 33, (dist.get_world_size(), 6), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    single = transformers.T5ForConditionalGeneration(config)
    single(input_ids=tokens, labels=tokens).loss.backward()
    torch.manual_seed(dist.get_rank())
    model = transformers.T5ForConditionalGeneration(config)
    shard_model(model, make_mesh(shape), ModeOptions())
    register_fsdp_forward_method(model, "generate")
    mine = tokens[dist.get_rank()][None]
    model(input_ids=mine, labels=mine).loss.backward()
    gradients = gradients_of(model)
    model.generate(input_ids=mine, max_new_tokens=3, min_new_tokens=3, num_beams=2)
    free_unsharded(model)
    assert model.shared.weight is model.lm_head.weight
    assert model.shared.weight is model.encoder.embed_tokens.weight
    return [type(unit).__name__ for unit in fsdp_modules(model)], gradients, gradients_of(single)


def test_t5_keeps_its_ties_and_generates(gloo: ProcessPool) -> None:
    pytest.importorskip("transformers")
    for units, actual, expected in gloo.run(_t5, (2, 2), timeout=100.0):
        assert units == ["FSDPT5ForConditionalGeneration", *["FSDPT5Block"] * 4]
        assert_close(actual, expected)
