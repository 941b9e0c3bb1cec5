"""Kinds of single layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_muon.params.layer_types import layer_kind
from lightning_muon.params.uses import parameter_uses


class Conv1D(nn.Module):
    """The linear layer of GPT-2 as transformers writes it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))


class RMSNormOverPlanes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))


class LayerNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))


class PatchEmbedding(nn.Linear):
    pass


class FSDPLinear(nn.Linear):
    """fully_shard swaps the class for a subclass like this one."""


class Raw(nn.Module):
    def __init__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_parameter(
            name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
        )


def _kinds(module: nn.Module) -> dict[str, str]:
    return {uses[0].name: layer_kind(uses[0])[0] for uses in parameter_uses(module)}


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Linear(3, 5), "matrix"),
        (nn.Linear(9, 1), "matrix"),
        (FSDPLinear(3, 5), "matrix"),
        (PatchEmbedding(3, 5), "matrix"),
        (Conv1D(5, 3), "matrix"),
        (nn.Conv1d(3, 5, 3), "convolution"),
        (nn.Conv2d(3, 5, 1), "convolution"),
        (nn.ConvTranspose3d(3, 5, 2), "convolution"),
        (nn.Bilinear(3, 4, 5), "stack"),
        (nn.Embedding(7, 3), "elementwise"),
        (nn.EmbeddingBag(7, 3), "elementwise"),
        (VocabParallelEmbedding(), "elementwise"),
        (nn.LayerNorm((4, 6)), "elementwise"),
        (RMSNormOverPlanes(), "elementwise"),
        (LayerNormLinear(), "matrix"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_the_weight_of_a_layer_has_the_kind_of_the_layer(layer: nn.Module, kind: str) -> None:
    kinds = _kinds(layer)
    assert kinds.pop("weight") == kind
    assert set(kinds.values()) <= {"elementwise"}


def test_recurrent_and_attention_weights_are_matrices_and_their_biases_are_not() -> None:
    for module in (nn.LSTM(3, 4, 2, proj_size=2), nn.GRUCell(3, 4), nn.MultiheadAttention(4, 2, kdim=3, vdim=5)):
        for name, parameter in module.named_parameters():
            assert _kinds(module)[name] == ("matrix" if parameter.ndim == 2 else "elementwise"), name


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("text_projection", (4, 6), "matrix"),
        ("token_mixer", (4, 6), "matrix"),
        ("posterior", (4, 6), "matrix"),
        ("pos_embed", (4, 6), "elementwise"),
        ("class_token", (4, 6), "elementwise"),
        ("relative_position_bias_table", (4, 6), "elementwise"),
        ("gate_up_proj_bias", (4, 6), "elementwise"),
        ("row", (1, 6), "elementwise"),
        ("column", (6, 1), "elementwise"),
        ("gate_up_proj", (3, 4, 6), "stack"),
        ("temperature", (3, 1, 1), "elementwise"),
        ("scales", (3, 4, 1), "elementwise"),
        ("anything", (1, 4, 6), "elementwise"),
        ("filters", (3, 4, 2, 2), "convolution"),
        ("scalar", (), "elementwise"),
        ("vector", (5,), "elementwise"),
    ],
)
def test_a_raw_parameter_is_judged_by_shape_and_name(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert _kinds(Raw(name, *shape)) == {name: kind}


def test_integers_are_never_matrices() -> None:
    assert _kinds(Raw("packed", 4, 6, dtype=torch.uint8)) == {"packed": "elementwise"}


def test_entries_of_a_parameter_list_are_named_by_the_list() -> None:
    module = nn.Module()
    module.pos_embeds = nn.ParameterList([torch.zeros(4, 6)])
    module.maps = nn.ParameterList([torch.zeros(4, 6)])
    assert _kinds(module) == {"pos_embeds.0": "elementwise", "maps.0": "matrix"}


def test_a_reparametrized_weight_keeps_the_kind_of_its_layer() -> None:
    normed = parametrizations.weight_norm(nn.Conv1d(4, 5, 3))
    assert _kinds(normed) == {
        "bias": "elementwise",
        "parametrizations.weight.original0": "elementwise",
        "parametrizations.weight.original1": "convolution",
    }
    assert _kinds(parametrizations.orthogonal(nn.Linear(4, 5, bias=False))) == {
        "parametrizations.weight.original": "matrix"
    }
