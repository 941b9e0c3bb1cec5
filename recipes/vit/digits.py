"""Writes the 1,797 scanned digits of scikit-learn as a folder of images: ``python -m recipes.vit.digits [FOLDER]``.

They are 8 x 8 pixels. Of those in the order of the data every fifth is for validation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image


def write_digits(folder: Path) -> None:
    """``train/DIGIT/NUMBER.png`` and ``validation/DIGIT/NUMBER.png``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / ("train" if number % 5 else "validation") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) / 16 * 255).astype("uint8")).save(place / f"{number:04}.png")


if __name__ == "__main__":
    write_digits(Path(*sys.argv[1:2] or ["outputs/digits"]))
