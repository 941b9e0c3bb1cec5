"""How a module is cut: by its methods, as a language model of transformers, or as an nn.Sequential; and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from lightning_muon.pipeline.cut import balance, check_outputs, check_parameters, choose_stages, matrices_of, only
from lightning_muon.pipeline.model import CAUSAL_LMS, CausalLM, find_staged_model
from lightning_muon.pipeline.parts import Chain, StagedModel
from tests.distributed.pipeline.models import VOCABULARY, WIDTH, causal_lm, load_example

_LOSS = staticmethod(lambda output, target: ((output - target).square().sum(), target.numel()))


def _holder(child: nn.Module, **methods: Any) -> nn.Module:
    """A module with one child, as LightningModules often are."""
    holder = type("Holder", (nn.Module,), methods)()
    holder.net = child
    return holder


def _run_stages(model: StagedModel, inputs: Any, num_stages: int) -> Any:
    stages, carry = dict(enumerate(choose_stages(model, num_stages))), None
    for stage, parts in stages.items():
        with only(stages, stage):
            carry = model.run(parts, carry, inputs)
    return carry


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [*CAUSAL_LMS, "deepseek_v3", "gemma2", "mixtral", "olmo2", "phi3"])
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
    hidden = _run_stages(model, inputs, 4)
    torch.testing.assert_close(hidden, expected.logits, rtol=0, atol=0)
    result = model.result_of_call(hidden, target)
    assert type(result) is type(expected) and torch.equal(result.logits, expected.logits)
    torch.testing.assert_close(result.loss, expected.loss)
    total, count = model.loss(hidden, target)
    assert count == 6 + 3 and torch.equal(total / count, result.loss)
    with pytest.raises(TypeError, match=rf"(?s)is a Tensor, but .* calls {type(net).__name__}.*def pipeline_step"):
        model.split(tokens)


def test_the_encoder_decoder_example_computes_what_a_t5_does() -> None:
    example = load_example("pipeline_t5")
    batch = torch.utils.data.default_collate(example.samples(6))
    expected = example.make_t5(2)(**batch)
    model = find_staged_model(example.Reverser(2))
    inputs, target = model.split(batch)
    logits = model.run(model.parts, None, inputs)
    total, count = model.loss(logits, target)
    assert torch.equal(logits, expected.logits) and torch.allclose(total / count, expected.loss)


def test_children_of_a_sequential_are_its_parts() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    model = find_staged_model(_holder(net, pipeline_loss=_LOSS))
    assert isinstance(model, Chain) and model.root is net
    assert [part.name for part in model.parts] == ["0", "1", "2"]
    x = torch.randn(4, 2)
    assert torch.equal(model.run(model.parts, None, x), net(x))
    assert model.split((x, 3)) == (x, 3)
    with pytest.raises(TypeError, match=r"(?s)is a Tensor, no pair.*def pipeline_step"):
        model.split(x)
    assert model.inputs_of_call((x,), {}) == (x, None) and model.inputs_of_call((x, x), {}) == ((x, x), None)
    with pytest.raises(TypeError, match="no keywords, got mask"):
        model.inputs_of_call((x,), {"mask": x})


def _smoothed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), reduction="sum", label_smoothing=0.1), (target != -100).sum()


@pytest.mark.parametrize("make", [lambda: causal_lm("gemma2"), lambda: causal_lm("phi3").model])
def test_two_methods_are_enough_for_what_one_model_cuts(make: Callable[[], Any]) -> None:
    net = make()
    step = lambda self, batch: (batch["tokens"], batch["wanted"])  # noqa: E731
    holder = _holder(net, pipeline_step=step, pipeline_loss=staticmethod(_smoothed))
    model = find_staged_model(holder)
    check_outputs(holder, model)
    tokens, wanted = torch.randint(0, VOCABULARY, (2, 3, 7))
    inputs, target = model.split({"tokens": tokens, "wanted": wanted})
    assert target is wanted and model.loss is _smoothed
    output = _run_stages(model, inputs, len(model.parts))
    assert torch.equal(output, net(tokens)[0])
    if not isinstance(model, CausalLM):
        result = model.result_of_call(output, model.inputs_of_call((tokens,), {})[1])
        assert torch.equal(result.last_hidden_state, output)
        with pytest.raises(TypeError, match="call Phi3Model without labels"):
            model.inputs_of_call((tokens,), {"labels": wanted})


class _OfValues(nn.Module):
    """Rotary embeddings that depend on what is embedded: a second way from the first part to all others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(hidden, position_ids)
        return cos * (1 + hidden.mean()), sin


def _changed(kind: str, change: Callable[[Any], object]) -> nn.Module:
    net: Any = causal_lm(kind, num_layers=2)
    change(net)
    return net


def _two_ways(net: Any) -> None:
    net.model.rotary_emb = _OfValues(net.model.rotary_emb)


def _with_loss(net: Any) -> None:
    own = net.loss_function
    net.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return causal_lm("gemma2", num_layers=2)


class _Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class _Two(nn.Module):
    def __init__(self, parts: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        if parts is not None:
            self.pipeline_parts = lambda: parts(self)

    def pipeline_step(self, batch: Any) -> Any:
        return batch

    pipeline_loss = _LOSS


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes))


def _with_adapters() -> nn.Module:
    return peft.get_peft_model(causal_lm("llama", num_layers=2), peft.LoraConfig(target_modules=["q_proj"]))


_LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "why", "missing"),
    [
        # A model of transformers that no stages can compute.
        (lambda: _holder(_changed("olmo2", _two_ways)), "its output becomes another one", "parts step loss"),
        (lambda: _holder(_changed("mixtral", lambda net: setattr(net.config, "output_router_logits", True))),
         "not the cross-entropy of its labels alone, as without output_router_logits", "parts step loss"),
        (lambda: _holder(_changed("llama", _with_loss)), "its loss is not the cross-entropy", "parts step loss"),
        (lambda: _holder(_with_adapters()), "a PeftModel is no model of transformers alone", "parts step loss"),
        (lambda: _holder(_on_meta()), "weights are on the meta device", "parts step loss"),
        (lambda: _holder(_t5()), r"a t5 has an encoder and a decoder; examples/pipeline_t5\.py", "parts step loss"),
        # Methods that are missing.
        (lambda: _holder(_LINEAR), "a Linear is no model of transformers", "parts step loss"),
        (lambda: _holder(_LINEAR, pipeline_loss=_LOSS), "a Linear is no model of transformers", "parts step"),
        (lambda: _holder(nn.Sequential(_LINEAR)), "a Sequential does not say its loss", "loss"),
        (lambda: _holder(_LINEAR, pipeline_parts=lambda self: [self.net]), "a Holder does not say its loss", "loss"),
        (lambda: _holder(causal_lm("llama").model), "a LlamaModel does not say its loss", "loss"),
        (_Two, "it holds first, last, and does not say in which order they run", "parts"),
        (lambda: _holder(_Reversed(_LINEAR), pipeline_loss=_LOSS), "a _Reversed is no model", "parts step"),
        # Wrong parts.
        (lambda: _Two(lambda net: [net.first, net.first]), "a module is twice among the parts of _Two", ""),
        (lambda: _Two(lambda net: [net.first, nn.Tanh()]), "a Tanh that is no submodule", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_told_why_and_what_to_write(make: Callable[[], Any], why: str, missing: str) -> None:
    module = make()
    with pytest.raises(ValueError, match=rf"(?s){why}") as error:
        check_outputs(module, find_staged_model(module))
    shown = [name for name in ("parts", "step", "loss") if f"def pipeline_{name}(self" in str(error.value)]
    assert shown == missing.split()


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.data())
def test_the_stage_with_the_most_work_has_least(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = [(0, *inner) for inner in combinations(range(1, len(costs)), num_stages - 1)]

    def largest(cut: Sequence[int]) -> int:
        return max(sum(costs[start:end]) for start, end in pairwise([*cut, len(costs)]))

    found = tuple(balance(costs, num_stages))
    assert found in cuts and largest(found) == min(map(largest, cuts))


def test_a_head_counts_as_layers_and_an_embedding_not_at_all() -> None:
    embedding, *layers, head = (
        sum(p.numel() for p in matrices_of(part)) for part in find_staged_model(causal_lm("llama")).parts
    )
    assert embedding == 0 and head == WIDTH * VOCABULARY and len(set(layers)) == 1
    # The head is as much as five layers.
    model = find_staged_model(causal_lm("llama", num_layers=12, vocabulary=5 * layers[0] // WIDTH))
    assert [len(parts) for parts in choose_stages(model, 3)] == [1 + 5, 6, 1 + 1]
