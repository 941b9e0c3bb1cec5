import pytest

from lightning_muon import __version__
from scripts import check_imports, release


@pytest.mark.parametrize(
    ("text", "refused_in"),
    [
        ("import torch.distributed as dist", "math"),
        ("from torch import distributed", "math"),
        ("def f():\n    from torch.distributed import all_reduce", "math"),
        ("import torch\nx = torch.distributed.get_rank()", "math"),
        ("from torch.distributed.tensor._utils import compute_local_shape", "optim"),
        ("import torch._dynamo", "optim"),
        ("from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher", "optim"),
    ],
)
def test_an_import_in_the_wrong_room_is_a_complaint(text: str, refused_in: str) -> None:
    assert len(list(check_imports.check(f"lightning_muon/{refused_in}/a.py", text))) == 1
    assert not list(check_imports.check("lightning_muon/compat/torch.py", text))


def test_files_that_import_each_other_are_named() -> None:
    files = {"p/a.py": "from p import b", "p/b.py": "from p.c import C", "p/c.py": "import torch"}
    assert not list(check_imports.circle(files))
    only_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import A"
    (complaint,) = check_imports.circle(files | {"p/c.py": only_types})
    assert all(name in complaint for name in ("p.a", "p.b", "p.c"))


def test_files_agree_about_the_version() -> None:
    assert not list(release.disagreements(__version__))
    assert len(list(release.disagreements("99.0.0"))) == len(release.PLACES)
    changelog = "## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-01-02\n\n- done\n\n## [0.1.0]\n\n- begun\n"
    assert release.notes("0.2.0", changelog) == "- done"
    assert not release.notes("0.3.0", changelog)
