"""``lightning-muon convert SOURCE TARGET --to hf``: a folder that ``from_pretrained`` of transformers loads.

transformers itself makes the model, without memory for its weights, gets those of the checkpoint, and saves it. The
README.md beside it says what the model is, how it was trained, and what the last figures of the run were.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_muon.checkpoint.manifest import hash_files, write_manifest
from lightning_muon.checkpoint.saving import MODELS, NAMES
from lightning_muon.cli.logged_run import LoggedRun, is_run
from lightning_muon.cli.report import is_of_optimizer
from lightning_muon.config import join_names
from lightning_muon.params.uses import clean_name

_CONFIG, _TOKENIZER, _IMAGES = "config.json", "tokenizer_config.json", "preprocessor_config.json"
_CONFIG_FROM = """model whose config.json (and tokenizer) belongs to the weights: a folder, or a name on the hub.
Default: what the run has saved with the weights, or the config.json beside them"""
_TOKENIZER_FROM = """folder or name on the hub of the tokenizer. Default: --config-from, the folder of SOURCE or of the
run, or a folder "tokenizer" in one of these, if it has one"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that go with ``--to hf``."""
    group = parser.add_argument_group("--to hf")
    add = group.add_argument
    add("--config-from", metavar="FOLDER_OR_NAME", help=_CONFIG_FROM)
    add("--tokenizer-from", metavar="FOLDER_OR_NAME", help=_TOKENIZER_FROM)
    add("--max-shard-size", metavar="SIZE", default="50GB", help="of a file of weights (default: %(default)s)")
    add("--run-dir", type=Path, help="what `lightning-muon report` reads, for the card (default: beside SOURCE)")
    add("--base-model", metavar="NAME", help="for the card: the model on the hub that the training began with")
    add("--dataset", metavar="NAME", action="append", help="for the card: data set on the hub; may be repeated")


def write_hf(
    folder: Path, content: Mapping[str, Any], source: Source, arguments: argparse.Namespace, about: Mapping[str, Any]
) -> None:
    """Write weights, configurations, tokenizer, model card and manifest into the new ``folder``.

    ``content`` is that of the checkpoint, with whole weights under ``"state_dict"``.

    Raises:
        ValueError: No config, or one that does not fit: keys, shapes, or a class that transformers has not.
    """
    weights = {clean_name(name): value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    own = [name for name in weights if name.startswith(arguments.prefix or "")]
    if any(".lora_" in name for name in own) or (source.path / "adapter_config.json").is_file():
        raise ValueError(
            f"{source.path} has adapters of LoRA: merge them first, in the program, with merge_and_unload and "
            "save_pretrained (recipes/finetune has written that to output/merged)"
        )
    model, name, base_model = _empty_model(content.get(MODELS, {}), source, arguments)
    if name is None:
        name = arguments.prefix
    prefix = _prefix_of(weights, model.state_dict()) if name is None else f"{name.removesuffix('.')}." if name else ""
    _assign(model, _own_weights(weights, prefix, is_given=arguments.prefix is not None), prefix)
    model.save_pretrained(folder, max_shard_size=arguments.max_shard_size)
    if tokenizer := _tokenizer(source, arguments):
        tokenizer.save_pretrained(folder)
    elif model.can_generate():
        print("no tokenizer was found beside the checkpoint or in its run; name one with --tokenizer-from")  # noqa: T201
    given = [Path(place) for place in (arguments.tokenizer_from, arguments.config_from) if place]
    if images := next((each / _IMAGES for each in [*given, *_places(source)] if (each / _IMAGES).is_file()), None):
        (folder / _IMAGES).write_bytes(images.read_bytes())
    card = model_card(type(model).__name__, source, content, base_model=base_model, datasets=arguments.dataset or [])
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_manifest(folder, hash_files(folder), about)


def _empty_model(
    saved: Mapping[str, Mapping[str, str]], source: Source, arguments: argparse.Namespace
) -> tuple[Any, str | None, str | None]:
    """A model on the meta device; its name in the LightningModule and its base model on the hub, if known."""
    from transformers import AutoConfig, GenerationConfig

    place = arguments.config_from or next((str(path) for path in source.folders if (path / _CONFIG).is_file()), None)
    if saved and not arguments.config_from:
        given = None if arguments.prefix is None else arguments.prefix.removesuffix(".")
        if given is None and len(saved) > 1:
            raise ValueError(f"the run has trained several models, {sorted(saved)}; say with --prefix which one")
        name = next(iter(saved)) if given is None else given
        if name not in saved:
            raise ValueError(f"--prefix {arguments.prefix}: the models of the run are {sorted(saved)}")
        entry = saved[name]
        model = _on_meta(AutoConfig.for_model(**json.loads(entry["config"])), entry["class"])
        if "generation_config" in entry:
            model.generation_config = GenerationConfig.from_dict(json.loads(entry["generation_config"]))
        return model, name, arguments.base_model or entry.get("base_model")
    if place is None:
        raise ValueError(
            f"{source.path} has no config of a model of transformers, and there is no {_CONFIG} beside it; name a "
            "folder that has one, or a model on the hub, with --config-from"
        )
    config = AutoConfig.from_pretrained(place)
    if not config.architectures:
        raise ValueError(f'the config of {place} names no class; add "architectures": ["..."] to it')
    model = _on_meta(config, config.architectures[0])
    if model.can_generate():
        with suppress(OSError):  # The place has no generation config.
            model.generation_config = GenerationConfig.from_pretrained(place)
    return model, None, arguments.base_model


def _on_meta(config: Any, name: str) -> Any:
    import transformers

    kind = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no class {name}, of which the model is")
    with torch.device("meta"):
        return kind(config)


def _prefix_of(names: Collection[str], expected: Collection[str]) -> str:
    """The prefix of most ``names`` that are a prefix and an ``expected`` name."""
    found = Counter[str]()
    for name in names:
        parts = name.split(".")
        starts = range(len(parts))
        found.update(
            ".".join([*parts[:start], ""]) if start else "" for start in starts if ".".join(parts[start:]) in expected
        )
    best = found.most_common(2)
    if not best:
        raise ValueError(
            f"no weight of the checkpoint is one of the model: it has {join_names(names)}; the model "
            f"{join_names(expected)}"
        )
    if len(best) == 2 and best[0][1] == best[1][1]:
        raise ValueError(f"the weights of the model are there twice: --prefix {best[0][0]!r} or {best[1][0]!r}")
    return best[0][0]


def _own_weights(weights: Mapping[str, Tensor], prefix: str, *, is_given: bool) -> dict[str, Tensor]:
    others = [name for name in weights if not name.startswith(prefix)]
    if others and not is_given:
        raise ValueError(
            f"{join_names(others)} of the checkpoint belong to no part of the model, whose names begin with "
            f"{prefix!r}; --prefix {prefix!r} leaves them out"
        )
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _assign(model: Any, weights: dict[str, Tensor], prefix: str) -> None:
    """Give the model its weights, all of them and no others; tied ones may be there under any of their names."""
    tied: dict[str, str] = model.all_tied_weights_keys
    for name, source in tied.items():
        if name in weights and not torch.equal(weights[name], weights.setdefault(source, weights[name])):
            raise ValueError(f"{prefix}{name} and {prefix}{source} differ, but the config ties them")
    expected = model.state_dict()
    missing = [f"{prefix}{name}" for name in expected if name not in weights and tied.get(name) not in weights]
    extra = [f"{prefix}{name}" for name in weights if name not in expected]
    shapes = [
        f"{prefix}{name} is {tuple(weights[name].shape)}, in the model {tuple(value.shape)}"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    problems = [f"the checkpoint lacks {join_names(missing)}"] if missing else []
    problems += [f"the model has no {join_names(extra)}"] if extra else []
    problems += [join_names(shapes)] if shapes else []
    if problems:
        raise ValueError(f"{type(model).__name__} of this config does not fit: {'; '.join(problems)}")
    model.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False, assign=True)
    model.tie_weights()


def _places(source: Source) -> list[Path]:
    """Folders that may have the tokenizer or the image processor of the run."""
    return [each for folder in source.folders for each in (folder, folder / "tokenizer")]


def _tokenizer(source: Source, arguments: argparse.Namespace) -> Any:
    """The tokenizer that the user names, or one beside the checkpoint; else ``None``."""
    from transformers import AutoTokenizer

    if arguments.tokenizer_from:
        try:
            return AutoTokenizer.from_pretrained(arguments.tokenizer_from)
        except (OSError, ValueError) as error:
            raise ValueError(f"--tokenizer-from: {arguments.tokenizer_from} has no tokenizer: {error}") from error
    found = [str(each) for each in _places(source) if (each / _TOKENIZER).is_file()]
    if not arguments.config_from and not found:
        return None
    try:
        return AutoTokenizer.from_pretrained(arguments.config_from or found[0])
    except (OSError, ValueError):
        if found:
            return AutoTokenizer.from_pretrained(found[0])
        return None  # A model without a tokenizer, of images for instance.


_PROJECT = "https://github.com/lightning-muon/lightning-muon"
_VERSIONS = ("lightning_muon", "torch")  # In a manifest.
_NO_SETTINGS = {"params", NAMES}
_HYPER_PARAMETERS = {
    "Hyper-parameters": "hyper_parameters",
    "Hyper-parameters of the data module": "datamodule_hyper_parameters",
}
_LONGEST = 200  # Characters of a value.


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint and the files around it.

    Args:
        path: The checkpoint.
        about: Facts on the run from its manifest; empty without one.
        param_groups: Param groups of its optimizers.
        run: Metrics of the run, if they were found.
        name: Name of the model in the card.
    """

    path: Path
    name: str
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    param_groups: Sequence[Mapping[str, Any]] = ()
    run: LoggedRun | None = None

    @property
    def folders(self) -> list[Path]:
        """Folders that may have a config or a tokenizer: the checkpoint, the one it is in, the run's folder."""
        return [self.path, self.path.parent, *([self.run.folder] if self.run else [])]


def find_run(source: Path, given: Path | None) -> LoggedRun | None:
    """Metrics of the folder that was ``given``, or of one of the two that ``source`` lies in; else none."""
    if given is not None:
        return LoggedRun.read(given)
    # Not the newest of several runs in one of them, which may be another one.
    folders = (source, source.parent, source.parent.parent)
    return next((LoggedRun.read(folder) for folder in folders if is_run(folder)), None)


def model_card(
    class_name: str,
    source: Source,
    content: Mapping[str, Any],
    *,
    base_model: str | None,
    datasets: Sequence[str],
) -> str:
    """The text of README.md, with the front matter that the hub reads.

    Args:
        class_name: Name of the model's class in transformers.
        source: The checkpoint.
        content: Other entries of the checkpoint: ``epoch``, ``hyper_parameters`` and those of the data module.
        base_model: The model on the hub with which the training began.
        datasets: Data sets on the hub.
    """
    from huggingface_hub import ModelCardData
    from transformers.modelcard import TASK_MAPPING
    from transformers.pipelines import PIPELINE_REGISTRY

    # The task is certain if the class has only one of the supported ones.
    known = PIPELINE_REGISTRY.get_supported_tasks()
    tasks = [task for task, classes in TASK_MAPPING.items() if class_name in classes.values() and task in known]
    front = ModelCardData(
        library_name="transformers",
        tags=["muon", "lightning-muon"],
        pipeline_tag=tasks[0] if len(tasks) == 1 else None,
        base_model=base_model,
        datasets=list(datasets) or None,
    )
    step = source.about.get("step", content.get("global_step"))
    mesh = dict(source.about.get("mesh", {}))
    ranks = source.about.get("num_ranks") or prod(mesh.values())
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    facts = {
        "class": f"`{class_name}`",
        "optimizer steps": step,
        "epochs begun": content["epoch"] + 1 if {"epoch", "loops"} <= content.keys() else None,
        "ranks": ranks if source.about else None,
        "mesh": axes,
        "checkpoint of": " and ".join(f"{name} {source.about[name]}" for name in _VERSIONS if name in source.about),
    }
    lines = ["---", front.to_yaml(), "---", "", f"# {source.name}", ""]
    lines += [f"Trained with [lightning-muon]({_PROJECT})."]
    lines += _table("The run", ["", ""], [[name, value] for name, value in facts.items() if value not in (None, "")])
    if source.run:
        last = {name: curve[-1] for name, curve in source.run.curves.items() if curve and not is_of_optimizer(name)}
        rows = [[f"`{name}`", f"{value:.5g}", f"{step:.0f}"] for name, (step, value) in sorted(last.items())]
        lines += _table("Last metrics", ["metric", "value", "step"], rows)
    groups = [_settings(group) for group in source.param_groups]
    settings = list(dict.fromkeys(name for group in groups for name in group))
    heads = ["setting", *(f"group {number}" for number in range(len(groups)))]
    lines += _table("Optimizer", heads, [[f"`{n}`", *(_text(each.get(n)) for each in groups)] for n in settings])
    for title, key in _HYPER_PARAMETERS.items():
        given = {name: value for name, value in content.get(key, {}).items() if not name.startswith("_")}
        lines += _table(title, ["name", "value"], [[f"`{name}`", _text(given[name])] for name in given])
    return "\n".join([*lines, ""])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a param group; its learning rate is that which schedules multiply."""
    found = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
    begun = found.pop("initial_lr", found.get("lr"))
    if begun == found.get("lr"):
        return found
    both = {"lr": begun, "lr at the checkpoint": found.pop("lr", None)}
    return {**both, **found}


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    marks = ["---"] * len(heads)
    return ["", f"## {title}", "", *(f"| {' | '.join(map(str, row))} |" for row in (heads, marks, *rows))]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    # In quotes, because a page does not show blanks at the end, such as that of a prefix.
    text = value if isinstance(value, str) and value == value.strip() else json.dumps(value, default=str)
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
