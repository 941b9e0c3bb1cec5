"""Shapes of a model that is small enough to plan by hand."""

from __future__ import annotations

from typing import Any

WIDTH, WORDS, LENGTH = 8, 32, 16
SHAPES: dict[str, Any] = {
    "name": "tiny",
    "source": "",
    "parameters": [
        {"name": "embed.weight", "shape": [WORDS, WIDTH], "kind": "elementwise", "reason": "embedding"},
        {
            "repeat": 4,
            "parameters": [
                {"name": "layers.{i}.weight", "shape": [WIDTH, WIDTH], "kind": "matrix"},
                {"name": "layers.{i}.norm", "shape": [WIDTH], "kind": "elementwise", "reason": "1-D"},
            ],
        },
        {"name": "norm.weight", "shape": [WIDTH], "kind": "elementwise", "reason": "1-D"},
        {"name": "head.weight", "shape": [WORDS, WIDTH], "kind": "elementwise", "reason": "output head"},
    ],
}
