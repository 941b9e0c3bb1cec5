from lightning_muon.sharding import fsdp_call_log as unit_notes
from lightning_muon.sharding.fsdp_call_log import Barrier, Notes


def _notes(*values: int, ranks: tuple[int, ...] = (0, 3)) -> Notes:
    notes = Notes("some", ranks)
    for value in values:
        notes.add(value)
    return notes


def test_equal_notes_have_equal_words_and_others_do_not() -> None:
    assert _notes(1, 2, 3).words() == _notes(1, 2, 3).words()
    assert len({tuple(_notes(*values).words()) for values in ((), (1,), (1, 2), (2, 1), (1, 2, 2), (1, -2))}) == 6
    first, negative, *_ = _notes(7).words()
    assert first == -negative and 0 <= first < 2**31


def test_a_note_that_did_not_follow_the_last_time_is_a_gate() -> None:
    notes = Notes("some", (0, 3))
    assert [notes.add(4), notes.add(6)] == [Barrier("some", (0, 3), 1, 4), Barrier("some", (0, 3), 2, 6)]
    assert notes.add(4) == Barrier("some", (0, 3), 3, 4)
    assert [notes.add(6), notes.add(4), notes.add(6)] == [None, None, None]
    assert notes.add(8) == Barrier("some", (0, 3), 7, 8)


def test_a_rank_alone_waits_for_nobody() -> None:
    assert Notes("alone", (5,)).add(1) is None


def test_the_last_notes_are_kept_and_the_others_counted() -> None:
    count = 2 * unit_notes._NUM_KEPT + 5
    skipped, kept = _notes(*range(count)).tail()
    assert kept == list(range(skipped, count)) and len(kept) >= unit_notes._NUM_KEPT
    notes = _notes(1, 2)
    notes.restart()
    assert (notes.tail(), notes.count) == ((0, []), 0)
    assert notes.words() == _notes().words()
