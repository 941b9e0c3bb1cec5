"""Clipping on two ranks in models of others: what exceeds the threshold becomes it, and other heads stay."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode

from lightning_muon import Options
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.qk_clip import QKClipper
from lightning_muon.engine.training import TrainingEngine
from tests.integration.training import full_weights
from tests.support.processes import ProcessPool

THRESHOLD = 10.0
MODELS = (
    *("LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "T5ForConditionalGeneration", "Phi3ForCausalLM"),
    "DeepseekV3ForCausalLM",
)
TOKENS = torch.randint(0, 31, (4, 7), generator=torch.Generator().manual_seed(3))


class _Calls(TorchFunctionMode):
    """The largest logit of each head and the values, of each call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = (part.detach() for part in args[:3])
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
            logits = query @ key.mT * scale
            if given.get("is_causal"):
                logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
            mask = given.get("attn_mask")
            if mask is not None:
                hidden = ~mask if mask.dtype == torch.bool else mask < -1e4
                logits = logits.masked_fill(hidden, -math.inf)
            self.calls.append((logits.amax((0, 2, 3)), value.clone()))
        return func(*args, **given)


def _language_model(kind: str) -> nn.Module:
    """A model of transformers with one layer, whose heads have large logits."""
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
    latent = {"q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    chosen: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": sizes | {"num_key_value_heads": 1, "head_dim": 6},
        "GPT2LMHeadModel": {"n_embd": 12, "n_layer": 1, "n_head": 3},
        "GPTNeoXForCausalLM": sizes,
        "T5ForConditionalGeneration": {"d_model": 12, "d_kv": 5, "num_heads": 3, "d_ff": 20, "num_layers": 1},
        "Phi3ForCausalLM": sizes | {"num_key_value_heads": 1},
        "DeepseekV3ForCausalLM": sizes | latent | experts | {"num_key_value_heads": 3, "moe_intermediate_size": 8},
    }
    ids = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**chosen[kind], **ids))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
            elif "norm" not in name and "ln" not in name:
                parameter.normal_(0, 0.5)  # Biases, which begin as zeros.
    return model


def _engine(
    module: nn.Module, prepare: Callable[[nn.Module, Meshes], None] = lambda *_: None, **chosen: Any
) -> TrainingEngine:
    options = Options(**chosen)
    meshes = options.make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    prepare(module, meshes)
    mode_options = replace(options.mode_options, wait_for_parameters=True)
    engine = TrainingEngine(
        module, options, meshes, mode_options=mode_options, info=lambda _: None, warn=lambda _: None
    )
    engine.shard(torch.device("cpu"))
    return engine


def _attach(module: nn.Module, *prepare: Any, **options: Any) -> tuple[TrainingEngine, Any]:
    """An engine, and an optimizer that changes nothing."""
    engine = _engine(module, *prepare, **options)
    given = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    return engine, engine.attach([given], source="the test")[0]


def _watch(engine: TrainingEngine, threshold: float, logged: list[Tensor], **projections: Any) -> QKClipper:
    return QKClipper(engine, projections, threshold=threshold, is_measured=lambda: True, log=logged.append)


def _own_rows() -> Tensor:
    return TOKENS[dist.get_rank() :: dist.get_world_size()].contiguous()


def _clip(kind: str) -> tuple[Tensor, Tensor, float, bool, float]:
    """Largest logits of the first layer before and after a step; threshold; whether values stay; what was logged."""
    torch.manual_seed(0)
    module = _language_model(kind).eval()  # Without dropout.
    engine, optimizer = _attach(module)
    tokens = _own_rows()
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    logged: list[Tensor] = []

    def step(threshold: float) -> tuple[Tensor, Tensor]:
        clipper = _watch(engine, threshold, logged)
        optimizer.zero_grad()
        with _Calls() as mode:
            loss = module(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss
        loss.backward()
        engine.step(optimizer, lambda each: each.step())
        clipper.close()
        logits, values = mode.calls[0]
        dist.all_reduce(logits, dist.ReduceOp.MAX)
        return logits, values

    before, values = step(math.inf)
    threshold = before.mean().item()
    step(threshold)
    after, values_after = step(math.inf)
    engine.close()
    return before, after, threshold, torch.equal(values, values_after), float(logged[1])


def _clip_all() -> dict[str, Any]:
    return {kind: _clip(kind) for kind in MODELS}


def test_logits_of_each_head_become_the_threshold(gloo: ProcessPool) -> None:
    for kind, (before, after, threshold, same_values, logged) in gloo.run(_clip_all, world_size=2, timeout=120)[
        0
    ].items():
        assert logged >= before.max() * (1 - 1e-6), kind  # T5 has further layers.
        # Weights are scaled before the products, and not the products, so the last digits differ.
        torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-5, atol=1e-6, msg=kind)
        assert same_values, kind


def _padding(tokens: Tensor) -> Tensor:
    return (tokens % 5 == 3) & (torch.arange(7) > 0)


class _MultiHead(nn.Module):
    """torch's own attention, which returns its weights in the first call and not in the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 31)
        with torch.no_grad():
            self.attention.in_proj_weight.mul_(2)
            self.attention.in_proj_bias.normal_()

    def forward(self, tokens: Tensor) -> Tensor:
        x, padding = self.embedding(tokens), _padding(tokens)
        causal = torch.ones(7, 7).triu(1).bool()
        for needs_weights in (True, False):
            y, _ = self.attention(x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=needs_weights)
            x = x + y
        return self.head(x)


def _logits_by_hand(module: _MultiHead, x: Tensor, tokens: Tensor) -> Tensor:
    rows = F.linear(x, module.attention.in_proj_weight, module.attention.in_proj_bias)
    query, key = (rows[..., 12 * part : 12 * part + 12].unflatten(-1, (3, 4)).transpose(1, 2) for part in (0, 1))
    hidden = torch.ones(7, 7).triu(1).bool() | _padding(tokens)[:, None, None]
    return (query @ key.mT / 2).masked_fill(hidden, -math.inf).amax((0, 2, 3))


def _clip_multi_head() -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    module = _MultiHead()
    engine, optimizer = _attach(module)
    logged: list[Tensor] = []
    clipper = _watch(engine, THRESHOLD, logged)
    engine.module(_own_rows()).square().mean().backward()
    engine.step(optimizer, lambda each: each.step())
    clipper.close()
    engine.close()
    return full_weights(module), float(logged[0])


def test_multihead_attention_of_torch_is_clipped(gloo: ProcessPool) -> None:
    weights, logged = gloo.run(_clip_multi_head, world_size=2)[0]
    torch.manual_seed(0)
    module = _MultiHead()
    seen: list[Tensor] = []
    module.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        module(TOKENS)
        largest = torch.stack([_logits_by_hand(module, x, TOKENS) for x in seen]).amax(0)
        assert largest.min() < THRESHOLD < largest.max()
        assert logged == pytest.approx(largest.max().item())
        roots = (THRESHOLD / largest).clamp(max=1).sqrt().repeat_interleave(4)
        scales = torch.cat([roots, roots, torch.ones(12)])
        expected = module.attention.in_proj_weight * scales[:, None]
        torch.testing.assert_close(weights["attention.in_proj_weight"], expected, rtol=1e-5, atol=1e-6)
        expected = module.attention.in_proj_bias * scales
        torch.testing.assert_close(weights["attention.in_proj_bias"], expected, rtol=1e-5, atol=1e-6)


class _Own(nn.Module):
    """Attention of a user, whose fused projection, norm and product may be other than expected."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem
        self.add_module("mixed" if problem == "names" else "qkv", nn.Linear(12, 36))
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        if self.problem == "order":
            query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(-2)
        else:
            query, key, value = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(-3)
        if self.problem == "norm":
            query = F.rms_norm(query, (4,))
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        if self.problem == "product":
            seen = (heads[0] @ heads[1].mT).softmax(-1) @ heads[2]
        else:
            seen = F.scaled_dot_product_attention(*heads)
        return self.out(seen.transpose(1, 2).flatten(2))


class _OwnAttention(_Own):
    """By the name of its class it is attention."""


def _run_own(problem: str, projections: dict[str, Any] | None = None) -> bool:
    """Whether, on rank 0, the first step has clipped."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(31, 12), _OwnAttention(problem), nn.Linear(12, 31))
    engine, optimizer = _attach(module)
    clipper = _watch(engine, 1e-3, [], **(projections or {}))
    before = full_weights(module)
    try:
        module(_own_rows()).square().mean().backward()
        engine.step(optimizer, lambda each: each.step())
        after = full_weights(module)
        return any(not torch.equal(after[name], before[name]) for name in after)
    finally:
        clipper.close()
        engine.close()


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        ("names", r"1: no query and key projections of known names. Pass projections="),
        ("order", r"1: its heads are not those rows of 'qkv'"),
        ("norm", r"1: .* or something between the two changes their norm"),
        ("product", r"1: it has run, and has not called torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_what_cannot_be_clipped_is_an_error_on_all_ranks(gloo: ProcessPool, problem: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_run_own, problem, world_size=2, match=match)


def test_users_may_say_the_order_of_rows(gloo: ProcessPool) -> None:
    assert gloo.run(_run_own, "order", {"*1": ("qkv", "heads")}, world_size=2)[0]


class _Parallel(nn.Module):
    """Attention whose two heads may lie on two tensor-parallel ranks, and that need not run."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(7, 6) for _ in range(3))
        self.out = nn.Linear(6, 7)
        with torch.no_grad():
            self.wq.weight[:3] *= 9  # The first head has larger logits than the second one.

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)]
        return x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    def largest_logits(self, x: Tensor) -> Tensor:
        query, key = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.wq, self.wk))
        return (query @ key.mT / math.sqrt(3)).amax((0, 2, 3))


class _Layers(nn.Module):
    """Two layers, of which a rank may run the first one only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Parallel() for _ in range(2))

    def forward(self, x: Tensor, num_layers: int = 2) -> Tensor:
        for layer in self.layers[:num_layers]:
            x = layer(x)
        return x


def _inputs() -> Tensor:
    return torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(1))


def _parallelize(module: nn.Module, meshes: Meshes) -> None:
    plan = {f"layers.*.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(module, meshes.tensor, plan | {"layers.*.out": RowwiseParallel()})


def _clip_layers(num_layers: list[list[int]], *, is_parallel: bool) -> dict[str, Tensor]:
    """Weights after steps in which each data rank runs so many layers."""
    torch.manual_seed(0)
    module = _Layers()
    prepare, options = ([_parallelize], {"tensor_size": 2}) if is_parallel else ([], {"sharding": "ddp"})
    engine, optimizer = _attach(module, *prepare, **options)
    clipper = _watch(engine, 0.5, [])
    if not is_parallel:
        copy.deepcopy(module)(_inputs())  # As for an average of weights; it is not observed.
    ranks = engine.meshes.num_data_ranks
    for layers in num_layers:
        optimizer.zero_grad()
        rows = _inputs()[engine.meshes.data_rank :: ranks]
        with engine.around_forward():
            loss = engine.module(rows, layers[engine.meshes.data_rank]).square().mean()
        with engine.around_backward():
            loss.backward()
        engine.step(optimizer, lambda each: each.step())
    clipper.close()
    engine.close()
    return full_weights(module)


@torch.no_grad()
def _clip_by_hand(num_layers: list[list[int]]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = _Layers()
    known: set[int] = set()
    for step, layers in enumerate(num_layers):
        x = _inputs()
        ranks = len(layers)
        largest = [torch.full((2,), -math.inf) for _ in module.layers]
        for rank, number in enumerate(layers):
            rows = x[rank::ranks]
            for index, layer in enumerate(module.layers[:number]):
                largest[index] = largest[index].maximum(layer.largest_logits(rows))
                rows = layer(rows)
        for index, layer in enumerate(module.layers):
            if step == 0 or index in known:  # A layer that runs later for the first time is clipped one step later.
                roots = (0.5 / largest[index].clamp(min=0.5)).sqrt().repeat_interleave(3)
                for linear in (layer.wq, layer.wk):
                    linear.weight *= roots[:, None]
                    linear.bias *= roots
        known |= set(range(max(layers)))
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("world_size", "num_layers", "is_parallel"),
    [(4, [[2, 2]], True), (2, [[1, 1], [1, 2], [1, 2]], False)],
    ids=["tensor-parallel", "layers that run later"],
)
def test_heads_of_other_ranks_are_clipped(
    gloo: ProcessPool, world_size: int, num_layers: list[list[int]], is_parallel: bool
) -> None:
    weights = gloo.run(_clip_layers, num_layers, is_parallel=is_parallel, world_size=world_size)[0]
    expected = _clip_by_hand(num_layers)
    for name, whole in expected.items():
        torch.testing.assert_close(weights[name], whole, rtol=1e-5, atol=1e-6, msg=name)
    torch.manual_seed(0)
    assert not torch.equal(expected["layers.1.wq.weight"], _Layers().state_dict()["layers.1.wq.weight"])
