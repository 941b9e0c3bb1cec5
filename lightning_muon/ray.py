"""What a program is told that still imports this module of version 0.1."""

from lightning_muon.removed import removed

raise ImportError(removed("ray"))
