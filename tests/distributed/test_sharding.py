"""Sharded models on several processes, against the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_muon.sharding.fsdp import shard_model
from lightning_muon.sharding.gradients import GradientAgreement
from lightning_muon.sharding.runtime import (
    free_unsharded,
    fsdp_modules,
    initialize_roots,
    set_gradient_sync,
)
from tests.support.processes import ProcessPool, RanksFailedError

MESHES = [(1, 1), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (4, 1)]


class Block(nn.Module):
    """Odd sizes: no dimension divides evenly, the norm has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(13, 7, bias=False)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Tied table and head, blocks, a 0-d parameter, a buffer; entered by ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.rand(7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.offset
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale

    def training_step(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def generate(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.table(tokens))


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _tokens(world_size: int) -> Tensor:
    return torch.randint(0, 11, (world_size, 2, 5), generator=torch.Generator().manual_seed(1))


def _full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: _full(parameter.grad) for name, parameter in model.named_parameters()}


def _reference(world_size: int, repeats: int = 1) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = Net()
    for _ in range(repeats):
        model.training_step(_tokens(world_size).flatten(0, 1)).backward()
    return _gradients(model)


def _assert_close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            # The mean over ranks is summed in another order than the mean over the whole batch: a few ulp of fp32.
            torch.testing.assert_close(
                actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def _sharded_gradients(shape: tuple[int, int], **options: Any) -> dict[str, Any]:
    mesh = _mesh(shape)
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_model(model, mesh, forward_methods=("training_step",), **options)
    weights = {name: _full(tensor).clone() for name, tensor in model.state_dict().items()}  # type: ignore[union-attr]
    agreement = GradientAgreement(model, mesh)
    tokens = _tokens(dist.get_world_size())[dist.get_rank()]
    model.training_step(tokens).backward()
    agreement.finish()
    agreement.finish()
    units = [type(unit).__name__ for unit in fsdp_modules(model)]
    return {"weights": weights, "gradients": _gradients(model), "units": units}


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_weights_are_those_of_rank_0_and_gradients_those_of_one_process(
    gloo: ProcessPool, shape: tuple[int, int]
) -> None:
    world_size = shape[0] * shape[1]
    torch.manual_seed(0)
    state = Net().state_dict()
    for result in gloo.run(_sharded_gradients, shape, world_size=world_size):
        assert result["units"] == ["FSDPNet", "FSDPBlock", "FSDPBlock"]
        assert all(torch.equal(result["weights"][name], value) for name, value in state.items())
        _assert_close(result["gradients"], _reference(world_size))


@pytest.mark.parametrize(
    "options",
    [
        {"wrap_policy": ()},
        {"reshard_after_forward": False},
        {"wrap_policy": ["Block", "Linear", "Embedding", "LayerNorm"]},
    ],
    ids=str,
)
def test_other_units_give_the_same_gradients(gloo: ProcessPool, options: dict[str, Any]) -> None:
    for result in gloo.run(_sharded_gradients, (1, 2), world_size=2, **options):
        _assert_close(result["gradients"], _reference(2))


def _micro_batches(shape: tuple[int, int]) -> list[dict[str, Tensor | None]]:
    mesh = _mesh(shape)
    torch.manual_seed(0)
    model = Net()
    shard_model(model, mesh, forward_methods=("training_step",))
    tokens = _tokens(dist.get_world_size())[dist.get_rank()]
    agreement = GradientAgreement(model, mesh)
    results = []
    for _ in range(2):
        model.zero_grad()
        for last in (False, False, True):
            set_gradient_sync(model, last)
            model.training_step(tokens).backward()
            if not last:
                assert all(p.grad is None for p in model.parameters() if isinstance(p, DTensor))
        agreement.finish()
        results.append(_gradients(model))
    return results


def test_micro_batches_without_reduction_add_up(gloo: ProcessPool) -> None:
    expected = _reference(4, repeats=3)
    for results in gloo.run(_micro_batches, (2, 2), world_size=4):
        for gradients in results:
            _assert_close(gradients, expected)


def _evaluate_then_call_the_inside() -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    shard_model(model, _mesh((1, 2)), forward_methods=("training_step", "generate"))
    initialize_roots(model)
    initialize_roots(model)
    tokens = _tokens(2)[0]
    # A block is called before the root has run.
    model.blocks[0](torch.ones(2, 7)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(tokens)
        model.generate(tokens)
    whole = [not isinstance(model.table.weight, DTensor)]
    free_unsharded(model)
    whole.append(not isinstance(model.table.weight, DTensor))
    model.training_step(tokens).backward()
    return whole


def test_whole_weights_are_freed_after_evaluation_and_blocks_may_run_before_the_root(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_then_call_the_inside, world_size=2) == [[True, False]] * 2


def _without_lazy_init() -> None:
    model = Net()
    shard_model(model, _mesh((1, 2)))
    model.blocks[0](torch.ones(2, 7))
    model(_tokens(2)[0])


def test_a_block_that_runs_before_an_uninitialized_root_breaks_it(gloo: ProcessPool) -> None:
    """The reason for ``initialize_roots``; when this fails, torch no longer needs it."""
    with pytest.raises(RanksFailedError, match="has already been lazily initialized"):
        gloo.run(_without_lazy_init, world_size=2)


def _t5(shape: tuple[int, int]) -> tuple[list[str], dict[str, Tensor | None], dict[str, Tensor | None]]:
    import transformers

    config = transformers.T5Config(
        num_layers=2,
        d_model=12,
        d_kv=3,
        num_heads=4,
        d_ff=20,
        vocab_size=33,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    tokens = torch.randint(1, 33, (dist.get_world_size(), 6), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    single = transformers.T5ForConditionalGeneration(config)
    single(input_ids=tokens, labels=tokens).loss.backward()
    torch.manual_seed(dist.get_rank())
    model = transformers.T5ForConditionalGeneration(config)
    shard_model(model, _mesh(shape), forward_methods=("generate",))
    mine = tokens[dist.get_rank()][None]
    model(input_ids=mine, labels=mine).loss.backward()
    gradients = _gradients(model)
    model.generate(input_ids=mine, max_new_tokens=3, min_new_tokens=3, num_beams=2)
    free_unsharded(model)
    assert model.shared.weight is model.lm_head.weight
    assert model.shared.weight is model.encoder.embed_tokens.weight
    return [type(unit).__name__ for unit in fsdp_modules(model)], gradients, _gradients(single)


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=str)
def test_t5_keeps_its_ties_and_generates(gloo: ProcessPool, shape: tuple[int, int]) -> None:
    pytest.importorskip("transformers")
    for units, actual, expected in gloo.run(_t5, shape, world_size=shape[0] * shape[1], timeout=100.0):
        assert units == ["FSDPT5ForConditionalGeneration", *["FSDPT5Block"] * 4]
        _assert_close(actual, expected)


def _user_sharded(kind: str) -> tuple[list[str], dict[str, Tensor | None]]:
    world = dist.get_world_size()
    mesh = _mesh((2, world // 2))
    torch.manual_seed(0)
    model = Net()
    if kind == "block":
        fully_shard(model.blocks[1], mesh=mesh)
    elif kind == "inside":
        fully_shard(model.blocks[1].up, mesh=mesh)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.scale})
    shard_model(model, mesh, forward_methods=("training_step",))
    agreement = GradientAgreement(model, mesh)
    model.training_step(_tokens(world)[dist.get_rank()]).backward()
    agreement.finish()
    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)], _gradients(model)


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        ("block", ["", "blocks.0", "blocks.1"]),
        ("inside", ["", "blocks.0", "blocks.1", "blocks.1.up"]),
        ("all", ["", "blocks.0", "blocks.1"]),
    ],
)
def test_modules_that_the_user_sharded_are_left_alone(gloo: ProcessPool, kind: str, units: list[str]) -> None:
    for names, gradients in gloo.run(_user_sharded, kind, world_size=4):
        assert names == units
        _assert_close(gradients, _reference(4))


def _replicas_of_user_shards() -> Tensor:
    mesh = _mesh((2, 2))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    fully_shard(model[0], mesh=mesh)
    shard_model(model, mesh)
    return model[0].weight.to_local().clone()


def test_replicas_of_user_shards_become_equal(gloo: ProcessPool) -> None:
    shards = gloo.run(_replicas_of_user_shards, world_size=4)
    assert torch.equal(shards[0], shards[2])
    assert torch.equal(shards[1], shards[3])
    assert not torch.equal(shards[0], shards[1][: shards[0].shape[0]])


def _tensor_parallel() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    full = model[0].weight.detach().clone()
    model[0].weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [Shard(0)]))
    shard_model(model, mesh["shard"])
    return [full, model[0].weight.full_tensor(), torch.tensor(len(model[0].weight.placements))]


def test_tensor_parallel_weights_are_sharded_further(gloo: ProcessPool) -> None:
    for full, gathered, num_axes in gloo.run(_tensor_parallel, world_size=4):
        assert torch.equal(full, gathered)
        assert num_axes == 2


def _wider(rank: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 4 + rank)), "auto"


def _other_units(rank: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(Block(), Block()), lambda name, _: name == str(rank)


def _error_on_one_rank(rank: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 4)), ["Linear" if rank == 0 else "Missing"]


def _policy_raises(rank: int) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(4, 4)), lambda *_: {}["missing"] if rank == 1 else False


def _shard_different(build: Callable[[int], tuple[nn.Module, Any]]) -> str:
    model, policy = build(dist.get_rank())
    try:
        shard_model(model, _mesh((1, 3)), wrap_policy=policy)
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_wider, "the model Sequential differs between ranks: .*'0.weight' \\(4, 4\\) float32.*\\(5, 4\\)"),
        (_other_units, "the model Sequential differs between ranks: .*FSDP2 unit"),
        (_error_on_one_rank, "no module is a Missing"),
        (_policy_raises, "KeyError"),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_every_rank(
    gloo: ProcessPool, build: Callable[[int], tuple[nn.Module, Any]], message: str
) -> None:
    for text in gloo.run(_shard_different, build, world_size=3):
        assert __import__("re").search(message, text), text


def _no_root(kind: str) -> tuple[list[str], list[Tensor]]:
    mesh = _mesh((1, 2))
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(5, 5), "list": nn.ModuleList([nn.Linear(5, 3)])})
    if kind == "tied":
        model["two"] = nn.Linear(5, 5)
        model["two"].weight = model["one"].weight
    shard_model(model, mesh, shard_root=False)
    initialize_roots(model)
    x = torch.ones(2, 5)
    for _ in range(2):
        # Two passes in a row, as in a training step with manual optimization.
        model["list"][0](model["one"](x)).sum().backward()
    return [name for name, m in model.named_modules() if isinstance(m, FSDPModule)], [
        _full(p.grad) for p in model.parameters()
    ]


def test_without_a_root_every_child_is_one(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    for names, gradients in gloo.run(_no_root, "plain", world_size=2):
        assert names == ["one", "list.0"]
        for actual, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(actual, parameter.grad)


def test_children_that_share_a_weight_cannot_be_roots(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError, match=r"one\.weight is held by ModuleDict itself or shared"):
        gloo.run(_no_root, "tied", world_size=2)


def _thaw() -> list[bool]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    shard_model(model, _mesh((1, 2)), mp_policy=policy)
    initialize_roots(model)
    results = []
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        gradient = model[0][0].weight.grad
        results.append(gradient is not None and gradient.dtype == torch.float32 and bool(gradient.full_tensor().any()))
        model[0].requires_grad_(True)
    return results


def test_a_frozen_unit_can_be_thawed_under_mixed_precision(gloo: ProcessPool) -> None:
    assert gloo.run(_thaw, world_size=2) == [[False, True]] * 2


def _unusual() -> dict[str, Any]:
    mesh = _mesh((1, 2))
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5), nn.Flatten())
    model.register_buffer("phase", torch.rand(3).to(torch.complex64))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    shard_model(model, mesh)
    return {name: _full(tensor) for name, tensor in model.state_dict().items()}


def test_strided_weights_and_buffers_of_any_dtype_are_broadcast(gloo: ProcessPool) -> None:
    first, second = gloo.run(_unusual, world_size=2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class HalfWithFullNorm(nn.Module):
    """Linear layers in bfloat16 around a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.outer = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x).float()).bfloat16())


def _mixed_dtypes() -> tuple[list[str], list[torch.dtype]]:
    model = HalfWithFullNorm()
    shard_model(model, _mesh((1, 2)))
    model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    names = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    return names, [p.grad.dtype for p in (model.inner.weight, model.norm.weight)]


def test_a_layer_of_another_dtype_is_a_unit(gloo: ProcessPool) -> None:
    assert gloo.run(_mixed_dtypes, world_size=2) == [(["", "norm"], [torch.bfloat16, torch.float32])] * 2


def _scalar_on_one_rank() -> list[float | None]:
    mesh = _mesh((2, 2))
    model = nn.Module()
    model.used = nn.Parameter(torch.tensor(1.0))
    model.unused = nn.Parameter(torch.tensor(1.0))
    if dist.get_rank() == 3:
        (8 * model.used).backward()
    GradientAgreement(model, mesh).finish()
    return [None if p.grad is None else p.grad.item() for p in (model.used, model.unused)]


def test_a_scalar_that_one_rank_uses_has_the_mean_gradient_everywhere(gloo: ProcessPool) -> None:
    assert gloo.run(_scalar_on_one_rank, world_size=4) == [[2.0, None]] * 4


def _meta() -> list[Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    shard_model(model, _mesh((1, 2)))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    initialize_roots(model)
    model(torch.ones(2, 7)).sum().backward()
    return [_full(p.detach()) for p in model.parameters()]


def test_a_meta_model_is_sharded_before_it_has_data(gloo: ProcessPool) -> None:
    for weights in gloo.run(_meta, world_size=2):
        assert all(bool((weight == 1).all()) for weight in weights)


class Branches(nn.Module):
    """Each rank uses some of the branches; one is used by none, one block by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, x: Tensor, branches: list[int]) -> Tensor:
        x = self.blocks[0](x)
        return torch.stack([self.branches[index](x).sum() for index in branches]).sum()


_BRANCHES = ([0], [0, 1])


def _use_branches(agree: bool) -> list[dict[str, Tensor | None]]:
    mesh = _mesh((1, 2))
    torch.manual_seed(0)
    model = Branches()
    shard_model(model, mesh)
    agreement = GradientAgreement(model, mesh) if agree else None
    results = []
    x = torch.full((2, 3), dist.get_rank() + 1.0)

    def backward(branches: list[int]) -> None:
        model(x, branches).backward()
        if agreement is not None:
            agreement.finish()
        results.append(_gradients(model))

    backward(_BRANCHES[dist.get_rank()])
    backward([0])
    model.zero_grad()
    model.blocks[0][0].bias.requires_grad_(True)
    backward([0])
    return results


def test_gradients_of_some_ranks_count_and_those_of_none_stay_none(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Branches()

    def both(branches: tuple[list[int], list[int]]) -> dict[str, Tensor | None]:
        for rank, chosen in enumerate(branches):
            (model(torch.full((2, 3), rank + 1.0), chosen) / 2).backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    expected = [both(_BRANCHES), both(([0], [0]))]
    model.zero_grad()
    model.blocks[0][0].bias.requires_grad_(True)
    expected.append(both(([0], [0])))
    for results in gloo.run(_use_branches, True, world_size=2):
        for actual, reference in zip(results, expected, strict=True):
            _assert_close(actual, reference)


def test_without_agreement_different_branches_break_the_reduction(gloo: ProcessPool) -> None:
    """The reason for GradientAgreement; when this fails, torch no longer needs it."""
    with pytest.raises(RanksFailedError):
        gloo.run_fresh(_use_branches, False, world_size=2, timeout=12.0, grace=2.0)


class Recurrent(nn.Module):
    """``nn.LSTM`` keeps a list of its weights beside the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3, 2, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class TransformerOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(x, x)


class Stages(nn.Sequential):
    """Convolutions in the manner of torchvision."""

    def __init__(self) -> None:
        def stage(inputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())

        super().__init__(stage(3), stage(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


class Compiled(nn.Sequential):
    """``torch.compile`` around each block, as the user may have done before the model is sharded."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        super().__init__(*(torch.compile(block, backend="eager") for block in blocks), nn.Linear(5, 2))


class CompiledInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


_KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "recurrent": (Recurrent, (2, 4, 5), 0),
    "transformer": (TransformerOnly, (2, 4, 8), 4),
    "stages": (Stages, (2, 3, 6, 6), 2),
    "compiled": (Compiled, (2, 5), 2),
    "compiled inside": (CompiledInside, (2, 5), 2),
}


def _train_and_evaluate(kind: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    build, shape, _ = _KINDS[kind]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    batches = torch.randn(dist.get_world_size(), *shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    single = build()
    torch.manual_seed(dist.get_rank())
    model = build()
    shard_model(model, mesh)
    agreement = GradientAgreement(model, mesh)
    results: list[dict[str, Any]] = []
    for net, batch in ((model, batches[dist.get_rank()]), (single, batches.flatten(0, 1))):
        for _ in range(2):
            net.zero_grad()
            net(batch).square().mean().backward()
            if net is model:
                agreement.finish()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        net.eval()
        with torch.no_grad():
            output = net(batches.flatten(0, 1))
        free_unsharded(net)
        results.append({"output": output, **_gradients(net), **{f"new {n}": _full(p.detach()) for n, p in net.named_parameters()}})
    return len(list(fsdp_modules(model))) - 1, *results


@pytest.mark.parametrize("kind", _KINDS)
def test_common_architectures_train_as_in_one_process(gloo: ProcessPool, kind: str) -> None:
    for num_units, actual, expected in gloo.run(_train_and_evaluate, kind, world_size=2, timeout=100.0):
        assert num_units == _KINDS[kind][2]
        _assert_close(actual, expected)
