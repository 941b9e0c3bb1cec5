"""ParallelMuon: Muon for matrices that lie in shards on many ranks, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.config import Algorithm, MuonConfig, MuonOptions, takes_options
from lightning_muon.optim.planned_optimizer import PlannedOptimizer


@takes_options(MuonConfig)
class ParallelMuon(PlannedOptimizer):
    """Muon whose Newton-Schulz runs once per matrix, on one owner rank, with AdamW for the rest.

    Works on plain tensors and on replicated or FSDP2-sharded DTensors (the mesh is read off them). Momentum stays on
    the shards. Per bucket of matrices: momentum, uneven all-to-all to the owners, Newton-Schulz there, all-to-all back,
    weight decay and update on the shards; the traffic of one bucket hides behind the arithmetic of another.

    ``step()`` is collective over the meshes of the parameters. A gradient that only some ranks have counts as zero on
    the others; one that no rank has leaves parameter and state as they are. ``adjust_lr_fn=None`` means ``"original"``,
    as in ``torch.optim.Muon``.

    Example::

        model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = ParallelMuon(model, lr=1e-3)
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        print(optimizer.summary())

    Args:
        params: A module (its types, ties and uses decide what is a matrix), parameters, named parameters, or groups.
            Without a module the number of dimensions decides alone, until :meth:`attach` is called.
        algorithm: ``"auto"`` routes each parameter; ``"muon"`` and ``"adamw"`` force a whole group.
        mesh: 1-D or 2-D mesh on which the plain tensors in ``params`` are replicated with equal gradients (as after a
            DDP backward), so that the ranks divide the work. Without it plain tensors are local to their process.
        options: The fields of :class:`~lightning_muon.MuonConfig`.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; ownership of whole matrices after Liu et al.
    2025, arXiv:2502.16982, section 2.3.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = MuonConfig.lr,
        weight_decay: float = MuonConfig.weight_decay,
        momentum: float = MuonConfig.momentum,
        *,
        algorithm: Algorithm = "auto",
        mesh: DeviceMesh | None = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        if options.get("adjust_lr_fn", "") is None:  # pyright: ignore[reportUnnecessaryComparison]
            options["adjust_lr_fn"] = "original"  # What None means to torch.optim.Muon.
        config = MuonConfig(lr=lr, weight_decay=weight_decay, momentum=momentum, **options)  # type: ignore[arg-type]
        super().__init__(params, config, mesh=mesh, algorithm=algorithm)
