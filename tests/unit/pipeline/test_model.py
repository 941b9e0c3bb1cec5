"""How a module is cut: by its methods, as a language model of transformers, or as an nn.Sequential."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_muon.pipeline.cut import check_parameters, choose_stages, only
from lightning_muon.pipeline.model import CausalLM, Chain, EncoderDecoder, find_staged_model
from tests.distributed.pipeline.models import VOCABULARY, causal_lm, encoder_decoder, load_example

_LOSS = staticmethod(lambda output, target: ((output - target).square().sum(), target.numel()))


def _holder(child: nn.Module, **methods: Any) -> nn.Module:
    """A module with one child, as LightningModules often are."""
    kind = type("Holder", (nn.Module,), methods)
    holder = kind()
    holder.net = child
    return holder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_stages_of_a_language_model_compute_what_it_does(kind: str, tied: bool) -> None:
    net: Any = causal_lm(kind, num_layers=3, tied=tied)
    holder = _holder(net)
    model = find_staged_model(holder)
    assert isinstance(model, CausalLM) and model.root is net and len(model.parts) == 5
    check_parameters(holder, model.parts)
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
    result = model.result_of_call(hidden, (target, None))
    assert type(result) is type(expected) and torch.equal(result.logits, expected.logits)
    torch.testing.assert_close(result.loss, expected.loss)
    total, count = model.loss(hidden, target)
    assert count == 6 + 3 and torch.equal(total / count, result.loss)


def test_calls_of_a_language_model_become_inputs_and_targets() -> None:
    net: Any = causal_lm("llama")
    model = find_staged_model(net)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert model.inputs_of_call((tokens,), {"labels": None, "past_key_values": None}) == ({"input_ids": tokens}, None)
    inputs, labels = model.inputs_of_call((), {"input_ids": tokens, "labels": tokens})
    assert inputs == {"input_ids": tokens} and labels == (tokens, None)
    batch, num_losses = model.batch_of_call((tokens,), {"labels": tokens, "num_items_in_batch": 5})
    assert batch == {"input_ids": tokens, "labels": tokens} and num_losses == 5
    with pytest.raises(RuntimeError, match="training call it with labels"):
        model.batch_of_call((tokens,), {})
    with pytest.raises(ValueError, match="use_cache=False"):
        model.inputs_of_call((tokens,), {"past_key_values": ()})
    with pytest.raises(KeyError, match=r"no labels, only \['input_ids'\]"):
        model.split({"input_ids": tokens})


@pytest.mark.parametrize("num_stages", [2, 3, 6])
@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_stages_of_an_encoder_decoder_compute_what_it_does(kind: str, num_stages: int) -> None:
    net: Any = encoder_decoder(2, kind=kind)
    model = find_staged_model(_holder(net))
    assert isinstance(model, EncoderDecoder)
    check_parameters(net, model.parts)
    tokens, labels = torch.randint(0, VOCABULARY, (3, 7)), torch.randint(0, VOCABULARY, (3, 5))
    mask = torch.ones_like(tokens)
    mask[0, 4:], labels[1, 2:] = 0, -100
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    expected = net(**batch)
    inputs, target = model.split(batch)
    stages = dict(enumerate(choose_stages(model, num_stages)))
    values = None
    for stage, parts in stages.items():
        with only(stages, stage):
            values = model.run(parts, values, inputs)
    assert torch.equal(values, expected.logits)
    total, count = model.loss(values, target)
    assert count == 12 and torch.allclose(total / count, expected.loss)
    with pytest.raises(TypeError, match=r"takes input_ids, .* got \['output_attentions'\]"):
        model.inputs_of_call((tokens,), {"output_attentions": True, "output_hidden_states": False})


def test_the_encoder_decoder_example_computes_what_a_t5_does() -> None:
    example = load_example()
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
    with pytest.raises(RuntimeError, match=r"lightning_muon.forward_backward\(model, batch\)"):
        model.batch_of_call((x,), {})
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


def test_methods_say_how_a_module_is_cut() -> None:
    net = _Methods()
    model = find_staged_model(net)
    assert [part.name for part in model.parts] == ["first", "last"]
    a, b, target = torch.randn(3, 4, 2)
    inputs, targets = model.split({"a": a, "b": b, "target": target})
    assert targets is target
    output = model.run(model.parts, None, inputs)
    assert torch.equal(output, net.last(net.first(a, b)))
    total, count = model.loss(output, target)
    assert count == 8 and torch.equal(total, (output - target).square().sum())


def test_wrong_methods_are_named() -> None:
    net = _Methods()
    net.pipeline_parts = lambda: [net.first, net.first]
    with pytest.raises(ValueError, match="returns a module twice"):
        find_staged_model(net)
    net.pipeline_parts = lambda: [net.first, nn.Tanh()]
    with pytest.raises(ValueError, match="a Tanh that is no submodule"):
        find_staged_model(net)
    holder = _holder(net, pipeline_parts=lambda self: [self.net])
    with pytest.raises(ValueError, match=r"(?s)Holder has pipeline_parts, but no pipeline_loss:\n.*def pipeline_loss"):
        find_staged_model(holder)


@pytest.mark.parametrize(
    ("net", "what"),
    [
        (nn.Linear(2, 2), "a Linear is no language"),
        (nn.Sequential(nn.Linear(2, 2)), "a Sequential is no language"),  # Without a loss.
        (causal_lm("gemma2"), "the model_type 'gemma2' is no language"),
    ],
    ids=["a layer", "no loss", "unknown model_type"],
)
def test_an_unknown_model_is_told_which_methods_to_write(net: nn.Module | PreTrainedModel, what: str) -> None:
    with pytest.raises(ValueError, match=what) as error:
        find_staged_model(_holder(net))
    for name in ("pipeline_parts", "pipeline_step", "pipeline_loss"):
        assert f"def {name}(self" in str(error.value)
