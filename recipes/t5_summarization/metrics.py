"""Numbers of the report: unigram entropy and ROUGE."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")


def unigram_entropy(train: Iterable[Sequence[int]], validation: Iterable[Sequence[int]], vocab_size: int) -> float:
    """Nats per token of validation under the token frequencies of training, each count plus one.

    The loss of the best model that ignores both the source and the order of the tokens.

    Args:
        train: Token ids of the training targets.
        validation: Token ids of the validation targets, the same tokens that the validation loss counts.
        vocab_size: Number of ids.
    """
    counts = Counter(token for ids in train for token in ids)
    total = sum(counts.values()) + vocab_size
    tokens = [token for ids in validation for token in ids]
    return sum(math.log(total / (counts[token] + 1)) for token in tokens) / len(tokens)


@lru_cache(maxsize=1)
def _scorer() -> RougeScorer:
    # Imported at the first use: it loads nltk, which takes a second that a plain fit need not pay.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_NAMES), use_stemmer=True)


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L in [0, 1].

    Args:
        targets: Reference texts.
        predictions: Generated texts, one per target.
    """
    scores = [_scorer().score(target, text) for target, text in zip(targets, predictions, strict=True)]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE_NAMES}
