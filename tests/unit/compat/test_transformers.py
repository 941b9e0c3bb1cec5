"""Fails when a private name of transformers moves."""

import re

import pytest

from lightning_muon.compat.transformers import ShardedAtLoad


def test_what_a_trainer_overrides_is_there() -> None:
    kind = pytest.importorskip("transformers").Trainer
    own = [name for name, value in vars(ShardedAtLoad).items() if re.match("_[^_]", name) and callable(value)]
    assert len(own) == 3 and all(callable(getattr(kind, name)) for name in own)
