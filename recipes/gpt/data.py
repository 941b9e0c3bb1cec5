"""Text to windows of tokens: tokenized once into a file that all ranks of a node map into memory."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import datasets
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from recipes.t5_summarization.files import write_folder_atomically

TOKENIZER = "tokenizer"  # Beside the tokens.
DOCUMENTS_AT_ONCE = 100  # Of which text and tokens are in memory while they are written.


class Batch(TypedDict):
    """What the model gets; both tensors are (windows, context_size), int64. The model shifts the labels by one."""

    input_ids: Tensor
    labels: Tensor


class Windows(Dataset[Batch]):
    """Consecutive windows of ``context_size`` of the ``tokens`` of a file; what is left at the end is dropped."""

    def __init__(self, tokens: np.ndarray, context_size: int) -> None:
        self.tokens, self.context_size = tokens, context_size

    def __len__(self) -> int:
        return len(self.tokens) // self.context_size

    def __getitem__(self, index: int) -> Batch:
        window = self.tokens[index * self.context_size : (index + 1) * self.context_size]
        tokens = torch.from_numpy(window.astype(np.int64))
        return Batch(input_ids=tokens, labels=tokens)


def token_type(tokenizer: PreTrainedTokenizerBase) -> type[np.unsignedinteger]:
    """Two bytes for each token where they suffice."""
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def write_tokens(path: Path, texts: datasets.Dataset, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokens of all documents, each with the tokenizer's end-of-text token behind it if it has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    with path.open("wb") as file:
        for rows in texts.iter(batch_size=DOCUMENTS_AT_ONCE):
            if documents := [text for text in rows[column] if text]:
                for ids in tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]:
                    file.write(np.array(ids + end, token_type(tokenizer)).tobytes())
    if not path.stat().st_size:
        raise ValueError(f"the {path.name} text is empty: its {len(texts)} documents have no tokens")


class TextData(LightningDataModule):
    """Windows of tokens of text files, or of a data set of ``datasets.load_dataset``.

    Without ``text_files`` and ``dataset_name`` it is the source of Python's standard library, which every machine has.
    Documents are shuffled once, tokenized, and joined. The windows of an epoch are all those of the training part, each
    once, in an order that the sampler shuffles anew for each epoch.

    Args:
        text_files: Patterns such as ``"books/**/*.txt"``; each file is a document.
        validation_files: Patterns of the files that are held out, also where ``text_files`` matches them.
        dataset_name: A data set on the hub, or a folder with .jsonl, .txt, .csv or .parquet files.
        dataset_config: Its configuration, such as ``"wikitext-103-raw-v1"``.
        dataset_split: What is trained on.
        validation_split: The held-out split of the data set.
        text_column: Where the text of a document is.
        validation_share: Share of the tokens that is held out, the last ones, where nothing above names others.
        pretrained_tokenizer: A tokenizer on the hub or a folder. Without one a byte-level BPE is trained.
        vocab_size: Of the BPE, at most.
        bpe_documents: The BPE learns from so many documents at most, the first ones of the training part.
        context_size: Tokens of a window.
        batch_size: Windows per rank.
        num_workers: Of each DataLoader.
        seed: Of the order of documents.
        cache_dir: Where tokens and tokenizer are kept, in a folder for each choice of sources and tokenizer.
    """

    def __init__(
        self,
        *,
        text_files: Sequence[str] = (),
        validation_files: Sequence[str] = (),
        dataset_name: str = "",
        dataset_config: str | None = None,
        dataset_split: str = "train",
        validation_split: str = "",
        text_column: str = "text",
        validation_share: float = 0.05,
        pretrained_tokenizer: str = "",
        vocab_size: int = 4096,
        bpe_documents: int = 100_000,
        context_size: int = 256,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str = "~/.cache/lightning_muon",
    ) -> None:
        super().__init__()
        if dataset_name and (text_files or validation_files):
            raise ValueError(
                f"dataset_name={dataset_name!r} and text_files or validation_files are two sources; leave one out"
            )
        if validation_split and not dataset_name:
            raise ValueError(
                f"validation_split={validation_split!r} needs dataset_name; with files it is validation_files"
            )
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share must be in (0, 1), got {validation_share}")
        if context_size < 2:
            raise ValueError(f"context_size must be at least 2, a token and the next one, got {context_size}")
        self.save_hyperparameters()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.train: Windows | None = None
        self.validation: Windows | None = None
        # Of the rank that has prepared the data.
        self._folder: Path | None = None
        self._error = ""

    def _documents(self, files: list[str], split: str) -> datasets.Dataset:
        options = self.hparams
        if options.dataset_name:
            what = {"path": options.dataset_name, "name": options.dataset_config, "split": split}
        else:
            as_documents = {"sample_by": "document", "encoding_errors": "replace"}
            what = {"path": "text", "data_files": files, "split": "train", **as_documents}
        found = datasets.load_dataset(**what, cache_dir=str(Path(options.cache_dir).expanduser() / "datasets"))
        if options.text_column not in found.column_names:
            raise ValueError(f"text_column={options.text_column!r} is not one of the columns {found.column_names}")
        return found

    def _write(self) -> Path:
        """The folder of tokens and tokenizer, filled if it is not there yet."""
        options = self.hparams
        held_out = matching(options.validation_files)
        patterns = options.text_files or [f"{sysconfig.get_path('stdlib')}/*.py"]  # 5 MB of Python's library.
        files = [] if options.dataset_name else matching(patterns, besides=held_out)
        parts = {"train": self._documents(files, options.dataset_split)}
        if held_out or options.validation_split:
            parts["validation"] = self._documents(held_out, options.validation_split)
        given = options.pretrained_tokenizer
        tokenizer = AutoTokenizer.from_pretrained(given) if given else None
        # load_dataset's fingerprint changes with name, configuration, revision, and time and size of local files.
        sources = [options.text_column, options.seed, *(texts._fingerprint for texts in parts.values())]
        vocabulary = tokenizer.get_vocab() if tokenizer else [options.vocab_size, options.bpe_documents]
        if tokenizer is None and len(parts) == 1:
            vocabulary.append(options.validation_share)
        key = hashlib.sha256(json.dumps([sources, given, vocabulary], sort_keys=True).encode()).hexdigest()[:16]

        def write(folder: Path) -> None:
            texts = parts["train"].shuffle(seed=options.seed, keep_in_memory=True)
            # How many of the shuffled documents are trained on for sure, or 1.
            share = 1 if "validation" in parts else 1 - options.validation_share
            known = tokenizer or self._train_bpe(texts, max(1, int(share * len(texts))))
            known.save_pretrained(folder / TOKENIZER)
            write_tokens(folder / "train", texts, options.text_column, known)
            if "validation" in parts:
                write_tokens(folder / "validation", parts["validation"], options.text_column, known)

        folder = Path(options.cache_dir).expanduser() / f"gpt-{key}"
        if not folder.exists():
            write_folder_atomically(folder, write)
        return folder

    def _train_bpe(self, texts: datasets.Dataset, num_train: int) -> PreTrainedTokenizerBase:
        """Byte-level BPE as GPT-2's: any text can be encoded, and decodes to itself."""
        count = min(num_train, self.hparams.bpe_documents)
        documents = (row[self.hparams.text_column] or "" for row in texts.select(range(count)))
        return GPT2Tokenizer().train_new_from_iterator(documents, self.hparams.vocab_size, show_progress=False)

    def prepare_data(self) -> None:
        """Tokenize. Call it on the first rank of each node while the others wait, as Lightning does; it never raises.

        What goes wrong is raised by ``setup``, on all ranks: an error here would leave the others waiting.
        """
        try:
            self._folder = self._write()
        except Exception as error:
            causes: list[BaseException] = [error]
            while cause := causes[-1].__cause__:
                causes.append(cause)
            self._error = ", from ".join(f"{type(each).__name__}: {each}" for each in causes)

    def setup(self, stage: str) -> None:
        """Map the tokens into memory. Collective over all ranks, which raise together if one could not prepare."""
        if self.train:
            return
        folder = self._shared_folder()
        options = self.hparams
        self.tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
        tokens = np.memmap(folder / "train", dtype=token_type(self.tokenizer), mode="r")
        if (folder / "validation").exists():
            held_out = np.memmap(folder / "validation", dtype=token_type(self.tokenizer), mode="r")
        else:
            num_train = len(tokens) - round(options.validation_share * len(tokens))
            tokens, held_out = tokens[:num_train], tokens[num_train:]
        for part, found in {"training": tokens, "validation": held_out}.items():
            if len(found) < options.context_size:
                raise ValueError(
                    f"the {part} part has {len(found)} tokens, less than one window of context_size="
                    f"{options.context_size}; take more text, or another validation_share ({options.validation_share})"
                )
        self.train, self.validation = Windows(tokens, options.context_size), Windows(held_out, options.context_size)

    def _shared_folder(self) -> Path:
        """Where the first rank of this node has the tokens; the same number of them on all nodes."""
        found = [(self._folder, self._error, 0 if self._folder is None else num_bytes(self._folder))]
        rank = 0
        if dist.is_available() and dist.is_initialized():
            rank, mine = dist.get_rank(), found[0]
            found = [mine] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        if errors := [f"rank {number}: {error}" for number, (_, error, _) in enumerate(found) if error]:
            raise RuntimeError(f"the text could not be prepared; {'; '.join(errors)}")
        if found[0][0] is None:
            raise RuntimeError("setup before prepare_data: call prepare_data on the first rank of each node")
        if len(sizes := {size for folder, _, size in found if folder}) > 1:
            raise RuntimeError(f"nodes have text of different sizes, {sorted(sizes)} bytes of tokens; copy it again")
        # Ranks of a node follow each other, and the first one has prepared.
        return next(folder for folder, _, _ in reversed(found[: rank + 1]) if folder)

    def train_dataloader(self) -> DataLoader[Batch]:
        """All training windows in a shuffled order; Lightning and Accelerate give each rank windows of its own."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Held-out windows in their order."""
        return self._loader(self.validation, shuffle=False)

    def _loader(self, windows: Windows | None, *, shuffle: bool) -> DataLoader[Batch]:
        assert windows is not None
        options = self.hparams
        return DataLoader(windows, batch_size=options.batch_size, shuffle=shuffle, num_workers=options.num_workers)


def matching(patterns: Sequence[str], *, besides: Sequence[str] = ()) -> list[str]:
    """The files that match, each once, without those of ``besides``; ``FileNotFoundError`` if a pattern has none."""
    found: set[str] = set()
    for pattern in patterns:
        paths = {str(path.resolve()) for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()}
        if not paths - set(besides):
            raise FileNotFoundError(
                f"no file matches {pattern!r}, seen from {Path.cwd()}, beside {len(besides)} held out"
            )
        found |= paths - set(besides)
    return sorted(found)


def num_bytes(folder: Path) -> int:
    """Of the tokens."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
