"""The ViT of examples/vit.py on real PNG files of shapes, on two ranks."""

import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from examples.vit import SHAPES, draw, to_tensor
from tests.support.programs import ROOT, run_program


def test_the_vit_learns_shapes_and_becomes_a_pipeline(tmp_path: Path) -> None:
    printed = run_program(ROOT / "examples" / "vit.py", "--epochs=3", "--cache=cache", directory=tmp_path, num_ranks=2)
    assert "patch_embeddings.projection.weight" in printed and "(64, 3, 4, 4)" in printed
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+),", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0]  # The first one is that of the untrained model.
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("AutoImageProcessor needs torchvision before transformers 5.18")
    folder = tmp_path / "outputs" / "vit"
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    image = draw("cross", random.Random(1)).resize((24, 20))
    inputs = to_tensor(image.resize((16, 16)))[None]
    torch.testing.assert_close(processor(image, return_tensors="pt")["pixel_values"], inputs)
    with torch.no_grad():
        expected = dict(zip(SHAPES, model(pixel_values=inputs).logits[0].softmax(-1).tolist(), strict=True))
    found = pipeline("image-classification", str(folder))(image)
    assert {each["label"]: each["score"] for each in found} == pytest.approx(expected, rel=1e-4)
