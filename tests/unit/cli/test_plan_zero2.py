"""What ``lightning-muon plan`` says of ``sharding="zero2"`` on several nodes."""

from __future__ import annotations

import json

import pytest

from lightning_muon.cli.main import main
from lightning_muon.cli.plan_specs import Mesh
from lightning_muon.cli.plan_zero2 import plan_zero2
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import read_shapes


def test_both_ways_are_listed_with_what_leaves_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--shapes", "t5-small", "--shard", "4", "--node-ranks", "2", "--machine", "h100"]
    main([*arguments, "--json"])
    direct, hierarchical = json.loads(capsys.readouterr().out)["zero2"]
    assert (direct["way"], hierarchical["way"]) == ("direct", "hierarchical")
    assert direct["node_bytes"] == 2 * hierarchical["node_bytes"]
    assert hierarchical["is_chosen"] and not direct["is_chosen"]
    main(arguments)
    assert "hierarchical *" in capsys.readouterr().out


def test_one_node_has_nothing_to_choose() -> None:
    model, cost = read_shapes("t5-small"), PRESETS["h100"]
    assert plan_zero2(model, Mesh(replicate=2, shard=8), cost, node_ranks=8) is None
    assert plan_zero2(model, Mesh(replicate=1, shard=16), cost, node_ranks=8) is not None
