"""Files that list parameters: those that come with the package."""

import math

import pytest
import torch
import transformers

from lightning_muon.params.routing import route_module
from lightning_muon.params.shapes import read_shapes, shipped_shapes

# Name -> number of matrices and of elements.
_PUBLISHED = {
    # Elements as the publishers count them, matrices by the layers of the configs.
    "10b": (40 * 4, 10_305_653_760),
    "llama3.2-1b": (16 * 7, 1_235_814_400),
    "llama3-8b": (32 * 7, 8_030_261_248),
    "llama3-70b": (80 * 7, 70_553_706_496),
    "t5-small": (12 * 6 + 6 * 4, 60_506_624),
    "t5-base": (2 * (12 * 6 + 12 * 2), 222_903_552),
    "deepseek-v3": (61 * 5 + 3 * 3 + 58 * (1 + 3 + 3 * 256), 671_026_404_352),
}


@pytest.mark.parametrize("name", shipped_shapes())
def test_shipped_files_have_the_sizes_of_the_published_models(name: str) -> None:
    model, (num_matrices, num_elements) = read_shapes(name), _PUBLISHED[name]
    stacks = {"stack": lambda shape: math.prod(shape[:-2]), "matrix": lambda shape: 1}
    counted = sum(stacks[p.kind](p.shape) for p in model.parameters if p.kind != "elementwise")
    assert counted == num_matrices
    assert sum(math.prod(p.shape) for p in model.parameters) == num_elements
    assert model.source.startswith("https://")


def test_shipped_t5_files_equal_the_routes_of_the_real_model() -> None:
    config = transformers.T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    routes = route_module(model)
    expected = [
        (route.name, tuple(parameter.shape), route.kind, route.reason)
        for route, parameter in zip(routes.values(), model.parameters(), strict=True)
    ]
    assert [(p.name, p.shape, p.kind, p.reason) for p in read_shapes("t5-small").parameters] == expected
