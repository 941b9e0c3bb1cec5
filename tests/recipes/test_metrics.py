from __future__ import annotations

import math

import pytest

from recipes.t5_summarization.metrics import rouge, unigram_entropy


def test_unigram_entropy_equals_a_hand_computation() -> None:
    # Training counts of 0, 1, 2, 3: 2, 1, 0, 1; plus one: 3, 2, 1, 2 of 8. Validation tokens: 0, 0, 2.
    expected = (2 * math.log(8 / 3) + math.log(8 / 1)) / 3
    assert unigram_entropy([[0, 1], [0, 3]], [[0], [0, 2]], vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_rouge_equals_a_hand_computation() -> None:
    # Stemmed: "open the red box" against "opens the box". 1-grams: 3 common, precision 3/3, recall 3/4.
    # 2-grams: {open the} common, of 2 and of 3. Longest common subsequence: open the box.
    scores = rouge(["open the red box", "nothing in common"], ["opens the box", "quite other words"])
    assert scores["rouge1"] == pytest.approx((6 / 7) / 2)
    assert scores["rouge2"] == pytest.approx((2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)) / 2)
    assert scores["rougeL"] == pytest.approx((6 / 7) / 2)
