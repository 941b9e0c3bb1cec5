"""The strategy of ``lightning.fabric`` if that is installed, else of ``lightning_fabric``; imports neither before."""

from lightning_muon.integrations.registry import __getattr__ as __getattr__
