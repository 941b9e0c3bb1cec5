"""Names of version 0.1 that are gone, and what is said to a program that still uses one."""

from __future__ import annotations

# Name -> why it went, and what to use instead. Keys are options, in YAML files too; their values as `option='value'`;
# names that the package exported; commands, and their options as `lightning-muon COMMAND --option`.
REMOVED: dict[str, str] = {
    # options of optimizers
    # values of these options
    # options of strategies
    # names
    "Turn": "it is called ExchangeStep",
    "QKClip": "it was one trick of one paper; norms of queries and keys in the model bound attention logits, too",
    # commands, and options of commands
}
# Entry of the state of a parameter in a checkpoint -> the option above that needed it.
STATE_OF: dict[str, str] = {}


def removed(name: str) -> str | None:
    """A sentence on a name that is gone; None for any other."""
    return f"{name} went in version 0.2: {REMOVED[name]}" if name in REMOVED else None
