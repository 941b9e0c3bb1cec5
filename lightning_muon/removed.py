"""Names of version 0.1 that are gone, and what is said to a program that still uses one."""

from __future__ import annotations

import re

# Name -> why it went, and what to use instead. Keys are options, in YAML files too, as `option of CLASS` where others
# still have it or may mean something else by it; their values as `option='value'`, and all tuples as `option=(...)`;
# names that the package exported; commands, and their options as `lightning-muon COMMAND --option`.
REMOVED: dict[str, str] = {
    # options of optimizers
    "momentum_dtype": "momenta have the dtype of their parameters; those of bfloat16 parameters have half of the bytes",
    "offload": "momenta are where the parameters are; shard over more ranks, or use CPUOffloadPolicy of FSDP2",
    "hyperball": "it gained nothing in our runs; remove it",
    "muon_eq": "it gained nothing in our runs; pass it as a function, orthogonalize=, see docs/family.md",
    "muon_plus": "it gained nothing in our runs; pass it as a function, orthogonalize=, see docs/family.md",
    "ns_costs": "measured costs chose what FLOPs choose; leave it out",
    "early_all_gather": "gathers wait for all that is queued; call set_post_optim_event of FSDP2 after a step",
    "delay": "steps of FlexDeMo were slower with it, and their loss higher; remove it",
    "chunk_bytes": "it is called bucket_bytes",
    "cautious_weight_decay": "it gained nothing in our runs; remove it",
    "assignment": "owners are found longest first, as by 'lpt'; remove it",
    "lora": "for 'both' leave it out; for 'b_only' write adamw_patterns=('*lora_A*',)",
    # options of strategies
    "data_parallel_size": "write replicate_size=1 and shard_size",
    "tensor_parallel_size": "write tensor_size",
    # values of these options
    "overlap='backward'": "clipping voided what it sent, and it was predicted to pay in 5 of 60 settings only, with "
    "shards on several machines; use overlap='step', the default",
    "overlap='auto'": "it chose between 'backward', which is gone, and 'step'; use overlap='step', the default",
    "value_format='int8'": "it sends 22 % less, and at 100 Mbit/s no step was faster; use 'bf16'",
    "value_format='sign'": "the bytes of values are not what a step waits for; use 'bf16'",
    "ns_quality=(...)": "there is 'fast', and for a narrower band ns_coefficients='polar_express'",
    **{
        f"ns_coefficients={name!r}": "pass its triples as ns_coefficients=((a, b, c), ...)"
        for name in ("you", "cans", "cubic", "deepseek_v4")
    },
    "pipeline_schedule='auto'": "import examples/schedules.py of the repository, which registers it",
    "pipeline_schedule='dual_pipe_v'": (
        "import examples/schedules.py of the repository, which registers it, and set pipeline_stages_per_rank=2"
    ),
    # options of one class
    "overlap of FlexDeMo": "nodes exchange their momenta in the step; remove it",
    "overlap of FlexDeMoConfig": "nodes exchange their momenta in the step; remove it",
    "overlap of DiLoCo": "a step that sends the mean applies it; a longer period sends less",
    "folder of StepMonitor": "curves are those of a logger; pass it what take() returns",
    "skipped_steps of StepMonitor": "the optimizer has skipped_steps; remove it",
    **{
        f"{name} of {kind}Monitor": "tokens per second and FLOPs are those of Lightning's ThroughputMonitor; remove it"
        for name in ("module", "tokens", "data_copies", "flops_per_token", "peak_flops")
        for kind in ("Step", "Muon")
    },
    # names
    "Turn": "it is called ExchangeStep",
    "context_attention": "it only passed its arguments on; use torch.distributed.tensor.experimental.context_parallel",
    "pad_to_multiple": "pad the sequences with torch.nn.functional.pad, or in the collate_fn of the data loader",
    "QKClip": "it was one trick of one paper; norms of queries and keys in the model bound attention logits, too",
    "prepare": "make a lightning_muon.accelerate.Accelerator, or start the script with lightning-muon launch",
    "ray": "examples/ray_train.py of the repository sets what Ray Train asks for",
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
            "json": "read the text, or a picture by --draw; programs import lightning_muon.cli.plan_step",
            "flops memory-bandwidth bandwidth inter-bandwidth latency model-flops": "pass a file with rates as --cost",
            "ns-steps wire-bytes chunk-bytes look-ahead": "give it as an option of the optimizer in --config",
            "modes schedules activations microbatches width": "remove it; --ranks N tries all ways to train by itself",
            "stage-costs memory-limit": "docs/pipelines.md has bubble and memory of each schedule as formulas",
            "compute-seconds": "docs/flexdemo.md has bits and break-even as two formulas",
            "replicate": "write --replicate-size",
            "shard": "write --shard-size",
        }.items()
        for name in names.split()
    },
    "lightning-muon report": "curves are drawn by TensorBoard, by Weights & Biases, or of metrics.csv by pandas",
    "lightning-muon config": "start from examples/accelerate.yaml, which has every option, see docs/options.md",
    "lightning-muon tune": "a loop over `lightning-muon fit` does it, see docs/family.md",
    "lightning-muon convert --to": "it follows from SOURCE and TARGET; for transformers see docs/checkpoints.md",
    "lightning-muon convert --optimizers": "the strategies go on from SOURCE itself, with any number of ranks",
    "lightning-muon convert --key": "the weights keep the keys of SOURCE",
    "lightning-muon convert --prefix": "names of weights stay; lines that change them are in docs/checkpoints.md",
    "lightning-muon convert --config": "the model writes its own config, see docs/checkpoints.md",
    "lightning-muon convert --config-from": "transformers writes the folder, see docs/checkpoints.md",
    "lightning-muon convert --tokenizer-from": "transformers writes the folder, see docs/checkpoints.md",
    "lightning-muon convert --run-dir": "there are no model cards any more; write README.md by hand",
    "lightning-muon convert --base-model": "there are no model cards any more; write README.md by hand",
    "lightning-muon convert --dataset": "there are no model cards any more; write README.md by hand",
    "lightning-muon convert --max-shard-size": "transformers writes the folder, see docs/checkpoints.md",
    "lightning-muon doctor --ranks": "torchrun starts the ranks: torchrun --nproc-per-node N -m lightning_muon doctor",
    "lightning-muon doctor --seconds": "one exchange is tried on each axis, under torchrun",
    "lightning-muon plan --html": "the timelines are drawn by --draw",
    "lightning-muon plan --calibrate": (
        "benchmarks/plan_accuracy.py of the repository measures a machine; pass the cost.json that it writes as --cost"
    ),
    "lightning-muon trace": (
        "each op of a step is a range of torch.profiler, see docs/monitor.md; benchmarks/plan_accuracy.py draws a step "
        "above its prediction"
    ),
}
# Entry of the state of a parameter in a checkpoint -> the option above that needed it.
STATE_OF: dict[str, str] = {
    "initial_norm": "hyperball",
    "delayed_update": "delay",
    "has_delayed_update": "delay",
}


_REFUSED = re.compile(r'Parser key "(\w+)":(?:(?!Parser key)[\s\S])*?(?:Got|Given) value: (.+)')


def removed(name: str, of: str = "") -> str | None:
    """A sentence on a name that is gone, maybe an option of the class ``of``; None for any other."""
    names = (f"{name} of {of}", re.sub(r"='?[(\[].*", "=(...)", name))
    return next((f"{each} went in version 0.2: {REMOVED[each]}" for each in names if each in REMOVED), None)


def removed_value(message: str) -> str | None:
    """The sentence on a value that is gone, among those that jsonargparse refuses with ``message``."""
    sentences = (removed(f"{key}={value!r}") for key, value in _REFUSED.findall(message))
    return next(filter(None, sentences), None)
