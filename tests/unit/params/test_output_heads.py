"""Output heads."""

from __future__ import annotations

from torch import nn

from lightning_muon.params.output_heads import find_output_heads


class FocalLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Linear(4, 4)


def test_what_get_output_embeddings_returns_is_the_head() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9)
            self.body = nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    wrapper = nn.Module()
    wrapper.model = Model()
    heads = find_output_heads(wrapper)
    assert list(heads.known) == [id(wrapper.model.head.weight)]
    assert heads.guessed is None


def test_a_getter_that_raises_is_passed_over() -> None:
    class Model(nn.Linear):
        def get_output_embeddings(self) -> nn.Module:
            raise RuntimeError("this model has no head")

    model = Model(4, 9)
    assert find_output_heads(model).guessed == id(model.weight)


def test_a_linear_of_the_size_of_an_embedding_is_a_head_only_outside_of_blocks() -> None:
    block = nn.ModuleDict({"up": nn.Linear(4, 9), "down": nn.Linear(9, 4)})
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(9, 4),
            "head": nn.Linear(4, 9),
            "blocks": nn.ModuleList([block]),
            "last": nn.Linear(4, 4),
        }
    )
    assert list(find_output_heads(model).known) == [id(model["head"].weight)]


def test_a_square_table_makes_no_square_layer_a_head() -> None:
    model = nn.ModuleDict({"positions": nn.Embedding(4, 4), "mix": nn.Linear(4, 4), "last": nn.Linear(4, 2)})
    heads = find_output_heads(model)
    assert not heads.known
    assert heads.guessed == id(model["last"].weight)


def test_losses_after_the_network_do_not_hide_its_last_layer() -> None:
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 4), "last": nn.Linear(4, 2), "loss": FocalLoss(), "ce": nn.CrossEntropyLoss()}
    )
    assert find_output_heads(model).guessed == id(model["last"].weight)


def test_no_head_is_guessed_if_the_last_layer_is_not_linear_or_repeated() -> None:
    assert find_output_heads(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))).guessed is None
    assert find_output_heads(nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])).guessed is None
