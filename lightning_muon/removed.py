"""Names of version 0.1 that are gone, and what is said to a program that still uses one."""

from __future__ import annotations

# Name -> why it went, and what to use instead. Keys are options, in YAML files too; their values as `option='value'`;
# names that the package exported; commands, and their options as `lightning-muon COMMAND --option`.
REMOVED: dict[str, str] = {
    # options of optimizers
    # values of these options
    # options of strategies
    # names
    # commands, and options of commands
    **{
        f"lightning-muon plan --{name}": text
        for names, text in {
            "splits": "pass --ranks N, which compares the best split of each way to train by formulas",
            "pipeline": "pass --ranks N for 1F1B; docs/pipelines.md has bubble and memory of each schedule",
            "write-config": "pass --ranks N, which ends in a line to paste; its options are those of a YAML file, too",
            "flexdemo": "pass --ranks N; docs/flexdemo.md has bits and break-even as two formulas",
            "write-shapes": "pass --config, or write a shape file, whose format is in docs/planning.md",
            "fused": "give fused= of the optimizer in --config, or splits in a shape file",
            "stack-shard-dim": "give shard_dim in a shape file",
            "json html": "read the text, or a picture by --draw; programs import lightning_muon.cli.plan_step",
            "flops memory-bandwidth bandwidth inter-bandwidth latency model-flops": "pass a file with rates as --cost",
            "ns-steps wire-bytes chunk-bytes look-ahead": "give it as an option of the optimizer in --config",
            "modes schedules activations microbatches width": "pass --ranks N, which chooses what it leaves open",
            "stage-costs memory-limit compute-seconds": "it was for a plan that went, too",
            "replicate": "write --replicate-size",
            "shard": "write --shard-size",
        }.items()
        for name in names.split()
    },
}


def removed(name: str) -> str | None:
    """A sentence on a name that is gone; None for any other."""
    return f"{name} went in version 0.2: {REMOVED[name]}" if name in REMOVED else None
