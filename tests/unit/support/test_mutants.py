"""The list of mistakes that the tests must find."""

from tests.mutants import LEAST_FOUND, MUTANTS, ROOT, TESTS


def test_each_mutant_can_be_planted() -> None:
    assert len(MUTANTS) >= LEAST_FOUND and len(set(MUTANTS)) == len(MUTANTS)
    assert all(sum(each.room == room for each in MUTANTS) >= 3 for room in TESTS)
    assert all(any(ROOT.glob(pattern)) for patterns in TESTS.values() for pattern in patterns)
    for each in MUTANTS:
        assert (ROOT / each.path).read_text().count(each.old) == 1 and each.new != each.old, each
