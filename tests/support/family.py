"""``muon_eq`` and ``muon_plus`` as docs/family.md defines them, in a module that other processes can import."""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.support.programs import ROOT

_page = (ROOT / "docs" / "family.md").read_text()
(_program,) = re.findall(r"^```python\n(.*?)^```$", _page, re.MULTILINE | re.DOTALL)
_namespace: dict[str, Any] = {"__name__": __name__}
exec(_program.partition("\nmodel = ")[0], _namespace)
muon_eq: Callable[..., Tensor] = _namespace["muon_eq"]
muon_plus: Callable[..., Tensor] = _namespace["muon_plus"]
