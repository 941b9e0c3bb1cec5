from lightning_muon.sharding import fsdp_call_log
from lightning_muon.sharding.fsdp_call_log import Barrier, CallList


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


def test_a_call_in_a_new_order_needs_a_barrier() -> None:
    calls = CallList("some", (0, 3))
    assert [calls.add(4), calls.add(6)] == [Barrier("some", (0, 3), 1, 4), Barrier("some", (0, 3), 2, 6)]
    assert calls.add(4) == Barrier("some", (0, 3), 3, 4)
    assert [calls.add(6), calls.add(4), calls.add(6)] == [None, None, None]
    assert calls.add(8) == Barrier("some", (0, 3), 7, 8)
    assert CallList("alone", (5,)).add(1) is None


def test_the_last_calls_are_kept_and_the_others_counted() -> None:
    count = 2 * fsdp_call_log._NUM_KEPT + 5
    skipped, kept = _calls_of(*range(count)).tail()
    assert kept == list(range(skipped, count)) and len(kept) >= fsdp_call_log._NUM_KEPT
    calls = _calls_of(1, 2)
    calls.restart()
    assert (calls.tail(), calls.count) == ((0, []), 0)
    assert calls.words() == _calls_of().words()
