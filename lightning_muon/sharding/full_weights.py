"""Whole weights of a sharded model, under the names of the plain one."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_muon.params.uses import clean_name


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Whole weights and buffers on the CPU on rank 0, an empty dict elsewhere.

    Collective over all ranks of the mesh; every rank must call it. Names are those of the plain model, without what
    ``torch.compile`` adds; tied weights have all their names and one memory. A module without shards gives its ordinary
    state dict, in a program of several ranks on rank 0 only. As in ``Module.state_dict``, tensors that are whole and on
    the CPU already are not copied: clone them to keep them while training goes on.

    Example::

        state = lightning_muon.full_state_dict(model)  # on every rank
        if torch.distributed.get_rank() == 0:
            torch.save(state, "weights.pt")

    Args:
        module: A sharded model, one of its submodules, or a plain module. Do not pick a submodule with weights that are
            tied to others outside of it right after a forward pass without gradients: FSDP2 leaves such weights whole,
            in the dtype of the computation. (The strategy shards them again after each evaluation step.)
    """
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    first_names: dict[int, str] = {}
    # After the gathering, because it turns weights that a forward pass has left whole into shards again.
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    for name, tensor in ((clean_name(name), tensor) for name, tensor in named):
        if name in state:
            state[name] = state[first_names.setdefault(id(tensor), name)]
    return state  # type: ignore[return-value]
