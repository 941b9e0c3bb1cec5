"""The public face of the package."""

import subprocess
import sys

import pytest

import lightning_muon


def test_the_public_names_are_these() -> None:
    names = """
        AutoResume Components DCTTopK DamagedCheckpointError DiLoCo ExchangeStep FlexDeMo FlexDeMoConfig Full
        ModeOptions MuonConfig MuonMonitor NoReplication
        NonFiniteGradientError Options ParallelMuon ParallelMuonFabricStrategy ParallelMuonStrategy QKClip Random
        Replicator Slicing StepMonitor StopSignals Striding Turn context_attention forward_backward full_state_dict
        gather_sequence make_mode pad_to_multiple register_schedule split_sequence
    """
    assert sorted(lightning_muon.__all__) == names.split()
    for name in lightning_muon.__all__:
        assert getattr(lightning_muon, name) is not None
    for name in ("accelerate", "hf"):
        pytest.importorskip("accelerate")
        assert getattr(lightning_muon, name).__name__ == f"lightning_muon.{name}"
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        _ = lightning_muon.Muon


def test_the_import_is_light() -> None:
    heavy = {
        "accelerate", "jsonargparse", "lightning", "matplotlib",
        "pytorch_lightning", "torch", "torchmetrics", "transformers", "yaml",
    }  # fmt: skip
    script = (
        "import sys, lightning_muon, lightning_muon.schedule.draw\n"
        f"print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
