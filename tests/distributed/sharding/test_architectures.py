"""A common architecture on several processes, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import fsdp_modules, shard_model
from tests.distributed.sharding.models import assert_close, gradients_of, make_mesh
from tests.support.processes import ProcessPool


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
