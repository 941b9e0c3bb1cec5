"""Images in a folder for each class, read by ``datasets``, cropped and flipped at random."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import datasets
import numpy
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

HELD_OUT = ("validation", "test")


class Batch(TypedDict):
    """What the model gets."""

    pixel_values: Tensor  # (images, 3, size, size), float32 from -1 to 1.
    labels: Tensor  # (images,), int64


def random_crop(image: Image.Image, size: int, *, least_area: float, flip: bool) -> Image.Image:
    """A random part of at least ``least_area`` of the image, resized, mirrored in half of the calls if ``flip``."""
    area, left, top, mirror = torch.rand(4).tolist()  # DataLoader gives each of its workers a seed for torch.
    scale = math.sqrt(least_area + area * (1 - least_area))
    width, height = scale * image.width, scale * image.height
    left, top = left * (image.width - width), top * (image.height - height)
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return ImageOps.mirror(image) if flip and mirror < 0.5 else image


def to_tensor(image: Image.Image) -> Tensor:
    """(3, rows, columns), from -1 to 1, as the published ViTs take it."""
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 127.5 - 1


def to_inputs(columns: dict[str, list[Any]], *, names: tuple[str, str], size: int, **crop: Any) -> dict[str, list[Any]]:
    """Rows of the data set as those of a batch; without ``crop`` whole images are resized."""
    images = [image.convert("RGB") for image in columns[names[0]]]
    images = [random_crop(each, size, **crop) if crop else each.resize((size, size)) for each in images]
    return {"pixel_values": [to_tensor(image) for image in images], "labels": columns[names[1]]}


def image_processor(size: int) -> ViTImageProcessor:
    """What transformers calls to make inputs of whole images, with the numbers of :func:`to_inputs`."""
    return ViTImageProcessor(
        size={"height": size, "width": size},
        resample=Image.Resampling.BICUBIC,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


class ImageData(LightningDataModule):
    """Images and their classes.

    Args:
        source: A folder, or a data set on the hub. A folder has ``train/CLASS/*.png`` and ``validation/CLASS/*.png``
            (or ``test``), or just ``CLASS/*.png``; .jpg and other formats of Pillow too.
        image_size: Width and height that all images are resized to.
        validation_share: Of each class, where the source has neither ``validation`` nor ``test``.
        least_crop: Share of the area of an image that a random crop has at least; 1 trains on whole images.
        flip: Mirror half of the images. Not for letters and digits.
        batch_size: Images per rank.
        num_workers: Of each DataLoader.
        cache_dir: Where ``datasets`` keeps its tables; empty: in its own cache.
    """

    def __init__(
        self,
        *,
        source: str,
        image_size: int = 224,
        validation_share: float = 0.1,
        least_crop: float = 0.35,
        flip: bool = True,
        batch_size: int = 128,
        num_workers: int = 8,
        cache_dir: str = "",
    ) -> None:
        super().__init__()
        if not 0 < least_crop <= 1:
            raise ValueError(f"least_crop must be in (0, 1], got {least_crop}")
        self.save_hyperparameters()
        self.classes: list[str] = []
        self.train: Any = None
        self.validation: Any = None

    def _load(self) -> Any:
        source, cache_dir = self.hparams.source, self.hparams.cache_dir or None
        if Path(source).is_dir():
            return datasets.load_dataset("imagefolder", data_dir=source, cache_dir=cache_dir)
        return datasets.load_dataset(source, cache_dir=cache_dir)

    def prepare_data(self) -> None:
        """Download, and list the files. Lightning calls it on one rank while the others wait."""
        with suppress(Exception):  # Setup raises the same on every rank; here the others would wait in vain.
            self._load()

    def setup(self, stage: str) -> None:
        """Open the tables, on every rank; images are read when they are needed."""
        if self.classes:
            return
        options, parts = self.hparams, self._load()
        kinds = parts["train"].features
        names = tuple(
            next((name for name, kind in kinds.items() if isinstance(kind, wanted)), "")
            for wanted in (datasets.Image, datasets.ClassLabel)
        )
        if not all(names):
            raise ValueError(f"{options.source} needs a column of images and one of classes; it has {dict(kinds)}")
        self.classes = kinds[names[1]].names
        held_out = next((name for name in HELD_OUT if name in parts), None)
        if held_out is None:
            counts = numpy.bincount(parts["train"][names[1]])
            if single := [self.classes[label] for label in numpy.flatnonzero(counts == 1)]:
                raise ValueError(
                    f"{options.source} has one image of each of the classes {single}, and none to hold out: add "
                    "others, or put images to measure on into validation/CLASS, and those to train on into train/CLASS"
                )
            split = {"test_size": options.validation_share, "seed": 0, "stratify_by_column": names[1]}
            parts, held_out = parts["train"].train_test_split(**split), "test"
        convert = partial(to_inputs, names=names, size=options.image_size)
        crop = partial(convert, least_area=options.least_crop, flip=options.flip)
        self.train = parts["train"].with_transform(crop)
        self.validation = parts[held_out].with_transform(convert)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled; Lightning gives each rank images of its own."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """In a fixed order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, dataset: Any, *, shuffle: bool) -> DataLoader[Batch]:
        options = self.hparams
        return DataLoader(
            dataset,
            batch_size=options.batch_size,
            shuffle=shuffle,
            num_workers=options.num_workers,
            persistent_workers=options.num_workers > 0,
        )
