"""Tokenizers for T5: a small BPE trained on the data itself, ByT5's bytes, or one from the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.t5_summarization.files import write_folder_atomically
from recipes.t5_summarization.sources import Row

# T5's own ids: 0, 1, 2.
_PAD, _END, _UNKNOWN = "<pad>", "</s>", "<unk>"


def train_bpe(rows: Sequence[Row], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that appends ``</s>``; any text can be encoded, and decodes to itself.

    Args:
        rows: Training rows; sources and targets share the vocabulary.
        vocab_size: Upper bound; a small text yields fewer tokens.
    """
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
    """The tokenizer of that name; ``"bpe"`` is trained at the first call and cached for later ones.

    Args:
        name: ``"bpe"``, ``"byt5"`` (needs no files) or a tokenizer on the hub such as ``"t5-base"``.
        rows: Training rows, for ``"bpe"``.
        vocab_size: For ``"bpe"``.
        cache_dir: For ``"bpe"``.
    """
    if name == "byt5":
        return ByT5Tokenizer()
    if name != "bpe":
        return AutoTokenizer.from_pretrained(name)
    digest = hashlib.sha256(json.dumps([vocab_size, *rows]).encode()).hexdigest()[:16]
    folder = cache_dir / f"bpe-{vocab_size}-{digest}"
    if not folder.exists():
        write_folder_atomically(folder, train_bpe(rows, vocab_size).save_pretrained)
    return PreTrainedTokenizerFast.from_pretrained(folder)
