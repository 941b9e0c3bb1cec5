"""Prompts and completions, tokenized on each rank and padded per batch; the loss counts the completions alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.t5_summarization.data import IGNORED_LABEL, Batch, Row, pad, split_rows

COLUMNS = ("prompt", "completion")


class Example(TypedDict):
    """One row: (tokens,) ids, and the same with -100 on the prompt."""

    input_ids: list[int]
    labels: list[int]


def load_rows(source: str) -> list[Row]:
    """Prompts and completions of a ``.jsonl`` file, or of the split ``train`` of a data set on the hub."""
    if Path(source).suffix == ".jsonl":
        table: Any = read_lines(Path(source))
    else:
        import datasets

        table = datasets.load_dataset(source, split="train")
    rows = list[Row]()
    for number, columns in enumerate(table):
        texts = [columns.get(name) for name in COLUMNS] if isinstance(columns, dict) else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(
                f"row {number} of {source} must have the texts {COLUMNS}, neither of them empty; it has {columns}"
            )
        rows.append(Row(*texts))
    return rows


def read_lines(path: Path) -> list[Any]:
    """The JSON value of each line; ``ValueError`` names the file and the number of a line that has none."""
    values = list[Any]()
    with path.open(encoding="utf-8") as file:  # Of str.splitlines, U+2028 within a text would be the end of a line.
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
    return values


def encode(row: Row, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Example:
    """Tokens of a row, the end token included.

    Of a row that is too long the beginning of the prompt is cut off, and the end of a completion that is too long for
    itself. One token of the prompt stays in any case, from which the first one of the completion is predicted.
    """
    prompt = tokenizer(row.source)["input_ids"]
    completion = [*tokenizer(row.target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    completion = completion[: max_tokens - 1]
    prompt = prompt[-(max_tokens - len(completion)) :]
    return Example(input_ids=[*prompt, *completion], labels=[*([IGNORED_LABEL] * len(prompt)), *completion])


def collate(examples: Sequence[Example], *, pad_id: int) -> Batch:
    """Pad to the longest row of the batch."""
    ids = [example["input_ids"] for example in examples]
    return Batch(
        input_ids=pad(ids, pad_id, None),
        attention_mask=pad([[1] * len(each) for each in ids], 0, None),
        labels=pad([example["labels"] for example in examples], IGNORED_LABEL, None),
    )


class PromptData(LightningDataModule):
    """Rows with the columns ``prompt`` and ``completion``.

    They are joined as they are: the completion begins with the space or the line break that separates the two, and a
    prompt for a chat model has its template applied already.

    Args:
        source: A ``.jsonl`` file, or a data set on the hub.
        tokenizer: Name on the hub, or folder; usually that of the model.
        validation_source: The same, to measure on; empty: ``validation_share`` of the rows of ``source``.
        validation_share: Share of the rows that is held out.
        max_tokens: Longer rows are cut, see :func:`encode`.
        batch_size: Rows per rank.
        num_workers: Of each DataLoader.
        seed: Of the split and the order.
    """

    def __init__(
        self,
        *,
        source: str,
        tokenizer: str,
        validation_source: str = "",
        validation_share: float = 0.05,
        max_tokens: int = 1024,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, got {max_tokens}")
        self.save_hyperparameters()
        self.tokenizer: Any = None
        self.train: list[Example] = []
        self.validation: list[Example] = []

    def prepare_data(self) -> None:
        """Download. Lightning calls it on one rank while the others wait."""
        with suppress(Exception):  # Setup raises the same on every rank; here the others would wait in vain.
            self._load()

    def _load(self) -> tuple[list[Row], list[Row]]:
        options = self.hparams
        self.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {options.tokenizer} has no end token, from which the model learns where a completion "
                "ends; set eos_token in its tokenizer_config.json"
            )
        train = load_rows(options.source)
        if options.validation_source:
            validation = load_rows(options.validation_source)
        else:
            train, validation = split_rows(train, validation_share=options.validation_share, seed=options.seed)
        if not train or not validation:
            raise ValueError(
                f"{options.source} leaves {len(train)} rows to train on and {len(validation)} to measure; both must be "
                "at least 1: set validation_source or validation_share"
            )
        return train, validation

    def setup(self, stage: str) -> None:
        """Read and tokenize, on every rank."""
        if not self.train:
            self.train, self.validation = (
                [encode(row, self.tokenizer, self.hparams.max_tokens) for row in rows] for rows in self._load()
            )

    @property
    def pad_id(self) -> int:
        """The token of padding. A mask hides it, so that any will do for tokenizers without one of their own."""
        own = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if own is None else own

    @property
    def highest_token(self) -> int:
        """Of all rows and of padding."""
        return max(self.pad_id, *(max(example["input_ids"]) for example in [*self.train, *self.validation]))

    def train_dataloader(self) -> DataLoader[Example]:
        """Shuffled; Lightning gives each rank rows of its own."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Example]:
        """In a fixed order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, examples: list[Example], *, shuffle: bool) -> DataLoader[Example]:
        return DataLoader(
            examples,  # type: ignore[arg-type]
            batch_size=self.hparams.batch_size,
            shuffle=shuffle,
            num_workers=self.hparams.num_workers,
            collate_fn=partial(collate, pad_id=self.pad_id),
        )
