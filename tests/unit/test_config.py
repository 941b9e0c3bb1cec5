"""Ranges of the options."""

import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch

from lightning_muon import FlexDeMo, FlexDeMoConfig, ParallelMuon, ParallelMuonFabricStrategy, ParallelMuonStrategy
from lightning_muon.config import (
    MuonConfig,
    check_hyperparameters,
    name_of_function,
    takes_options,
)
from lightning_muon.engine.options import Options


def test_the_defaults_are_valid_and_frozen() -> None:
    config = MuonConfig()
    check_hyperparameters(vars(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


def test_numbers_of_other_libraries_and_lists_are_taken() -> None:
    config = MuonConfig(lr=torch.tensor(0.5), betas=[0, 0.5], adamw_patterns=["*.x"], max_skipped_steps=0)  # type: ignore[arg-type]
    assert (float(config.lr), config.betas, config.adamw_patterns) == (0.5, [0, 0.5], ["*.x"])


def test_a_wrong_keyword_names_the_nearest_one() -> None:
    class Base:
        def __init__(self, width: int, *, height: int = 2) -> None:
            self.area = width * height

    plain = inspect.signature(Base)
    decorated = takes_options()(Base)

    class Child(decorated): ...  # type: ignore[misc,valid-type]

    assert decorated is Base and inspect.signature(Base) == plain
    assert (Base(3).area, Child(width=3, height=5).area) == (6, 15)
    with pytest.raises(TypeError, match=r"^Child: there is no option 'hieght'; did you mean 'height'\?$"):
        Child(1, hieght=2)
    with pytest.raises(TypeError, match=r"^Base: there is no option 'colour'; the options are width, height$"):
        Base(1, colour=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'"):
        Base()  # type: ignore[call-arg]


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
