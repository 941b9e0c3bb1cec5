"""How a module is cut: by its methods, as a language model of transformers, or as an nn.Sequential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from lightning_muon.pipeline.cut import check_outputs, check_parameters, choose_stages, only
from lightning_muon.pipeline.model import CausalLM, find_staged_model
from lightning_muon.pipeline.parts import Chain, StagedModel
from lightning_muon.pipeline.pp_plan import PPPlanModel
from tests.distributed.pipeline.models import VOCABULARY, causal_lm, load_example

_LOSS = staticmethod(lambda output, target: ((output - target).square().sum(), target.numel()))


def _holder(child: nn.Module, **methods: Any) -> nn.Module:
    """A module with one child, as LightningModules often are."""
    kind = type("Holder", (nn.Module,), methods)
    holder = kind()
    holder.net = child
    return holder


_PLANNED = (
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "granite",
    "mixtral",
    "olmo2",
    "phi3",
)  # No test sets is_known.


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3", *_PLANNED])
def test_stages_of_a_language_model_compute_what_it_does(kind: str, tied: bool) -> None:
    net: Any = causal_lm(kind, num_layers=3, tied=tied)
    for name, parameter in net.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.1)
    holder = _holder(net)
    model = find_staged_model(holder)
    assert isinstance(model, CausalLM) and model.root is net and len(model.parts) == 5
    check_parameters(holder, model.parts)
    check_outputs(holder, model)
    assert net.training
    tokens = torch.randint(0, VOCABULARY, (2, 7))
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    expected = net(**batch)
    inputs, target = model.split(batch)
    stages = dict(enumerate(choose_stages(model, 4)))
    hidden = None
    for stage, parts in stages.items():
        with only(stages, stage):
            hidden = model.run(parts, hidden, inputs)
    torch.testing.assert_close(hidden, expected.logits, rtol=0, atol=0)
    result = model.result_of_call(hidden, target)
    assert type(result) is type(expected) and torch.equal(result.logits, expected.logits)
    torch.testing.assert_close(result.loss, expected.loss)
    total, count = model.loss(hidden, target)
    assert count == 6 + 3 and torch.equal(total / count, result.loss)


def test_the_encoder_decoder_example_computes_what_a_t5_does() -> None:
    example = load_example("pipeline_t5")
    batch = torch.utils.data.default_collate(example.samples(6))
    expected = example.make_t5(2)(**batch)
    model = find_staged_model(example.Reverser(2))
    inputs, target = model.split(batch)
    logits = model.run(model.parts, None, inputs)
    assert torch.equal(logits, expected.logits)
    total, count = model.loss(logits, target)
    assert torch.allclose(total / count, expected.loss)


@pytest.mark.parametrize("is_held", [False, True])
def test_children_of_a_sequential_are_its_parts(is_held: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    module = _holder(net, pipeline_loss=_LOSS) if is_held else net
    if not is_held:
        net.pipeline_loss = lambda output, target: (output.sum(), 1)
    model = find_staged_model(module)
    assert isinstance(model, Chain) and model.root is net
    assert [part.name for part in model.parts] == ["0", "1", "2"]
    x = torch.randn(4, 2)
    assert torch.equal(model.run(model.parts, None, x), net(x))
    assert model.split((x, 3)) == (x, 3) and model.split([x, 3]) == (x, 3)
    with pytest.raises(TypeError, match=r"(?s)is a Tensor, no pair.*def pipeline_step"):
        model.split(x)
    assert model.inputs_of_call((x,), {}) == (x, None) and model.inputs_of_call((x, x), {}) == ((x, x), None)
    with pytest.raises(TypeError, match="no keywords, got mask"):
        model.inputs_of_call((x,), {"mask": x})


class _Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.first, self.last]

    def pipeline_step(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return (batch["a"], batch["b"]), batch["target"]

    pipeline_loss = _LOSS


def test_wrong_methods_are_named() -> None:
    net = _Methods()
    net.pipeline_parts = lambda: [net.first, net.first]
    with pytest.raises(ValueError, match="a module is twice among the parts of _Methods"):
        find_staged_model(net)
    net.pipeline_parts = lambda: [net.first, nn.Tanh()]
    with pytest.raises(ValueError, match="a Tanh that is no submodule"):
        find_staged_model(net)
    holder = _holder(net, pipeline_parts=lambda self: [self.net])
    with pytest.raises(ValueError, match=r"a Holder does not say its loss. Write in it:\n    def pipeline_loss\(self"):
        find_staged_model(holder)


class _OfValues(nn.Module):
    """Rotary embeddings that depend on what is embedded: a second way from the first part to all others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(hidden, position_ids)
        return cos * (1 + hidden.mean()), sin


def _two_ways() -> nn.Module:
    net: Any = causal_lm("olmo2", num_layers=2)
    net.model.rotary_emb = _OfValues(net.model.rotary_emb)
    return net


def _extra_parameter() -> nn.Module:
    net: Any = causal_lm("gemma2", num_layers=2)
    net.model.scale = nn.Parameter(torch.ones(3))
    return net


def _with_routers() -> nn.Module:
    net: Any = causal_lm("mixtral", num_layers=2)
    net.config.output_router_logits = True
    return net


def _with_adapters() -> nn.Module:
    return peft.get_peft_model(causal_lm("llama", num_layers=2), peft.LoraConfig(target_modules=["q_proj"]))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return causal_lm("gemma2", num_layers=2)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_two_ways, "its output becomes another one"),
        (_extra_parameter, r"model\.scale \(3,\) belongs to no part"),
        (_with_routers, "not the cross-entropy of its labels alone, as without output_router_logits"),
        (_with_adapters, "a PeftModel is no model of transformers alone"),
        (_on_meta, "weights are on the meta device"),
    ],
)
def test_a_model_that_no_stages_can_compute_is_told_why(make: Callable[[], nn.Module], why: str) -> None:
    holder = _holder(make())
    with pytest.raises(ValueError, match=rf"(?s)^Holder cannot be cut into stages: .*{why}") as error:
        check_outputs(holder, find_staged_model(holder))
    for name in ("pipeline_parts", "pipeline_step", "pipeline_loss"):
        assert f"def {name}(self" in str(error.value)


class _Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def pipeline_step(self, batch: Any) -> Any:
        return batch

    pipeline_loss = _LOSS


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))


@pytest.mark.parametrize(
    ("make", "why", "missing"),
    [
        (lambda: _holder(nn.Linear(2, 2)), "a Linear is no model of transformers", "parts step loss"),
        (lambda: _holder(nn.Linear(2, 2), pipeline_loss=_LOSS), "a Linear is no model of transformers", "parts step"),
        (lambda: _holder(nn.Sequential(nn.Linear(2, 2))), "a Sequential does not say its loss", "loss"),
        (lambda: _holder(causal_lm("llama").model), "a LlamaModel does not say its loss", "loss"),
        (_Two, "it holds first, last, and does not say in which order they run", "parts"),
        (lambda: _holder(_Reversed(nn.Linear(2, 2)), pipeline_loss=_LOSS), "a _Reversed is no model", "parts step"),
        (lambda: _holder(_t5()), r"a t5 has an encoder and a decoder; examples/pipeline_t5\.py", "parts step loss"),
    ],
)
def test_an_error_shows_the_methods_that_are_missing(make: Callable[[], nn.Module], why: str, missing: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        find_staged_model(make())
    shown = [name for name in ("parts", "step", "loss") if f"def pipeline_{name}(self" in str(error.value)]
    assert shown == missing.split()


def _run_parts(model: StagedModel, inputs: Any) -> Any:
    """The output of stages of one part each."""
    stages, carry = dict(enumerate(choose_stages(model, len(model.parts)))), None
    for stage, parts in stages.items():
        with only(stages, stage):
            carry = model.run(parts, carry, inputs)
    return carry


def _smoothed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), reduction="sum", label_smoothing=0.1), (target != -100).sum()


def _step(self: Any, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
    return batch["tokens"], batch["wanted"]


@pytest.mark.parametrize("make", [lambda: causal_lm("gemma2"), lambda: causal_lm("phi3").model])
def test_two_methods_are_enough_for_what_one_model_cuts(make: Callable[[], Any]) -> None:
    net = make()
    holder = _holder(net, pipeline_step=_step, pipeline_loss=staticmethod(_smoothed))
    model = find_staged_model(holder)
    check_outputs(holder, model)
    tokens, wanted = torch.randint(0, VOCABULARY, (2, 3, 7))
    inputs, target = model.split({"tokens": tokens, "wanted": wanted})
    assert target is wanted
    output = _run_parts(model, inputs)
    assert torch.equal(output, net(tokens)[0])
    assert model.loss is _smoothed
    if isinstance(model, PPPlanModel) and not isinstance(model, CausalLM):
        result = model.result_of_call(output, model.inputs_of_call((tokens,), {})[1])
        assert torch.equal(result.last_hidden_state, output)
        with pytest.raises(TypeError, match="call Phi3Model without labels"):
            model.inputs_of_call((tokens,), {"labels": wanted})


def test_a_known_model_with_a_loss_of_the_user_is_refused() -> None:
    net: Any = causal_lm("llama", num_layers=2)
    check_outputs(net, find_staged_model(net))
    own = net.loss_function
    net.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)
    with pytest.raises(ValueError, match="its loss is not the cross-entropy"):
        check_outputs(net, find_staged_model(net))
