from __future__ import annotations

import pytest
import torch

from recipes.t5_summarization.data import Batch
from recipes.t5_summarization.model import T5Summarizer, build_t5, warmup_then_linear_decay

TINY = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 50, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, 4:] = -100
    source = torch.randint(3, 50, (3, 7), generator=generator)
    return Batch(input_ids=source, attention_mask=torch.ones_like(source), labels=labels)


def logits_of(model: T5Summarizer, batch: Batch) -> torch.Tensor:
    # What the decoder reads: the labels shifted right, with the pad token 0 first and in place of -100.
    decoder_input = torch.zeros_like(batch["labels"])
    decoder_input[:, 1:] = batch["labels"][:, :-1].clamp(min=0)
    return model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=decoder_input
    ).logits


@pytest.mark.parametrize(("paper_loss", "num_tokens"), [(False, 11), (True, 15)])
def test_the_loss_is_the_mean_over_tokens(paper_loss: bool, num_tokens: int) -> None:
    """Without padding, or as in the paper with padding as labels."""
    torch.manual_seed(0)
    model, batch = T5Summarizer(architecture=TINY, paper_loss=paper_loss), make_batch()
    loss, num_positions = model._loss(batch)
    log_probability, labels = logits_of(model, batch).log_softmax(-1), batch["labels"]
    tokens = [(r, c) for r in range(3) for c in range(5) if paper_loss or labels[r, c] != -100]
    expected = -sum(log_probability[r, c, labels[r, c].clamp(min=0)] for r, c in tokens) / len(tokens)
    assert num_positions == len(tokens) == num_tokens
    # Same numbers summed in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    factors = [warmup_then_linear_decay(step, warmup_steps=4, total_steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (factors[8], factors[12]) == (0.5, 0.0)


@pytest.mark.parametrize(("name", "num_parameters"), [("t5-small", 60_506_624), ("t5-base", 222_903_552)])
def test_named_architectures_have_the_published_sizes(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = build_t5(name, pretrained=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"one of \['t5-base', 't5-small'\] or a mapping, got 't5-huge'"):
        build_t5("t5-huge", pretrained=False)
