from lightning_muon.sharding import fsdp_call_log
from lightning_muon.sharding.fsdp_call_log import CallList


def _calls_of(*values: int, ranks: tuple[int, ...] = (0, 3)) -> CallList:
    calls = CallList("some", ranks)
    for value in values:
        calls.add(value)
    return calls


def test_equal_calls_have_equal_words_and_others_do_not() -> None:
    assert _calls_of(1, 2, 3).words() == _calls_of(1, 2, 3).words()
    assert len({tuple(_calls_of(*values).words()) for values in ((), (1,), (1, 2), (2, 1), (1, 2, 2), (1, -2))}) == 6
    first, negative, *_ = _calls_of(7).words()
    assert first == -negative and 0 <= first < 2**31


def test_the_last_calls_are_kept_and_the_others_counted() -> None:
    count = 2 * fsdp_call_log._NUM_KEPT + 5
    skipped, kept = _calls_of(*range(count)).tail()
    assert kept == list(range(skipped, count)) and len(kept) >= fsdp_call_log._NUM_KEPT
    calls = _calls_of(1, 2)
    calls.restart()
    assert (calls.tail(), calls.count) == ((0, []), 0)
    assert calls.words() == _calls_of().words()
