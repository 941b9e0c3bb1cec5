"""ParallelMuon in one process: arguments, groups, routes, memory, bits of torch.optim.Muon; what FlexDeMo has, too.

Hyper-parameters that change after construction are checked before anything changes, and heeded by the next step.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.profiler import ProfilerActivity, profile

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.math.newton_schulz import NewtonSchulz, NewtonSchulzGraphs
from tests.support.tensors import are_equal, set_gradients, train

SHAPES = [(13, 7), (64, 64), (3, 200), (1, 9), (200, 3)]


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_one_rank_has_the_bits_of_torch_optim_muon(dtype: torch.dtype, nesterov: bool, adjust_lr_fn: Any) -> None:
    if dtype is torch.bfloat16 and not nesterov:
        pytest.skip("torch.optim.Muon then normalizes its momentum buffer in place: bfloat16() is no copy")
    mine, theirs = [[nn.Parameter(p.detach().to(dtype)) for p in _parameters()] for _ in range(2)]
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    ours = ParallelMuon(mine, algorithm="muon", compute_dtype="bfloat16", bucket_bytes=1000, **options)
    reference = torch.optim.Muon(theirs, **options)
    train(ours, range(10))
    train(reference, range(10))
    assert are_equal(mine, theirs)


def test_groups_keep_their_own_hyper_parameters_and_algorithm() -> None:
    mine = _parameters()
    optimizer = ParallelMuon(
        [
            {"params": mine[:2], "lr": torch.tensor(0.25), "muon_lr_factor": 0.5, "momentum": 0.5},
            {"params": mine[2:4], "algorithm": "adamw", "betas": (0.8, 0.95), "adamw_eps": 1e-6, "weight_decay": 0.0},
            {"params": mine[4:]},
        ],
        muon_lr_factor=4.0,
        compute_dtype="bfloat16",
    )
    theirs = _parameters()
    reference = [
        torch.optim.Muon(theirs[:2], lr=0.125, momentum=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[2:4], betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0, fused=True),
        torch.optim.Muon(theirs[4:], lr=0.004, adjust_lr_fn="match_rms_adamw"),
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, *reference)]
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        for each in (optimizer, *reference, *schedulers):
            each.step()
    assert are_equal(mine, theirs)
    assert [set(optimizer.state[p]) for p in mine] == [
        *[{"momentum_buffer"}] * 2, *[{"step", "exp_avg", "exp_avg_sq"}] * 2, {"momentum_buffer"},
    ]  # fmt: skip


def test_a_step_needs_memory_for_a_few_buckets_only() -> None:
    # 32 matrices of 64 KiB in buckets of 64 KiB: a step may hold a few of them, not a copy of all.
    parameters = [nn.Parameter(torch.zeros(128, 128)) for _ in range(32)]
    optimizer = ParallelMuon(parameters, compute_dtype="float32", bucket_bytes=2**16)
    for parameter in parameters:
        parameter.grad = torch.randn(128, 128)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        optimizer.step()
    level, peak = 0, 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert 2**16 <= peak <= 10 * 2**16


def test_the_group_decides_then_the_module_then_the_shape() -> None:
    model, extra = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)), nn.Parameter(torch.ones(3, 2))
    table, hidden = model[0].weight, model[1].weight
    optimizer = ParallelMuon([table, extra])
    assert [route.algorithm for route in optimizer.routes] == ["muon", "muon"]
    optimizer.attach(model)
    assert [route.algorithm for route in optimizer.routes] == ["adamw", "muon"]
    assert optimizer.routes[1].name == "parameter 1", "it is not in the module"
    groups = [{"params": [table], "algorithm": "muon"}, {"params": [hidden], "algorithm": "adamw"}]
    forced = ParallelMuon(groups)
    forced.attach(model)
    assert [route.algorithm for route in forced.routes] == ["muon", "adamw"]
    assert forced.routes[0].reason == "embedding, algorithm='muon'"


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        flat = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            ParallelMuon(flat)
    finally:
        dist.destroy_process_group()


def test_weight_decay_is_not_rounded_to_bfloat16() -> None:
    # 1 - 0.02 * 0.1 is 0.998; as a bfloat16 it would be 0.9961, and the decay twice as strong.
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = ParallelMuon([weight], lr=0.02, weight_decay=0.1, normuon=True)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight == torch.tensor(256.0 * 0.998).bfloat16()).all()


def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    cuda = {name: mock.MagicMock() for name in ("CUDAGraph", "device", "stream", "current_stream", "Stream")}
    refused = mock.MagicMock(side_effect=RuntimeError("operation not permitted"))
    way, graphs = NewtonSchulz(((3.4445, -4.7750, 2.0315),), torch.float32), []
    with mock.patch.multiple(torch.cuda, graph=refused, graph_pool_handle=mock.MagicMock(), **cuda):
        recorded = NewtonSchulzGraphs(torch.float32, torch.device("cpu"))
        graphs += [recorded.take((1, 8, 4), way, eps=1e-7) for _ in range(2)]
    assert graphs == [None, None]
    assert refused.call_count == 1
    assert "kernel by kernel" in caplog.text
    assert "not permitted" in caplog.text


FLOAT32: dict[str, Any] = {"compute_dtype": "float32", "wire_dtype": "float32"}


@pytest.fixture(params=[ParallelMuon, FlexDeMo])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 13), nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 20, bias=False))


def _make(kind: Any, params: Any, **options: Any) -> Any:
    return kind(params, lr=0.05, **({"base": "muon"} if kind is FlexDeMo else {}), **FLOAT32, **options)


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        set_gradients(model.parameters(), step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_freezing_thawing_and_new_groups_count_from_the_next_step(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, [{"params": list(model[:2].named_parameters())}])
    _train(model, optimizer, range(2))
    frozen = model[1].weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    _train(model, optimizer, range(2, 3))
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    optimizer.add_param_group({"params": model[3].parameters()})  # Without names, which the first group has.
    assert optimizer.param_groups[1]["param_names"] == ["1.0"]
    later = model[3].weight.detach().clone()
    _train(model, optimizer, range(3, 4))
    assert not torch.equal(frozen, before)
    assert not torch.equal(model[3].weight, later)


def test_groups_get_defaults_and_keep_other_keys(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, [{"params": [model[1].weight], "adjust_lr_fn": None}])
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "original"
    assert optimizer.param_groups[0]["lr"] == 0.05
    others = dict.fromkeys(("initial_lr", "max_momentum", "etas", "foreach", "no_weight_decay", "depth"), 1)
    optimizer.add_param_group({"params": [model[3].weight], **others})
    assert optimizer.param_groups[1].items() >= others.items()


def test_integers_beside_adapters_are_left_out(kind: Any) -> None:
    model = nn.ModuleDict({"quantized": nn.Module(), "lora_B": nn.Linear(4, 6)})
    model["quantized"].weight = nn.Parameter(torch.ones(6, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.warns(UserWarning, match=r"1 parameters of integers \(quantized weights\) are left out"):
        optimizer = _make(kind, model)
    before = _train(model["lora_B"], optimizer, range(1))
    _train(model["lora_B"], optimizer, range(1, 2))
    assert not torch.equal(before[0], model["lora_B"].weight) and model["quantized"].weight.eq(1).all()
    assert optimizer.param_groups[0]["param_names"] == ["lora_B.weight", "lora_B.bias"]


def test_copies_train_on_with_equal_bits(kind: Any) -> None:
    model = _model()
    optimizer = _make(kind, model)
    _train(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = _train(model, optimizer, range(2, 4))
    for other_model, other in copies:
        assert are_equal(_train(other_model, other, range(2, 4)), expected)
        assert [route.name for route in other.routes] == [route.name for route in optimizer.routes]


def test_steps_without_gradients_change_nothing_as_in_torch(kind: Any) -> None:
    """A scheduler that is tried out, batches that are left out."""
    model = _model()
    optimizer = _make(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert are_equal(before, model.parameters())
        _train(model, optimizer, range(step, step + 1))
        optimizer.zero_grad()
        assert not are_equal(before, model.parameters())


def test_a_float16_gradient_with_a_large_norm_is_applied() -> None:
    parameter = nn.Parameter(torch.zeros(8, 8, dtype=torch.float16))
    bias = nn.Parameter(torch.zeros(8))
    optimizer = ParallelMuon([parameter, bias], lr=0.1)
    parameter.grad = torch.full((8, 8), 60000.0, dtype=torch.float16)
    bias.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert parameter.detach().isfinite().all() and (parameter < 0).all()
    parameter.grad[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("options", [{"base": "sgd"}, {"base": "adamw"}, {"base": "muon", **FLOAT32}, None], ids=str)
def test_where_the_elements_lie_changes_nothing(options: Any) -> None:
    """Parameters between other elements and turned gradients, for FlexDeMo on each base, and for ParallelMuon."""
    results = []
    for is_odd in (False, True):
        wide = [torch.ones(6, 20), torch.ones(9), torch.ones(20, 5), torch.ones(3, 4)]
        parts = [wide[0][:, 2:12], wide[1][1:8:2], wide[2].mT[:, :10], wide[3]]
        parameters = [nn.Parameter(part if is_odd else part.contiguous()) for part in parts]
        optimizer = (
            FlexDeMo(parameters, lr=0.05, **options) if options else ParallelMuon(parameters, lr=0.05, **FLOAT32)
        )
        for step in range(2):
            set_gradients(parameters, step)
            if is_odd:
                parameters[3].grad = parameters[3].grad.mT.contiguous().mT
            optimizer.step()
        results.append(parameters)
        if is_odd:
            assert (wide[0][:, :2] == 1).all() and (wide[0][:, 12:] == 1).all()
            assert (wide[1][::2] == 1).all() and (wide[2][10:] == 1).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))


def _in_groups(module: nn.Module) -> ParallelMuon:
    groups = ([each for each in module.parameters() if (each.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = ParallelMuon([{"params": group} for group in groups])
    optimizer.attach(module)
    return optimizer


def _step(module: nn.Module, optimizer: ParallelMuon) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


REPLACES: dict[str, Callable[[nn.Sequential], object]] = {
    "layer": lambda module: module.__setitem__(1, nn.Linear(5, 4)),
    "weight": lambda module: setattr(module[1], "weight", nn.Parameter(torch.ones(4, 5))),
    "to_empty": lambda module: module.to("meta").to_empty(device="cpu"),
    "weight_norm": lambda module: nn.utils.parametrizations.weight_norm(module[1]),
}


@pytest.mark.parametrize("make", [ParallelMuon, _in_groups])
@pytest.mark.parametrize("what", REPLACES)
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_replaces_a_parameter_is_an_error(make: Any, what: str, is_trained: bool) -> None:
    module = _layers()
    optimizer = make(module)
    if is_trained:
        _step(module, optimizer)
    REPLACES[what](module)
    with pytest.raises(RuntimeError, match=r"[01]\.weight of the module is no longer the parameter"):
        _step(module, optimizer)


def test_an_optimizer_that_no_gradient_reaches_says_so() -> None:
    module = _layers()
    optimizer = ParallelMuon(module.parameters())
    module = _layers()
    with pytest.warns(UserWarning, match="has a gradient in its first step"), pytest.warns(UserWarning, match="shape"):
        _step(module, optimizer)


def tripled(matrices: Tensor, *, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """An ``orthogonalize``."""
    return 3 * newton_schulz(matrices)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", torch.tensor(float("inf"))),
        ("lr", torch.ones(2)),
        ("weight_decay", None),
        ("betas", (0.9,)),
        ("adjust_lr_fn", "other"),
        ("eps", KeyError),
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_bad_value_is_refused_before_anything_changes(key: str, value: Any, when: str) -> None:
    models = [_model() for _ in range(2)]
    optimizer, other = (_make(ParallelMuon, model) for model in models)
    if when == "later":
        _train(models[0], optimizer, range(1))
        _train(models[1], other, range(1))
    group = optimizer.param_groups[0]
    was = group.pop(key)
    if value is not KeyError:
        group[key] = value
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=key if key != "lr" else "lr|one element|scalar"):
            _train(models[0], optimizer, range(1, 2))
    group[key] = was
    assert are_equal(_train(models[0], optimizer, range(1, 3)), _train(models[1], other, range(1, 3)))


def test_another_algorithm_takes_over_from_the_next_step_on() -> None:
    """From AdamW to Muon and back; each begins with zeros."""
    models = [_model() for _ in range(2)]
    optimizer = _make(ParallelMuon, models[0].parameters(), algorithm="adamw")
    for number, algorithm in enumerate(("adamw", "auto", "adamw")):
        reference = _make(ParallelMuon, models[1].parameters(), algorithm=algorithm)
        optimizer.param_groups[0]["algorithm"] = algorithm
        for parameter in models[0].parameters():
            if parameter.ndim == 1 and number:
                optimizer.state.pop(parameter)  # AdamW goes on with these.
        steps = range(2 * number, 2 * number + 2)
        assert are_equal(_train(models[0], optimizer, steps), _train(models[1], reference, steps))
        states = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(optimizer.state[mine].keys() == reference.state[theirs].keys() for mine, theirs in states)


def test_a_resume_says_which_loaded_options_count() -> None:
    saved = ParallelMuon(_model(), adjust_lr_fn="original").state_dict()
    optimizer = ParallelMuon(_model(), adjust_lr_fn="original", nesterov=False, ns_quality="fast", lr=0.5)
    message = r"outweighs the program: nesterov=True \(not False\), ns_quality='reference' \(not 'fast'\); set others"
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(saved)
    of_program = ParallelMuon(_model(), adjust_lr_fn=None, normuon=True, orthogonalize=tripled)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*outweighs")
        of_program.load_state_dict(saved)
    assert of_program.param_groups[0]["normuon"] and of_program.param_groups[0]["orthogonalize"] is tripled


def test_a_wrong_function_is_refused_before_a_step() -> None:
    model = _model()
    optimizer = _make(ParallelMuon, model)
    before = _train(model, optimizer, range(1))
    wrong: list[tuple[Any, str]] = [
        (lambda matrices: matrices, "newton_schulz"),
        (lambda matrices, *, newton_schulz: matrices.mT, r"<lambda> returned \(1, 3, 2\) torch.float32 for"),
        (lambda matrices, *, newton_schulz: None, r"returned NoneType for matrices \(1, 2, 3\) torch.float32; return"),
    ]
    for function, message in wrong:
        optimizer.param_groups[0]["orthogonalize"] = function
        with pytest.raises(TypeError, match=message):
            _train(model, optimizer, range(1, 2))
        assert are_equal(before, model.parameters())


def test_a_rate_that_becomes_nan_in_place_is_refused() -> None:
    model = _model()
    optimizer = ParallelMuon(model, lr=torch.tensor(0.1))
    _train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"].fill_(float("nan"))
    with pytest.raises(ValueError, match="lr must be finite"):
        _train(model, optimizer, range(1, 2))
