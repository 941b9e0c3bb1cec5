"""The ViT on real PNG files of shapes, on two ranks."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image, ImageDraw
from torch.utils.data import default_collate
from transformers import AutoConfig, AutoImageProcessor, pipeline

from lightning_muon import MuonConfig, ParallelMuon
from recipes.t5_summarization.plot import read_metric
from recipes.vit.data import ImageData, to_tensor
from recipes.vit.model import ViTClassifier
from tests.support.programs import ROOT, run_program

RECIPE = ROOT / "recipes" / "vit"
LR = 3e-3
SHAPES = ("circle", "cross", "square")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def draw(shape: str, place: random.Random) -> Image.Image:
    """A shape of random size, place and colours, 16 x 16."""
    dark, light = (tuple(place.randint(low, low + 80) for _ in range(3)) for low in (0, 170))
    image = Image.new("RGB", (16, 16), dark)
    size = place.randint(7, 11)
    x, y = place.randint(1, 14 - size), place.randint(1, 14 - size)
    pen, box = ImageDraw.Draw(image), (x, y, x + size, y + size)
    if shape == "circle":
        pen.ellipse(box, outline=light, width=2)
    elif shape == "square":
        pen.rectangle(box, outline=light, width=2)
    else:
        pen.line(box, fill=light, width=2)
        pen.line((x, y + size, x + size, y), fill=light, width=2)
    return image


def write_shapes(folder: Path, parts: dict[str, int]) -> Path:
    place = random.Random(0)
    for part, count in parts.items():
        for shape in SHAPES:
            (folder / part / shape).mkdir(parents=True)
            for number in range(count):
                draw(shape, place).save(folder / part / shape / f"{number}.png")
    return folder


def one_process(data: ImageData) -> ViTClassifier:
    """Trained by three steps, each with all images."""
    torch.manual_seed(0)
    model = ViTClassifier(num_classes=3, architecture={"image_size": 16, "patch_size": 4} | SIZES)
    config = MuonConfig(compute_dtype="float32", muon_lr_factor=3.0, weight_decay=0.05)
    optimizer = ParallelMuon.from_config(model, config, lr=LR)
    batch = default_collate([data.train[number] for number in range(len(data.train))])
    for factor in (1.0, 1.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        logits = model.model(pixel_values=batch["pixel_values"]).logits
        torch.nn.functional.cross_entropy(logits, batch["labels"], label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_two_processes_on_muon_are_one_process(tmp_path: Path) -> None:
    folder, cache = write_shapes(tmp_path / "shapes", {"train": 4, "validation": 6}), str(tmp_path / "cache")
    options = {
        "trainer.max_epochs": "3",
        "trainer.enable_progress_bar": "false",
        "trainer.logger.init_args.save_dir": str(tmp_path),
        "trainer.strategy.init_args.optimizer": '{"compute_dtype": "float32", "wire_dtype": "float32"}',
        "trainer.strategy.init_args.save_distributed_checkpoint": "false",
        "trainer.callbacks.init_args.filename": "last",
        "model.init_args.num_classes": "3",
        "model.init_args.architecture": json.dumps({"image_size": 16, "patch_size": 4} | SIZES),
        "model.init_args.lr": str(LR),
        "data.init_args.source": str(folder),
        "data.init_args.image_size": "16",
        "data.init_args.least_crop": "1.0",
        "data.init_args.batch_size": "6",
        "data.init_args.cache_dir": cache,
    }
    words = ["--config", RECIPE / "vit.yaml", "--config", RECIPE / "digits.yaml"]
    words += [f"--{name}={value}" for name, value in options.items()]
    printed = run_program("-m", "lightning_muon", "fit", *words, directory=ROOT, num_ranks=2)
    assert "patch_embeddings.projection.weight         (32, 3, 4, 4)  Muon" in printed

    log = tmp_path / "vit_digits" / "version_0"
    trained = ViTClassifier.load_from_checkpoint(log / "checkpoints" / "last.ckpt")
    data = ImageData(source=str(folder), image_size=16, least_crop=1.0, flip=False, num_workers=0, cache_dir=cache)
    data.setup("fit")
    expected = one_process(data).state_dict()
    for name, weight in trained.state_dict().items():
        # Biases of keys cancel in the softmax: their gradients are rounding errors, which AdamW makes full steps of.
        if name.endswith("k_proj.bias"):
            continue
        # float32 sums in another order.
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    (batch,) = data.val_dataloader()
    with torch.no_grad():
        right = trained.eval().model(pixel_values=batch["pixel_values"]).logits.argmax(-1) == batch["labels"]
    _, accuracies = read_metric(log / "metrics.csv", "val_accuracy")
    assert len(accuracies) == 3 and accuracies[-1] == pytest.approx(right.float().mean().item(), abs=1e-6)

    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("AutoImageProcessor needs torchvision before transformers 5.18")
    trained.model.config = AutoConfig.from_pretrained(log)
    trained.model.save_pretrained(tmp_path / "model")
    AutoImageProcessor.from_pretrained(log).save_pretrained(tmp_path / "model")
    image = draw("cross", random.Random(1)).resize((24, 20))
    found = pipeline("image-classification", str(tmp_path / "model"))(image)
    with torch.no_grad():
        logits = trained.model(pixel_values=to_tensor(image.resize((16, 16)))[None]).logits[0]
    expected = dict(zip(SHAPES, logits.softmax(-1).tolist(), strict=True))
    assert {each["label"]: each["score"] for each in found} == pytest.approx(expected, rel=1e-4)
