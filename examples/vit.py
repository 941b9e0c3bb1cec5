"""A ViT from random weights on a folder of images, in a Trainer; ends as a folder for pipeline("image-classification").

    python examples/vit.py                         # circles, crosses and squares that it draws, on 2 CPU processes
    python examples/vit.py --strategy ddp          # the same with AdamW
    python examples/vit.py --source FOLDER --image-size 224 --patch-size 16 --width 384 --layers 12 --heads 6 \
        --epochs 90 --batch-size 128 --accelerator gpu --devices 8 --precision bf16-mixed

FOLDER has train/CLASS/*.jpg and validation/CLASS/*.jpg (.png and other formats of Pillow, too), or is a data set on the
hub with a column "image" and a column "label". In the script there is nothing of Muon but the name of the strategy.
"""

import argparse
import math
import random
from functools import partial
from pathlib import Path

import datasets
import lightning as L
import numpy
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, get_cosine_schedule_with_warmup

from lightning_muon import full_state_dict  # the import registers the strategies, too

SHAPES = ("circle", "cross", "square")
SHAPES_FOLDER = Path("outputs/shapes")


def draw(shape, place):
    """A shape of random size, place and colours, 16 x 16."""
    dark, light = (tuple(place.randint(low, low + 80) for _ in range(3)) for low in (0, 170))
    image, size = Image.new("RGB", (16, 16), dark), place.randint(7, 11)
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


def write_shapes(folder):
    place = random.Random(0)
    for part, count in {"train": 200, "validation": 50}.items():
        for shape in SHAPES:
            (folder / part / shape).mkdir(parents=True)
            for number in range(count):
                draw(shape, place).save(folder / part / shape / f"{number}.png")


def to_tensor(image):
    """(3, rows, columns), from -1 to 1, as the published ViTs take it."""
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 127.5 - 1


def to_inputs(columns, *, size, least_area):
    """Of each image a random part of at least ``least_area``, resized and sometimes mirrored; with 1 all of it."""
    tensors = []
    for image in (image.convert("RGB") for image in columns["image"]):
        area, left, top, mirror = torch.rand(4).tolist()  # DataLoader gives each of its workers a seed for torch.
        scale = math.sqrt(least_area + area * (1 - least_area))
        width, height = scale * image.width, scale * image.height
        left, top = left * (image.width - width), top * (image.height - height)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        tensors.append(to_tensor(ImageOps.mirror(image) if least_area < 1 and mirror < 0.5 else image))
    return {"pixel_values": tensors, "labels": columns["label"]}


class Images(L.LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def prepare_data(self):
        """On one process, while the others wait."""
        if not self.args.source and not SHAPES_FOLDER.is_dir():
            write_shapes(SHAPES_FOLDER)
        self._load()

    def _load(self):
        source = Path(self.args.source or SHAPES_FOLDER)
        options = {"path": "imagefolder", "data_dir": source} if source.is_dir() else {"path": str(source)}
        return datasets.load_dataset(**options, cache_dir=self.args.cache)

    def setup(self, stage):
        parts = self._load()
        self.classes = parts["train"].features["label"].names
        convert = partial(to_inputs, size=self.args.image_size)
        self.training = parts["train"].with_transform(partial(convert, least_area=self.args.least_area))
        self.validation = parts["validation"].with_transform(partial(convert, least_area=1.0))

    def _loader(self, images, **options):
        return DataLoader(images, self.args.batch_size, num_workers=self.args.num_workers, **options)

    def train_dataloader(self):
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self):
        return self._loader(self.validation)


class Classifier(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def setup(self, stage):
        """The model, once the classes are known."""
        args, classes = self.args, self.trainer.datamodule.classes
        sizes = {"image_size": args.image_size, "patch_size": args.patch_size, "num_hidden_layers": args.layers}
        sizes |= {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_attention_heads": args.heads}
        names = {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}
        self.model = ViTForImageClassification(ViTConfig(**sizes, **names))

    def training_step(self, batch):
        logits = self.model(pixel_values=batch["pixel_values"]).logits
        return F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)

    def validation_step(self, batch):
        labels, logits = batch["labels"], self.model(pixel_values=batch["pixel_values"]).logits
        right = (logits.argmax(-1) == labels).float().mean()
        scores = {"loss": F.cross_entropy(logits, labels), "accuracy": right}
        self.log_dict(scores, batch_size=len(labels), sync_dist=True)

    def on_validation_epoch_end(self):
        loss, accuracy = (float(self.trainer.callback_metrics[name]) for name in ("loss", "accuracy"))
        self.print(f"step {self.global_step}: validation loss {loss:.3f}, accuracy {accuracy:.3f}")

    def on_train_end(self):
        """Weights, names of the classes, and how images become inputs, for ``from_pretrained``."""
        weights = full_state_dict(self.model)  # on every rank
        if self.trainer.is_global_zero:
            self.model.save_pretrained(self.args.output, state_dict=weights)
            size = {"height": self.args.image_size, "width": self.args.image_size}
            processor = ViTImageProcessor(
                size=size, resample=Image.Resampling.BICUBIC, image_mean=[0.5] * 3, image_std=[0.5] * 3
            )
            processor.save_pretrained(self.args.output)
        self.trainer.strategy.barrier()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.args.lr, weight_decay=0.05)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, max(1, total // 20), total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="", help="folder, or a data set on the hub")
    sizes = {"image-size": 16, "patch-size": 4, "width": 64, "layers": 4, "heads": 4, "batch-size": 16, "epochs": 12}
    for name, value in (sizes | {"num-workers": 0, "devices": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--least-area", type=float, default=0.5, help="of a random crop; 1: whole images")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strategy", default="parallel_muon")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--cache", help="folder for the tables of datasets")
    parser.add_argument("--output", type=Path, default=Path("outputs/vit"))
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(args), datamodule=Images(args))


if __name__ == "__main__":
    main()
