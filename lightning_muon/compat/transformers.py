"""Private names of transformers 5 that the package uses; tests/unit/compat/test_transformers.py watches them."""

from __future__ import annotations

from torch import nn


def pretrained_parts(module: nn.Module) -> list[nn.Module]:
    """The models in ``module`` whose weights ``from_pretrained`` has loaded, ``module`` itself among them.

    Their configs say no more than those of ``from_config(AutoConfig.from_pretrained(...))``, which has fresh weights.
    """
    return [each for each in module.modules() if "_weight_conversions" in vars(each)]
