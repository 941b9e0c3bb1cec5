"""Sharded models on several processes, against the same model in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import fsdp_modules, initialize_roots, shard_model
from tests.distributed.sharding.models import (
    Block,
    Net,
    assert_close,
    attach_fsdp,
    full,
    gradients_of,
    make_mesh,
    tokens_of_all,
)
from tests.support.processes import ProcessPool


def _train(shape: tuple[int, int], sharded: Sequence[str], options: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """Initial weights, gradients, and the names of the units; the user has sharded some modules."""
    mesh = make_mesh(shape)
    torch.manual_seed(0 if sharded else dist.get_rank())
    model = Net()
    for name in sharded:
        ignored = {model.scale} if name == "" else None
        fully_shard(model.get_submodule(name), mesh=mesh, ignored_params=ignored)
    mode = attach_fsdp(model, mesh, **options)
    weights = {name: full(tensor).clone() for name, tensor in model.state_dict().items()}  # type: ignore[union-attr]
    model.training_step(tokens_of_all(dist.get_world_size())[dist.get_rank()]).backward()
    mode.finish_gradients()
    mode.finish_gradients()
    return weights, gradients_of(model), [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]


BLOCKS = ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("shape", "sharded", "options", "units"),
    [
        *((shape, (), {}, BLOCKS) for shape in [(1, 1), (2, 1), (1, 3), (2, 2)]),
        ((1, 2), (), {"reshard_after_forward": False}, BLOCKS),
        ((1, 2), (), {"wrap_policy": ["Linear", "LayerNorm"]}, None),
        # Modules that the user sharded are left alone.
        ((2, 2), ("blocks.1",), {}, BLOCKS),
        ((2, 2), ("blocks.1.up",), {}, [*BLOCKS, "blocks.1.up"]),
        ((2, 2), ("blocks.0", "blocks.1", ""), {}, BLOCKS),
    ],
    ids=str,
)
def test_weights_are_those_of_rank_0_and_gradients_exact(
    gloo: ProcessPool, shape: tuple[int, int], sharded: Sequence[str], options: dict[str, Any], units: list[str] | None
) -> None:
    world_size = shape[0] * shape[1]
    torch.manual_seed(0)
    model = Net()
    state = model.state_dict()
    model.training_step(tokens_of_all(world_size).flatten(0, 1)).backward()
    for weights, gradients, names in gloo.run(_train, shape, sharded, options, world_size=world_size):
        assert units is None or names == units
        assert all(torch.equal(weights[name], value) for name, value in state.items())
        assert_close(gradients, gradients_of(model))


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


def _no_root() -> tuple[list[str], list[Tensor | None]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(5, 5), "list": nn.ModuleList([nn.Linear(5, 3)])})
    shard_model(model, make_mesh((1, 2)), ModeOptions(shard_root=False))
    initialize_roots(model)
    for _ in range(2):  # Two passes in a row, as in a training step with manual optimization.
        model["list"][0](model["one"](torch.ones(2, 5))).sum().backward()
    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)], list(gradients_of(model).values())


def test_without_a_root_every_child_is_one(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    for names, gradients in gloo.run(_no_root, world_size=2):
        assert names == ["one", "list.0"]
        for actual, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(actual, parameter.grad)


def _mixed_dtypes() -> tuple[list[str], list[torch.dtype]]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4))
    shard_model(model, make_mesh((1, 2)), ModeOptions())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    initialize_roots(model)
    model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert all(bool((full(p.detach()) == 1).all()) for p in model.parameters())  # type: ignore[union-attr]
    names = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    return names, [p.grad.dtype for p in model.parameters()]


def test_a_layer_of_another_dtype_is_a_unit_also_on_meta(gloo: ProcessPool) -> None:
    for names, dtypes in gloo.run(_mixed_dtypes, world_size=2):
        assert names == ["", "1"] and dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2


def _output_dtypes(shard_root: bool) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    model = nn.ModuleDict({"net": nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 2)))})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    root = model if not shard_root else model["net"]
    shard_model(root, make_mesh((1, 2)), ModeOptions(mp_policy=policy, shard_root=shard_root))
    model["net"][0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    seen.append(model["net"](torch.ones(2, 4)).dtype)
    return seen


@pytest.mark.parametrize("shard_root", [True, False])
def test_only_roots_cast_their_output(gloo: ProcessPool, shard_root: bool) -> None:
    assert gloo.run(_output_dtypes, shard_root, world_size=2) == [[torch.bfloat16, torch.float32]] * 2


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
