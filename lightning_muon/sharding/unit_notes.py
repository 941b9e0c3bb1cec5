"""Notes that ranks must have in common, cheap to compare however many they are."""

from __future__ import annotations

import hashlib
import threading
from array import array
from typing import NamedTuple

# At least so many last notes are kept for messages: a step has a few for each unit, an evaluation any number.
_NUM_KEPT = 4096


class Gate(NamedTuple):
    """What ranks have to reach together before they communicate.

    Attributes:
        name: Names the ranks; the same on all of them.
        ranks: Global ranks that have to come, in ascending order.
        number: How many notes these ranks have compared ever.
        note: The last of them.
    """

    name: str
    ranks: tuple[int, ...]
    number: int
    note: int


class Notes:
    """Notes that some ranks must have in common: a digest of all, and the last ones."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.count = 0
        self.name, self._ranks = name, ranks
        self._num_ever = 0
        self._last: int | None = None
        self._successors: dict[int | None, int] = {}
        self._lock = threading.Lock()
        self._kept = array("i")
        self._digest = hashlib.sha256()

    def add(self, note: int) -> Gate | None:
        """Append; returns what to wait for if the note was not to be expected and there are others."""
        with self._lock:
            self.count += 1
            self._kept.append(note)
            if len(self._kept) >= 2 * _NUM_KEPT:
                del self._kept[:_NUM_KEPT]
        self._digest.update(note.to_bytes(4, "little", signed=True))
        self._num_ever += 1
        expected = self._successors.get(self._last) == note
        self._successors[self._last] = note
        self._last = note
        return None if expected or len(self._ranks) == 1 else Gate(self.name, self._ranks, self._num_ever, note)

    def tail(self) -> tuple[int, list[int]]:
        """Return (number of notes left out, the others)."""
        with self._lock:
            return self.count - len(self._kept), self._kept.tolist()

    def words(self) -> list[int]:
        """Two words of the digest, each with its negative, whose maximum shows the minimum.

        62 bits: of 4e18 different orders one is taken for equal by chance.
        """
        digest = self._digest.digest()
        first, second = (int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4))
        return [first, -first, second, -second]

    def restart(self) -> None:
        """Begin anew; what followed what stays known."""
        with self._lock:
            self.count = 0
            self._kept = array("i")
        self._digest = hashlib.sha256()
