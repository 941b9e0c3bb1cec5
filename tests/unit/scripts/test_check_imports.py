from __future__ import annotations

import pytest

from scripts.check_imports import check


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "def f():\n    from torch.distributed import all_reduce",
        "import torch\nx = torch.distributed.get_rank()",
    ],
)
def test_the_maths_may_not_use_torch_distributed(text: str) -> None:
    assert len(list(check("lightning_muon/math/a.py", text))) == 1
    assert not list(check("lightning_muon/comm/a.py", text))


def test_names_that_only_begin_alike_are_allowed_in_the_maths() -> None:
    assert not list(check("lightning_muon/math/a.py", "from torch.distributions import Normal\nimport torch"))


@pytest.mark.parametrize(
    "text",
    [
        "from torch.distributed.tensor._utils import compute_local_shape",
        "import torch._dynamo",
        "from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher",
    ],
)
def test_private_names_are_imported_in_compat_only(text: str) -> None:
    assert len(list(check("lightning_muon/optim/a.py", text))) == 1
    assert not list(check("lightning_muon/compat/torch.py", text))


def test_private_names_of_this_package_and_future_imports_are_allowed() -> None:
    text = "from __future__ import annotations\nfrom lightning_muon.optim._x import _y\n"
    assert not list(check("lightning_muon/optim/a.py", text))
