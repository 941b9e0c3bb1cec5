"""Ranges of the options."""

import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch

from lightning_muon import FlexDeMo, FlexDeMoConfig, ParallelMuon, ParallelMuonFabricStrategy, ParallelMuonStrategy
from lightning_muon.config import MuonConfig, name_of_function
from lightning_muon.engine.options import Options


def test_numbers_of_other_libraries_and_lists_are_taken() -> None:
    config = MuonConfig(lr=torch.tensor(0.5), betas=[0, 0.5], adamw_patterns=["*.x"], max_skipped_steps=0)  # type: ignore[arg-type]
    assert (float(config.lr), config.betas, config.adamw_patterns) == (0.5, [0, 0.5], ["*.x"])


_SIGNATURES = [
    (ParallelMuon, MuonConfig),
    (FlexDeMo, FlexDeMoConfig),
    (ParallelMuonStrategy, Options),
    (ParallelMuonFabricStrategy, Options),
]


@pytest.mark.parametrize(("kind", "config"), _SIGNATURES, ids=lambda each: each.__name__)
def test_a_constructor_has_each_option_of_its_config(kind: type[Any], config: type[Any]) -> None:
    parameters = inspect.signature(kind).parameters
    made = config()
    for field in dataclasses.fields(config):
        default = parameters[field.name].default
        # The others are "auto" or nothing, until they are checked.
        assert default == getattr(made, field.name) or field.name.startswith(("fused", "replicator"))
        assert parameters[field.name].annotation is not inspect.Parameter.empty
        documented = "".join(base.__doc__ or "" for base in config.__mro__)
        assert f"        {field.name}: " in documented, f"{field.name} has no documentation"
    own: Any = inspect.unwrap(kind.__init__)
    for_editors = get_type_hints(*get_args(get_type_hints(own)["options"]))
    named = set(inspect.signature(own).parameters)
    assert for_editors == {name: hint for name, hint in get_type_hints(config).items() if name not in named}


class Doubled:
    """A callable object."""

    def __call__(self, matrices: torch.Tensor, *, newton_schulz: Any) -> torch.Tensor:
        return 2 * newton_schulz(matrices)


def doubled(matrices: torch.Tensor, *, newton_schulz: Any) -> torch.Tensor:
    return 2 * newton_schulz(matrices)


def test_a_function_or_a_class_of_callable_objects_is_named_by_a_dotted_path() -> None:
    values = (f"{__name__}.doubled", f"{__name__}.Doubled", "newton_schulz")
    for kind, base in ((MuonConfig, {}), (FlexDeMoConfig, {"base": "muon"})):
        options = [{"class_path": kind.__name__, "init_args": {"orthogonalize": each} | base} for each in values]
        found = [Options.from_mapping({"optimizer": each}).config.orthogonalize for each in options]
        assert found[0] is doubled and isinstance(found[1], Doubled) and found[2] == "newton_schulz"
        assert [name_of_function(each) for each in found] == list(values)
