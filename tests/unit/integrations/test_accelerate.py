"""What Accelerate was told, in our words; and what cannot be said in them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_muon import FlexDeMoConfig, Options
from lightning_muon.integrations.accelerate.settings import launched_sizes, mesh_sizes, mode_options, sharding_of
from lightning_muon.sharding.units import find_units
from tests.integration.training import Block, Network


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIGHTNING_MUON_CONFIG", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def accelerate_state(kind: DistributedType = DistributedType.FSDP, *, precision: str = "no", **plugin: Any) -> Any:
    """An AcceleratorState, as far as it is read."""
    state = SimpleNamespace(distributed_type=kind, mixed_precision=precision, parallelism_config=None)
    if kind == DistributedType.FSDP:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**({"fsdp_version": 2} | plugin))
        if precision != "no":
            state.fsdp_plugin.set_mixed_precision(precision)
        state.is_fsdp2 = state.fsdp_plugin.fsdp_version == 2
    return state


def test_replicas_that_accelerate_counts_are_no_wish_of_the_user() -> None:
    state = accelerate_state(DistributedType.MULTI_GPU)
    state.parallelism_config = ParallelismConfig(dp_replicate_size=4)
    assert mesh_sizes(state, Options()).replicate_size == "auto"


def test_units_may_come_from_the_fsdp_section() -> None:
    module = Network()
    classes = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]}
    policy = mode_options(accelerate_state(**classes), Options(), module).wrap_policy
    assert [type(unit) for unit in find_units(module, policy)] == [nn.Linear] * 5
    by_size = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
    policy = mode_options(accelerate_state(**by_size), Options(), module).wrap_policy
    assert [type(unit) for unit in find_units(module, policy)] == [Block, Block]
    assert mode_options(accelerate_state(), Options(wrap_policy=["Block"]), module).wrap_policy == ["Block"]


@pytest.mark.parametrize(("theirs", "ours"), [(True, True), (False, True), (True, False)])
def test_weights_are_freed_only_if_both_sides_say_so(theirs: bool, ours: bool) -> None:
    state, options = accelerate_state(reshard_after_forward=theirs), Options(reshard_after_forward=ours)
    assert mode_options(state, options, Network()).reshard_after_forward == (theirs and ours)


def test_bf16_reduces_gradients_in_float32_by_default() -> None:
    module = Network()
    found = mode_options(accelerate_state(precision="bf16"), Options(), module).mp_policy
    assert found == MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    own = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert (
        mode_options(accelerate_state(precision="bf16", mixed_precision_policy=own), Options(), module).mp_policy is own
    )
    assert mode_options(accelerate_state(), Options(), module).mp_policy == MixedPrecisionPolicy()


@pytest.mark.parametrize(("local", "layout"), [(None, (1, 6)), ("2", (3, 2)), ("4", (1, 6))])
def test_the_launcher_says_how_many_are_on_a_node(monkeypatch: pytest.MonkeyPatch, local: Any, layout: Any) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert tuple(launched_sizes(6).values()) == layout


def test_a_single_process_divides_nothing_unless_it_is_a_node() -> None:
    state = accelerate_state(DistributedType.NO)
    state.num_processes = 1
    assert sharding_of(state, Options()) == "none"
    assert sharding_of(state, Options(optimizer=FlexDeMoConfig())) == "fsdp"
