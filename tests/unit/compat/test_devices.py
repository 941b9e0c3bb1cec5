"""What the package asks of CUDA alone: all that a port to XPU has to look at. ROCm answers to these names."""

import ast
from pathlib import Path

import lightning_muon

# File -> the names of torch.cuda there.
OF_CUDA = {
    "cli/doctor.py": "device_count get_device_properties is_available set_device",
    "comm/collectives.py": "current_stream",
    "integrations/lightning/resuming.py": "get_rng_state is_available set_rng_state",
    "monitor/step_monitor.py": "Event synchronize",
    "math/newton_schulz.py": "CUDAGraph Stream current_stream device graph graph_pool_handle stream",
    "optim/matrix_step.py": "Event Stream current_stream stream",
    "optim/parallel_muon.py": "is_bf16_supported",
    "pipeline/batch_run.py": "manual_seed",
    "sharding/shards.py": "Stream",
    "sharding/zero2.py": "Stream current_stream stream",
}


def _names_of_cuda(path: Path) -> str:
    return " ".join(
        sorted(
            {
                node.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
            }
        )
    )


def test_what_is_asked_of_cuda_is_known() -> None:
    package = Path(lightning_muon.__file__).parent
    found = {str(path.relative_to(package)): names for path in package.rglob("*.py") if (names := _names_of_cuda(path))}
    assert found == OF_CUDA
