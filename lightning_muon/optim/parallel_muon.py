"""ParallelMuon: Muon for matrices that lie in shards on many ranks, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.config import AdjustLr, Algorithm, DtypeName, MuonConfig, check_hyperparameters
from lightning_muon.optim.binding import Binding, BoundParameter, bind, local_tensor
from lightning_muon.optim.dtypes import check_dtypes, resolve_compute_dtype, resolve_wire_dtype
from lightning_muon.optim.elementwise import adamw_step_, init_adamw_state
from lightning_muon.optim.gradients import local_gradients
from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.optim.routes import routes_of
from lightning_muon.params.report import routing_table
from lightning_muon.params.routing import Route, require_muon

_GROUP_KEYS = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    *("betas", "adamw_eps"),
)
_ALGORITHMS = ("auto", "muon", "adamw")


class ParallelMuon(torch.optim.Optimizer):
    """Muon whose Newton-Schulz runs once per matrix, on one owner rank, with AdamW for the rest.

    Works on plain tensors and on replicated or FSDP2-sharded DTensors (the mesh is read off them). Momentum stays on
    the shards. Per chunk of matrices: momentum, uneven all-to-all to the owners, Newton-Schulz there, all-to-all back,
    weight decay and update on the shards; the traffic of one chunk hides behind the arithmetic of another.

    ``step()`` is collective over the meshes of the parameters; every rank of them must call it. A gradient that only
    some ranks have counts as zero on the others; one that no rank has leaves parameter and state as they are.

    Example::

        model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = ParallelMuon(model, lr=1e-3)
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        print(optimizer.summary())

    Args:
        params: A module (its types, ties and uses decide what is a matrix), parameters, named parameters, or groups.
            Without a module the number of dimensions decides alone, until :meth:`attach` is called.
        lr: Learning rate. For this and the other hyper-parameters see :class:`~lightning_muon.config.MuonConfig`.
        weight_decay: Decoupled weight decay.
        momentum: Decay of the moving average of gradients.
        nesterov: Orthogonalize the look-ahead.
        ns_coefficients: Newton-Schulz polynomial.
        eps: Lower bound of the norm before Newton-Schulz.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: Rule of the learning rate per shape; ``None`` means ``"original"``, as in ``torch.optim.Muon``.
        algorithm: ``"auto"`` routes each parameter; ``"muon"`` and ``"adamw"`` force a whole group.
        betas: Of AdamW.
        adamw_eps: Of AdamW.
        mesh: 1-D or 2-D mesh on which the plain tensors in ``params`` are replicated with equal gradients (as after a
            DDP backward), so that the ranks divide the work. Without it plain tensors are local to their process.
        compute_dtype: Of Newton-Schulz.
        wire_dtype: Of what travels.
        chunk_bytes: Upper bound of the matrices that travel together.
        adamw_patterns: Names that AdamW takes.
        muon_patterns: Names that Muon takes.
        fused: Names of fused weights and their parts.
        error_if_nonfinite: Raise :class:`~lightning_muon.errors.NonFiniteGradientError` on all ranks before anything
            changes, when a gradient has a NaN or Inf. Costs one pass over the gradients and one wait of the host.

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
        nesterov: bool = MuonConfig.nesterov,
        ns_coefficients: tuple[float, float, float] = MuonConfig.ns_coefficients,
        eps: float = MuonConfig.eps,
        ns_steps: int = MuonConfig.ns_steps,
        adjust_lr_fn: AdjustLr | None = MuonConfig.adjust_lr_fn,
        algorithm: Algorithm = "auto",
        betas: tuple[float, float] = MuonConfig.betas,
        adamw_eps: float = MuonConfig.adamw_eps,
        mesh: DeviceMesh | None = None,
        compute_dtype: DtypeName = MuonConfig.compute_dtype,
        wire_dtype: DtypeName = MuonConfig.wire_dtype,
        chunk_bytes: int = MuonConfig.chunk_bytes,
        adamw_patterns: Sequence[str] = MuonConfig.adamw_patterns,
        muon_patterns: Sequence[str] = MuonConfig.muon_patterns,
        fused: Mapping[str, int | tuple[int, ...]] | None = None,
        error_if_nonfinite: bool = MuonConfig.error_if_nonfinite,
    ) -> None:
        values = locals()
        check_dtypes(compute_dtype, wire_dtype)
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        defaults = {key: values[key] for key in _GROUP_KEYS} | {"algorithm": algorithm}
        self._mesh = mesh
        self._dtype_names = (compute_dtype, wire_dtype)
        self._chunk_bytes = chunk_bytes
        self._error_if_nonfinite = error_if_nonfinite
        self._routing = {"adamw_patterns": adamw_patterns, "muon_patterns": muon_patterns, "fused": fused}
        self._module = params if isinstance(params, nn.Module) else None
        self._bound: tuple[list[tuple[int, bool]], Binding, MatrixStep] | None = None
        super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)

    @classmethod
    def from_config(cls, params: Any, config: MuonConfig, **overrides: Any) -> ParallelMuon:
        """An optimizer with the options of ``config``; ``overrides`` are further arguments of the constructor."""
        return cls(params, **(vars(config) | overrides))

    def attach(self, module: nn.Module) -> None:
        """Take names and routes from ``module``, and create the state of every parameter now.

        Call it on each rank once the parameters have their final form (after ``fully_shard``). No communication.
        """
        self._module = module
        self._bound = None
        self._init_state(self._bind_parameters())

    @property
    def routes(self) -> list[Route]:
        """What each parameter is, in the order of the param groups."""
        return [parameter.route for parameter in self._bind_parameters()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the plan is made anew at the next step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["adjust_lr_fn"] is None:
            group["adjust_lr_fn"] = "original"
        check_hyperparameters(group)
        if group["algorithm"] not in _ALGORITHMS:
            raise ValueError(f"algorithm must be one of {_ALGORITHMS}, got {group['algorithm']!r}")
        self._bound = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Collective over the meshes of the parameters; every rank of them must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        binding, matrix_step = self._bind()
        gradients = local_gradients(binding, error_if_nonfinite=self._error_if_nonfinite)
        matrix_step.run(gradients, self.state, meanwhile=lambda: self._step_elementwise(binding, gradients))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As in torch; the state of every parameter is there also before the first step."""
        self._init_state(self._bind_parameters())
        return super().state_dict()

    def summary(self) -> str:
        """Table of what runs on Muon, what on AdamW, and why."""
        rows = [(bound.route, bound.shape, not bound.tensor.requires_grad) for bound in self._bind_parameters()]
        return routing_table(rows)

    def _bind_parameters(self) -> list[BoundParameter]:
        """Parameters with their routes. Made anew each time: frameworks swap parameters (fully_shard, Accelerate)."""
        routes = routes_of(self.param_groups, self._module, **self._routing)
        return [
            BoundParameter(parameter, group, routes[parameter], self._mesh)
            for group in self.param_groups
            for parameter in group["params"]
        ]

    def _bind(self) -> tuple[Binding, MatrixStep]:
        """The plan; made at the first step, and again when parameters or their ``requires_grad`` change."""
        key = [(id(param), param.requires_grad) for group in self.param_groups for param in group["params"]]
        if self._bound is not None and self._bound[0] == key:
            return self._bound[1:]
        parameters = self._bind_parameters()
        require_muon(parameter.route for parameter in parameters)
        self._init_state(parameters)
        device = local_tensor(parameters[0].tensor).device
        compute_dtype = resolve_compute_dtype(self._dtype_names[0], device)
        wire_dtype = resolve_wire_dtype(self._dtype_names[1], compute_dtype)
        binding = bind(
            parameters,
            itemsize=wire_dtype.itemsize,
            chunk_bytes=self._chunk_bytes,
            settings=f"compute_dtype={compute_dtype} wire_dtype={wire_dtype} chunk_bytes={self._chunk_bytes}",
        )
        step = MatrixStep(binding.exchange_groups, wire_dtype=wire_dtype, compute_dtype=compute_dtype, device=device)
        self._bound = (key, binding, step)
        return binding, step

    def _init_state(self, parameters: Sequence[BoundParameter]) -> None:
        """Zero state for each parameter that has none, frozen ones too, so that all ranks have equal keys."""
        for parameter in parameters:
            state = self.state[parameter.tensor]
            if parameter.route.algorithm == "muon" and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.tensor, memory_format=torch.preserve_format)
            elif parameter.route.algorithm == "adamw" and "exp_avg" not in state:
                state.update(init_adamw_state(parameter.tensor))

    def _step_elementwise(self, binding: Binding, gradients: dict[Tensor, Tensor]) -> None:
        by_group: dict[int, list[BoundParameter]] = {}
        for parameter in binding.parameters:
            if parameter.route.algorithm == "adamw" and parameter.tensor in gradients:
                by_group.setdefault(id(parameter.group), []).append(parameter)
        for members in by_group.values():
            tensors = [member.tensor for member in members]
            adamw_step_(
                [local_tensor(tensor) for tensor in tensors],
                [gradients[tensor] for tensor in tensors],
                [self.state[tensor] for tensor in tensors],
                members[0].group,
            )
