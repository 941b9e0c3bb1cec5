"""Imports once, in the process from which workers and programs are forked, what most of them need."""

import gc
import importlib
from contextlib import suppress

for _name in (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "lightning.pytorch.cli",
    "pytorch_lightning",
    "accelerate",
    "datasets",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "lightning_muon.accelerate",
    "lightning_muon.hf",
):
    with suppress(ImportError):  # What is not installed is left out.
        importlib.import_module(_name)
# Garbage collections of children leave these objects out, and do not copy the pages that all share.
gc.collect()
gc.freeze()
