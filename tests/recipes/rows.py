"""Self-written rows of the WikiHow schema (title, text, summary), with nulls."""

from pathlib import Path

import pandas

_VERBS = ("Boil", "Paint", "Fold", "Clean", "Carry", "Mend", "Sort", "Draw")
_THINGS = ("an Egg", "a Fence", "a Letter", "a Window", "a Ladder", "a Sock", "a Drawer", "a Map")


def wikihow_frame() -> pandas.DataFrame:
    """64 complete rows and 4 with a missing title, text or summary, or with a blank text."""
    rows = [
        {
            "title": f"How to {verb} {thing}",
            "text": f"Put {thing} on the table, with care.\nThen {verb.lower()} it, and wait. Step {i}, {j}.",
            "summary": f"{verb} {thing}.",
        }
        for i, verb in enumerate(_VERBS)
        for j, thing in enumerate(_THINGS)
    ]
    rows.insert(3, {"title": None, "text": "A text without a title.", "summary": "None."})
    rows.insert(9, {"title": "A title without a text", "text": None, "summary": "None."})
    rows.insert(20, {"title": "A title and a text", "text": "without a summary", "summary": None})
    rows.append({"title": "A blank text", "text": " \n", "summary": "None."})
    return pandas.DataFrame(rows)


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    wikihow_frame().to_csv(path, index=False)
    return path
