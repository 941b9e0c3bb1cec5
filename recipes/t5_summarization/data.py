"""Rows of (source, target) text, and the data module of the recipe, which tokenizes them once per rank.

They are docstrings of this machine, or two columns of a file or of a data set on the hub.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from lightning.pytorch import LightningDataModule
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.t5_summarization.docstrings import Pair, in_validation, load_pairs
from recipes.t5_summarization.files import write_folder_atomically

if TYPE_CHECKING:
    import pandas

DOCSTRINGS = "docstrings"
IGNORED_LABEL = -100  # torch's default ignore_index
# T5's own ids: 0, 1, 2.
_PAD, _END, _UNKNOWN = "<pad>", "</s>", "<unk>"


class Row(NamedTuple):
    """One example."""

    source: str  # What the encoder reads.
    target: str  # What the decoder writes; empty for a text to be summarized that has none.


class Split(NamedTuple):
    """The rows to learn from, and those that are only measured."""

    train: list[Row]
    validation: list[Row]

    def first(self, train_rows: int, validation_rows: int) -> Split:
        """The same split with at most so many rows in each part."""
        return Split(self.train[:train_rows], self.validation[:validation_rows])


def load_rows(
    location: str,
    validation: str | None,
    *,
    columns: tuple[str, str],
    cache_dir: Path,
    validation_share: float,
    seed: int,
) -> Split:
    """Read, split and shuffle all rows of one source; the same arguments give the same rows in the same order.

    See :class:`SummarizationData`. ``validation`` keeps its own order; without it a
    ``validation_share`` of the rows, or of the files of docstrings, is held out.
    """
    if location == DOCSTRINGS:
        if validation is not None:
            raise ValueError(f"docstrings are split by file; leave out validation_source, got {validation!r}")
        return split_docstrings(load_pairs(cache_dir), validation_share=validation_share, seed=seed)
    rows = rows_of(read_table(location), *columns)
    if validation is None:
        return split_rows(rows, validation_share=validation_share, seed=seed)
    return Split(split_rows(rows, validation_share=0.0, seed=seed).train, rows_of(read_table(validation), *columns))


def rows_to_predict(location: str, columns: tuple[str, str]) -> list[Row]:
    """All rows of a file or data set in its order, also those without text; it need not have the target's column."""
    frame, (source, target) = read_table(location), columns
    if target not in frame.columns:
        frame = frame.assign(**{target: ""})
    return rows_of(frame.fillna({source: "", target: ""}), source, target, keep_blank=True)


def split_docstrings(pairs: Sequence[Pair], *, validation_share: float, seed: int) -> Split:
    """Split by module, so that no file is in both parts, then shuffle."""
    split = Split([], [])
    for pair in pairs:
        part = split.validation if in_validation(pair.module, validation_share, seed) else split.train
        part.append(Row(pair.source, pair.target))
    for rows in split:
        random.Random(seed).shuffle(rows)
    return split


def split_rows(rows: Sequence[Row], *, validation_share: float, seed: int) -> Split:
    """Shuffle, then cut; the validation part has ``round(validation_share * len(rows))`` rows."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    num_train = len(shuffled) - round(validation_share * len(shuffled))
    return Split(shuffled[:num_train], shuffled[num_train:])


def rows_of(frame: pandas.DataFrame, source: str, target: str, *, keep_blank: bool = False) -> list[Row]:
    """The rows of two columns in which neither text is null or blank; with ``keep_blank`` all of them."""
    missing = [column for column in (source, target) if column not in frame.columns]
    if missing:
        raise ValueError(
            f"the data has the columns {list(frame.columns)}, but not {missing}; set source_column, target_column or "
            "the file"
        )
    texts = frame[[source, target]].dropna()
    rows = [Row(*row) for row in texts.itertuples(index=False, name=None)]
    return [row for row in rows if keep_blank or (row.source.strip() and row.target.strip())]


def read_table(location: str) -> pandas.DataFrame:
    """A ``.csv`` file, or the split ``train`` of a data set on the hub, downloaded once into the hub's own cache."""
    if location.endswith(".csv"):
        import pandas  # optional extra of the recipe

        # Only an empty field is a null: "None" and "NA" are words.
        return pandas.read_csv(location, dtype=str, keep_default_na=False, na_values=[""])
    import datasets  # optional extra of the recipe

    return datasets.load_dataset(location, split="train").to_pandas()


class Example(TypedDict):
    """Token ids of one row, ``</s>`` included, without padding."""

    source: list[int]
    target: list[int]


class Batch(TypedDict):
    """What the model gets; all tensors are (rows, tokens), int64."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def train_bpe(rows: Sequence[Row], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that appends ``</s>``, of at most ``vocab_size`` tokens; any text decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _END, _UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in row), trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, tokenizer.token_to_id(_END))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN)


def load_tokenizer(name: str, rows: Sequence[Row], *, vocab_size: int, cache_dir: Path) -> PreTrainedTokenizerBase:
    """``"bpe"``, trained on the rows once and cached, ``"byt5"``, which needs no files, or one of the hub."""
    if name == "byt5":
        return ByT5Tokenizer()
    if name != "bpe":
        return AutoTokenizer.from_pretrained(name)
    digest = hashlib.sha256(json.dumps([vocab_size, *rows]).encode()).hexdigest()[:16]
    folder = cache_dir / f"bpe-{vocab_size}-{digest}"
    if not folder.exists():
        write_folder_atomically(folder, train_bpe(rows, vocab_size).save_pretrained)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_tokens: int,
    max_target_tokens: int,
    prefix: str = "",
) -> list[Example]:
    """Token ids of all rows, the sources behind ``prefix``, cut to the given lengths with ``</s>`` kept."""
    if not rows:
        return []
    sources = tokenizer([prefix + row.source for row in rows], truncation=True, max_length=max_source_tokens)[
        "input_ids"
    ]
    targets = tokenizer([row.target for row in rows], truncation=True, max_length=max_target_tokens)["input_ids"]
    return [Example(source=source, target=target) for source, target in zip(sources, targets, strict=True)]


def pad(sequences: Sequence[list[int]], value: int, length: int | None) -> Tensor:
    """A (rows, length) tensor, filled up on the right; ``length=None`` takes the longest sequence."""
    padded = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True, padding_value=value)
    missing = 0 if length is None else length - padded.shape[1]
    return torch.nn.functional.pad(padded, (0, missing), value=value)


def collate(examples: Sequence[Example], *, pad_id: int, lengths: tuple[int | None, int | None]) -> Batch:
    """Pad a batch to ``lengths`` (source, target), or the longest; labels with -100, which the loss leaves out."""
    sources = [example["source"] for example in examples]
    return Batch(
        input_ids=pad(sources, pad_id, lengths[0]),
        attention_mask=pad([[1] * len(ids) for ids in sources], 0, lengths[0]),
        labels=pad([example["target"] for example in examples], IGNORED_LABEL, lengths[1]),
    )


def collate_numbered(
    examples: Sequence[tuple[int, Example]], *, collate_fn: Callable[[Sequence[Example]], Batch]
) -> tuple[list[int], Batch]:
    """A batch and the number of each of its rows."""
    return [number for number, _ in examples], collate_fn([example for _, example in examples])


class SummarizationData(LightningDataModule):
    """Source -> target rows for a T5 model.

    Args:
        source: ``"docstrings"`` (needs no network), a ``.csv`` file, or a data set on the Hugging Face hub, e.g.
            ``"gursi26/wikihow-cleaned"``.
        validation_source: Another one to validate on; without it ``validation_share`` of ``source`` is held out.
        predict_source: Another one for ``predict``, which need not have the target's column; without it the validation
            rows. With a ``tokenizer`` that is there already nothing else is read.
        source_column: What the encoder reads. Docstrings ignore it, and the next one.
        target_column: What the decoder writes.
        source_prefix: Put in front of each source. None asks the model: ``"summarize: "`` for weights of the hub that
            have learned it, nothing otherwise.
        tokenizer: ``"bpe"`` (trained on the training rows), ``"byt5"``, or a tokenizer on the hub or in a folder.
        vocab_size: Of the BPE.
        max_source_tokens: Longer sources are cut.
        max_target_tokens: Longer targets are cut.
        train_rows: Use the first rows of the shuffled training part.
        validation_rows: Use the first rows of the shuffled validation part. A multiple of the number of ranks, or the
            sampler counts some rows twice.
        batch_size: Rows per rank.
        validation_share: Share of the rows (of the files, for docstrings) that is held out.
        pad_to_max_length: Pad to the maximal lengths, as ``paper_loss`` needs, not to the longest row of the batch.
        num_workers: Of each DataLoader.
        seed: Of the split and the order.
        cache_dir: Harvested docstrings and trained tokenizers.
    """

    def __init__(
        self,
        *,
        source: str = DOCSTRINGS,
        validation_source: str | None = None,
        predict_source: str | None = None,
        source_column: str = "text",
        target_column: str = "title",
        source_prefix: str | None = None,
        tokenizer: str = "bpe",
        vocab_size: int = 4096,
        max_source_tokens: int = 512,
        max_target_tokens: int = 150,
        train_rows: int = 15_000,
        validation_rows: int = 3_000,
        batch_size: int = 32,
        validation_share: float = 0.2,
        pad_to_max_length: bool = False,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str = "~/.cache/lightning_muon",
    ) -> None:
        super().__init__()
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share must be in (0, 1), got {validation_share}")
        self.save_hyperparameters()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.rows = Split([], [])
        self.train: list[Example] = []
        self.validation: list[Example] = []
        self.rows_to_predict: list[Row] = []

    @property
    def _columns(self) -> tuple[str, str]:
        return self.hparams.source_column, self.hparams.target_column

    def _load(self) -> tuple[Split, PreTrainedTokenizerBase]:
        options, cache_dir = self.hparams, Path(self.hparams.cache_dir).expanduser()
        stage = self.trainer.state.fn if self.trainer else "fit"
        if stage == "predict" and options.predict_source and options.tokenizer != "bpe":
            return Split([], []), load_tokenizer(options.tokenizer, [], vocab_size=0, cache_dir=cache_dir)
        rows = load_rows(
            options.source,
            options.validation_source,
            columns=self._columns,
            cache_dir=cache_dir,
            validation_share=options.validation_share,
            seed=options.seed,
        ).first(options.train_rows, options.validation_rows)
        if not rows.train or not rows.validation:
            raise ValueError(
                f"{options.source!r} has {len(rows.train)} training and {len(rows.validation)} validation rows after "
                "dropping nulls; both must be at least 1"
            )
        return rows, load_tokenizer(options.tokenizer, rows.train, vocab_size=options.vocab_size, cache_dir=cache_dir)

    def prepare_data(self) -> None:
        """Harvest or download, and train the tokenizer. Lightning calls it on one rank while the others wait."""
        with suppress(ValueError, OSError):  # Setup raises the same on every rank; here the others would wait in vain.
            self._load()

    def setup(self, stage: str) -> None:
        """Read the caches and tokenize, on every rank."""
        if self.tokenizer is None or (stage != "predict" and not self.train):
            self.rows, self.tokenizer = self._load()
            self.train, self.validation = self._encode(self.rows.train), self._encode(self.rows.validation)
        if stage == "predict":
            location = self.hparams.predict_source
            self.rows_to_predict = rows_to_predict(location, self._columns) if location else self.rows.validation

    def _encode(self, rows: Sequence[Row]) -> list[Example]:
        prefix = self.hparams.source_prefix
        if prefix is None:
            prefix = getattr(self.trainer and self.trainer.lightning_module, "source_prefix", "")
        lengths = {name: self.hparams[name] for name in ("max_source_tokens", "max_target_tokens")}
        return encode(rows, self.tokenizer, prefix=prefix, **lengths)

    def _loader(self, examples: Sequence[Any], **options: Any) -> DataLoader[Any]:
        size, num_workers = self.hparams.batch_size, self.hparams.num_workers
        return DataLoader(
            examples,  # type: ignore[arg-type]
            **({"batch_size": size, "num_workers": num_workers, "collate_fn": self._collate()} | options),
        )

    def _collate(self) -> Callable[[Sequence[Example]], Batch]:
        options = self.hparams
        lengths = (options.max_source_tokens, options.max_target_tokens) if options.pad_to_max_length else (None, None)
        return partial(collate, pad_id=self.tokenizer.pad_token_id, lengths=lengths)

    def train_dataloader(self) -> DataLoader[Example]:
        """Shuffled training rows."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Example]:
        """Validation rows in their fixed order."""
        return self._loader(self.validation)

    def predict_dataloader(self) -> DataLoader[tuple[list[int], Batch]]:
        """Rows to predict with their numbers. All ranks have as many batches, the last of them with rows of others."""
        examples = list(enumerate(self._encode(self.rows_to_predict)))
        ranks = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        sampler = DistributedSampler(examples, shuffle=False, **ranks) if ranks else None  # type: ignore[arg-type]
        return self._loader(examples, sampler=sampler, collate_fn=partial(collate_numbered, collate_fn=self._collate()))
