"""Names of version 0.1 that are gone, and what is said to a program that still uses one."""

from __future__ import annotations

# Name -> why it went, and what to use instead. Keys are options, in YAML files too; their values as `option='value'`;
# names that the package exported; commands, and their options as `lightning-muon COMMAND --option`.
REMOVED: dict[str, str] = {
    # options of optimizers
    "delay": "steps of FlexDeMo were slower with it, and their loss higher; remove it",
    # values of these options
    "value_format='int8'": "it sends 22 % less, and at 100 Mbit/s no step was faster; use 'bf16'",
    "value_format='sign'": "the bytes of values are not what a step waits for; use 'bf16'",
    # options of strategies
    # names
    "Turn": "it is called ExchangeStep",
    "context_attention": "it only passed its arguments on; use torch.distributed.tensor.experimental.context_parallel",
    "pad_to_multiple": "pad the sequences with torch.nn.functional.pad, or in the collate_fn of the data loader",
    # commands, and options of commands
}


def removed(name: str) -> str | None:
    """A sentence on a name that is gone; None for any other."""
    return f"{name} went in version 0.2: {REMOVED[name]}" if name in REMOVED else None
