"""Sentences whose vowels are hidden: the summary lines of docstrings of packages that are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.t5_summarization.docstrings import Pair, in_validation, load_pairs

VOWELS = "aeiou"
HIDDEN = "_"
IGNORED_LABEL = -100  # torch's default ignore_index
VOCABULARY = 128  # ASCII
# Installed with the recipes, in the versions of constraints.txt: the same sentences on every machine.
PACKAGES = ("matplotlib", "networkx", "numpy", "pandas", "sympy", "torch", "transformers")


class Batch(TypedDict):
    """What the model gets; all tensors are (sentences, characters), int64."""

    characters: Tensor  # ASCII codes, vowels replaced by "_", 0 behind the end.
    vowels: Tensor  # Index in VOWELS where one is hidden, -100 elsewhere.


def hide(sentence: str) -> str:
    """``"Returns"`` -> ``"R_t_rns"``."""
    return "".join(HIDDEN if letter in VOWELS else letter for letter in sentence)


def sentence_of(characters: Tensor, vowels: Tensor) -> str:
    """The text of one row of a batch, with ``vowels`` in the places of the hidden letters; both (characters,)."""
    letters = [chr(code) for code in characters.tolist() if code]
    pairs = zip(letters, vowels.tolist(), strict=False)
    return "".join(VOWELS[vowel] if letter == HIDDEN else letter for letter, vowel in pairs)


def collate(sentences: Sequence[str]) -> Batch:
    """Pad to the longest sentence."""
    shape = len(sentences), max(map(len, sentences))
    characters = torch.zeros(shape, dtype=torch.int64)
    vowels = torch.full(shape, IGNORED_LABEL)
    for row, sentence in enumerate(sentences):
        characters[row, : len(sentence)] = torch.tensor([ord(letter) for letter in hide(sentence)])
        vowels[row, : len(sentence)] = torch.tensor([VOWELS.find(letter) for letter in sentence])
    return Batch(characters=characters, vowels=vowels.where(vowels >= 0, IGNORED_LABEL))


def folders_of(packages: Sequence[str]) -> list[Path]:
    """Folders of the packages that are installed.

    Raises:
        ValueError: None of them is.
    """
    specs = (find_spec(package) for package in packages)
    found = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
    if not found:
        raise ValueError(f"packages: none of {', '.join(packages)} is installed")
    return found


class VowelData(LightningDataModule):
    """Sentences of 24 to ``max_characters`` characters.

    Args:
        max_characters: Longer ones are left out.
        train_rows: At most so many sentences to learn from.
        validation_rows: Sentences that are only measured, from files of which nothing is trained on.
        batch_size: Sentences per rank.
        cache_dir: Where the harvested docstrings are kept.
        packages: Where the docstrings are taken from; a package that is not installed has none.
    """

    def __init__(
        self,
        *,
        max_characters: int = 72,
        train_rows: int = 24_000,
        validation_rows: int = 512,
        batch_size: int = 16,
        cache_dir: str = "~/.cache/lightning_muon",
        packages: Sequence[str] = PACKAGES,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.train: list[str] = []
        self.validation: list[str] = []

    def prepare_data(self) -> None:
        """Harvest. Lightning calls it on one rank while the others wait."""
        self._load_pairs()

    def setup(self, stage: str) -> None:
        """Read the cache, on every rank."""
        options = self.hparams
        train: set[str] = set()
        validation: set[str] = set()
        for pair in self._load_pairs():
            if 24 <= len(pair.target) <= options.max_characters and HIDDEN not in pair.target:
                (validation if in_validation(pair.module, 0.1, 0) else train).add(pair.target)
        shuffled = torch.Generator().manual_seed(0)
        self.train, self.validation = (
            [rows[place] for place in torch.randperm(len(rows), generator=shuffled)[:count].tolist()]
            for rows, count in (
                (sorted(train), options.train_rows),
                (sorted(validation - train), options.validation_rows),
            )
        )

    def _load_pairs(self) -> list[Pair]:
        return load_pairs(Path(self.hparams.cache_dir).expanduser(), folders_of(self.hparams.packages))

    def train_dataloader(self) -> DataLoader[str]:
        """Shuffled; Lightning gives each rank rows of its own."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[str]:
        """In a fixed order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, rows: list[str], *, shuffle: bool) -> DataLoader[str]:
        return DataLoader(rows, batch_size=self.hparams.batch_size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]
