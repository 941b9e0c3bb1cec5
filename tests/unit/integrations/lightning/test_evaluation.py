"""No inference mode in the loops of a Trainer."""

from __future__ import annotations

from types import SimpleNamespace

from lightning_muon.integrations.lightning.evaluation import avoid_inference_mode


def test_inference_mode_is_switched_off() -> None:
    loops = [SimpleNamespace(inference_mode=True) for _ in range(3)]
    avoid_inference_mode(SimpleNamespace(validate_loop=loops[0], test_loop=loops[1], predict_loop=loops[2]))
    assert [loop.inference_mode for loop in loops] == [False] * 3
