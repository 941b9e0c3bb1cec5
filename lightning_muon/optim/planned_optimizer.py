"""What ParallelMuon and FlexDeMo share: routes, one plan on all ranks, and steps that all take or skip together."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import PrivateGroups
from lightning_muon.config import (
    Assignment,
    Dedupe,
    DtypeName,
    Overlap,
    check_flag,
    check_fused,
    check_plan_options,
)
from lightning_muon.grad_sync.finite import FiniteCheck
from lightning_muon.optim.binding import Binding, BoundParameter, CheckedGroups, PlanOptions, bind, check_group_
from lightning_muon.optim.dtypes import check_dtypes, resolve_compute_dtype, resolve_wire_dtype
from lightning_muon.optim.early import SentEarly
from lightning_muon.optim.elementwise import step_elementwise_
from lightning_muon.optim.gradients import Agreement, EarlyGathersAreVoid, GradientsAreNotFinite, agree_on_gradients
from lightning_muon.optim.matrix_step import Gradients, MatrixStep
from lightning_muon.optim.meshes import fail_on_all_meshes, group_by_mesh
from lightning_muon.optim.routes import check_memory, routes_of, warn_of_frozen_gradients, warn_of_shapes
from lightning_muon.optim.state import convert_, lost_on_some, state_keys, zero_state
from lightning_muon.params.layout import Layout, TensorLayout
from lightning_muon.params.report import routing_table
from lightning_muon.params.routing import Route, require_muon
from lightning_muon.sharding.runtime import forget_unreduced


@dataclass(frozen=True, kw_only=True)
class PlannedOptions:
    """What is the same for all param groups; see :class:`~lightning_muon.config.MuonConfig`."""

    mesh: DeviceMesh | None
    compute_dtype: DtypeName
    wire_dtype: DtypeName
    chunk_bytes: int
    assignment: Assignment
    dedupe: Dedupe
    overlap: Overlap
    look_ahead: int
    adamw_patterns: Sequence[str]
    muon_patterns: Sequence[str]
    fused: Mapping[str, int | tuple[int, ...]] | None
    error_if_nonfinite: bool

    def __post_init__(self) -> None:
        check_dtypes(self.compute_dtype, self.wire_dtype)
        check_plan_options(vars(self))
        check_fused(self.fused or {})
        check_flag("error_if_nonfinite", self.error_if_nonfinite)

    def plan_options(self, wire_dtype: torch.dtype, device: torch.device) -> PlanOptions:
        """What the planner needs of this."""
        return PlanOptions(
            itemsize=wire_dtype.itemsize,
            device_type=device.type,
            chunk_bytes=self.chunk_bytes,
            assignment=self.assignment,
            dedupe=self.dedupe,
            look_ahead=self.look_ahead,
            overlap=self.overlap,
        )


@dataclass(frozen=True, eq=False)
class Bound:
    """The plan, and the state of the optimizer (``key``) that it was made for."""

    key: tuple[Any, ...]
    binding: Binding
    matrix_step: MatrixStep
    early: SentEarly | None
    state_keys: tuple[tuple[Tensor, frozenset[str]], ...]


class PlannedOptimizer(torch.optim.Optimizer):
    """An optimizer that makes one plan with all ranks at its first step, and a new one when its parameters change.

    ``step()`` is collective over the meshes of the parameters; every rank of them must call it. A gradient that only
    some ranks have counts as zero on the others; one that no rank has leaves parameter and state as they are.

    Args:
        params: As in :class:`~lightning_muon.ParallelMuon`.
        defaults: Hyper-parameters of the param groups.
        options: What is the same for all param groups.
        layout: Says where the parts of the parameters lie.
        max_skipped_steps: So many steps in a row are skipped where a gradient has a NaN or an Inf.

    Attributes:
        has_momentum: Whether matrices keep a moving average of their gradients.
    """

    has_momentum: ClassVar[bool] = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        defaults: dict[str, Any],
        options: PlannedOptions,
        *,
        layout: Layout,
        max_skipped_steps: int,
    ) -> None:
        self._options = options
        self._module = params if isinstance(params, nn.Module) else None
        # With the algorithm of the group that each was found for.
        self._routes: dict[Tensor, tuple[str, Route]] = {}
        self._bound: Bound | None = None
        self._checked_groups = CheckedGroups()
        # Parameters for which zero state was made since the last plan.
        self._made_state: set[Tensor] = set()
        self._private_groups = PrivateGroups()
        self._layout = layout
        # Whether the state is still as it was made.
        self._is_fresh = True
        self._finite_check = FiniteCheck(max_skipped_steps)
        super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)
        if self._module is not None:
            self._bind_parameters()

    def route(self, module: nn.Module) -> None:
        """Take names and routes from ``module``; local. :meth:`attach` must follow before the first step."""
        self._module = module
        self._routes = {}

    def attach(self, module: nn.Module, layout: Layout | None = None) -> None:
        """Take names and routes from ``module``, and create the state of every parameter now.

        Call it on each rank once the parameters have their final form (after ``fully_shard``). No communication.

        Args:
            module: Holds the parameters.
            layout: Says where the parts of the parameters lie, and where their gradients are found. Without it the
                tensors say so themselves.

        Raises:
            RuntimeError: If there is state already, laid out in another way.
        """
        self.route(module)
        if layout is not None and layout is not self._layout:
            if self._is_fresh:
                self._existing_state.clear()
            if self._existing_state:
                raise RuntimeError(
                    f"{type(self).__name__} has state already, which cannot be divided anew; attach it to the model "
                    "before its first step, and load a state_dict afterwards"
                )
            self._layout, self._bound = layout, None
        self._init_state(self._bind_parameters())

    @property
    def routes(self) -> list[Route]:
        """What each parameter is, in the order of the param groups."""
        return [parameter.route for parameter in self._bind_parameters()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the plan is made anew at the next step."""
        group = self.defaults | param_group
        check_group_(group)
        super().add_param_group(group)

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """As in torch, and complete from the start: zeros are made when it is first asked for.

        ``torch.distributed.checkpoint.state_dict`` has an optimizer without state take a step, to make it. Of
        parameters on the meta device, which have no final form yet, there is none.
        """
        if (self._is_fresh or not self._existing_state) and self._can_make_state():
            self._init_state(self._bind_parameters())
        return self._existing_state

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        self.__dict__["state"] = state if isinstance(state, defaultdict) else defaultdict(dict, state)

    @property
    def _existing_state(self) -> defaultdict[Tensor, Any]:
        """State without what :attr:`state` adds to it."""
        return self.__dict__["state"]

    @property
    def is_fresh(self) -> bool:
        """Whether the state is still the zeros that it was made of, since no step was taken and nothing loaded."""
        return self._is_fresh

    def _can_make_state(self) -> bool:
        """Whether the parameters are such that state can be laid out like them, and some have none; local."""
        parameters = [param for group in self.param_groups for param in group["params"]]
        has_all = all(param in self._existing_state for param in parameters)
        return not has_all and not any(param.is_meta for param in parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Collective over the meshes of the parameters; every rank of them must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except GradientsAreNotFinite as found:
            self._layout.forget([param for group in self.param_groups for param in group["params"]])
            self._finite_check.observe(found.names)
        else:
            self._finite_check.observe(())
        return loss

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient had a NaN or an Inf."""
        return self._finite_check.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; gradients that live outside of the tensors are forgotten, too."""
        super().zero_grad(set_to_none)
        parameters = [param for group in self.param_groups for param in group["params"]]
        self._layout.forget(parameters)
        if self._module is not None:
            forget_unreduced(self._module, parameters)

    def _step(self) -> None:
        bound = self._bound or self._bind()
        agreed = self._agree_on_gradients(bound)
        if agreed is None:
            bound = self._bind()
            agreed = self._agree_on_gradients(bound)
            assert agreed is not None, "parameters changed during the step"
        try:
            self._run(bound, agreed)
        except EarlyGathersAreVoid as void:
            # Found out on the device, with nothing changed yet: once more, without what was sent early.
            assert bound.early is not None
            bound.early.failed(void.keys)
            self._run(bound, replace(agreed, valid_early=frozenset(), verdict=None))

    def _run(self, bound: Bound, agreed: Agreement) -> None:
        received = self._received(bound, agreed)
        taking_part = [
            parameter.tensor for parameter in bound.binding.parameters if parameter.tensor in received.gradients
        ]
        self._is_fresh = False
        self._layout.begin_step(taking_part)
        bound.matrix_step.run(
            received.gradients,
            self.state,
            adamw=lambda: self._step_elementwise(bound.binding, received.gradients),
            valid_early=received.valid_early,
            verdict=received.verdict,
        )
        self._layout.end_step()
        if bound.early is not None:
            bound.early.succeeded(agreed.valid_early)

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, with what this class adds; the plan is made anew."""
        own = {"_options": self._options, "_module": self._module, "_routes": self._routes, "_bound": None}
        own["_finite_check"] = self._finite_check
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in torch; hyper-parameters that another optimizer's state lacks get their defaults."""
        super().__setstate__(state)
        self.__dict__.setdefault("_private_groups", PrivateGroups())
        self.__dict__.setdefault("_layout", self._own_layout())
        self.__dict__.setdefault("_is_fresh", False)
        self.__dict__.setdefault("_checked_groups", CheckedGroups())
        self.__dict__.setdefault("_made_state", set())
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; the state of every parameter is there also before the first step.

        Collective over the mesh of parameters whose state is divided (``sharding="zero2"``).
        """
        self._init_state(self._bind_parameters())
        packed = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        packed["state"] = {number: dict(state) for number, state in packed["state"].items()}
        convert_([(parameters[number], state) for number, state in packed["state"].items()], self._layout.saved)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; collective as :meth:`state_dict` is.

        Hyper-parameters that another optimizer's state lacks stay as they are.

        Raises:
            ValueError: If a hyper-parameter is out of range; nothing has changed then.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for loaded, own in zip(groups, self.param_groups, strict=False):
            loaded |= {key: own[key] for key in self.defaults if key in own and key not in loaded}
            check_group_(loaded)
        super().load_state_dict({**state_dict, "param_groups": groups})
        self._is_fresh = False
        self._made_state.clear()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        states = self._existing_state
        convert_(
            [(parameter, states[parameter]) for parameter in parameters if parameter in states], self._layout.loaded
        )

    def _own_layout(self) -> Layout:
        """Where the parts of the parameters lie as long as nobody else says so."""
        return TensorLayout(self._options.mesh)

    def _settings(self) -> str:
        """What else must be the same on all ranks."""
        return ""

    def _early(self, binding: Binding, step: MatrixStep) -> SentEarly | None:
        """What is sent while backward still runs, for a new plan.

        Collective as :meth:`step` is; every rank must call it.
        """
        del binding, step
        return None

    def _received(self, bound: Bound, agreed: Agreement) -> Agreement:
        """What the update is made of, from what all ranks know of the gradients.

        Collective as :meth:`step` is; every rank must call it.
        """
        del bound
        return agreed

    def _init_state(self, parameters: Sequence[BoundParameter]) -> None:
        """Zero state for each parameter that lacks any of it, frozen ones too, so that all ranks have equal keys; local."""
        for parameter in parameters:
            if not self._existing_state[parameter.tensor].keys() >= self._state_keys(parameter):
                self._made_state.add(parameter.tensor)
                self._make_state(parameter)

    def _state_keys(self, parameter: BoundParameter) -> frozenset[str]:
        """What the state of a parameter must have."""
        return state_keys(parameter.route.algorithm)

    def _make_state(self, parameter: BoundParameter) -> None:
        """Zero state in the place of what there is of it; local."""
        self._existing_state[parameter.tensor].update(zero_state(parameter))

    def _begin_anew_together(self, binding: Binding) -> None:
        """Zero state on all ranks for each parameter for which some of them had to make it.

        Collective over the meshes of the parameters; every rank of them must call it.
        """
        lost = lost_on_some(self._made_state, binding.meshes)
        for tensor in lost:
            self._existing_state.pop(tensor, None)
        self._init_state([parameter for parameter in binding.parameters if parameter.tensor in lost])
        self._made_state.clear()
        if lost and dist.get_rank() == 0:
            warnings.warn(
                f"some ranks had no optimizer state for {len(lost)} parameters ({binding.names[lost[0]]}, ...), so all "
                "ranks begin with zeros for them; clear or load state on all ranks alike",
                stacklevel=2,
            )

    def _step_elementwise(self, binding: Binding, gradients: Gradients) -> None:
        """Update the parameters that are no matrices; local."""
        step_elementwise_(binding, gradients, self.state)

    def summary(self) -> str:
        """Table of what runs on Muon, what on AdamW, and why."""
        rows = [(bound.route, bound.shape, not bound.tensor.requires_grad) for bound in self._bind_parameters()]
        return routing_table(rows)

    def _bind_parameters(self) -> list[BoundParameter]:
        """Parameters with their routes, which are looked up again when a framework has swapped parameters."""
        current = {param: group["algorithm"] for group in self.param_groups for param in group["params"]}
        if any(param not in self._routes or self._routes[param][0] != now for param, now in current.items()):
            options = self._options
            found = routes_of(
                self.param_groups,
                self._module,
                adamw_patterns=options.adamw_patterns,
                muon_patterns=options.muon_patterns,
                fused=options.fused,
            )
            before = self._routes
            self._routes = {
                param: before[param] if param in before and before[param][0] == now else (now, found[param])
                for param, now in current.items()
            }
            self._forget_replaced(before)
        return [
            BoundParameter(param, group, self._routes[param][1], self._layout)
            for group in self.param_groups
            for param in group["params"]
        ]

    def _forget_replaced(self, before: Mapping[Tensor, tuple[str, Route]]) -> None:
        """Drop the state of parameters that a framework has replaced, which torch could not save, and what is for
        another algorithm than that of now.
        """
        states = self._existing_state
        for param in [param for param in states if param not in self._routes]:
            del states[param]
        for param in before.keys() & self._routes.keys() & states.keys():
            was, now = before[param][1].algorithm, self._routes[param][1].algorithm
            for key in state_keys(was) - state_keys(now):
                states[param].pop(key, None)

    def _key(self) -> tuple[Any, ...]:
        """Changes when the plan must be made anew."""
        params = [(id(group), id(p), p.requires_grad) for group in self.param_groups for p in group["params"]]
        return id(self._module), *(group.get("algorithm") for group in self.param_groups), *params

    def _is_stale(self, bound: Bound) -> bool:
        """Whether this rank needs a new plan, also where it will fail, so that all ranks do; local."""
        states, nothing = self._existing_state, dict[str, Any]()
        return (
            bool(self._made_state)
            or bound.key != self._key()
            or not self._checked_groups.are_right(self.param_groups)
            or not all(states.get(tensor, nothing).keys() >= keys for tensor, keys in bound.state_keys)
        )

    def _bind(self) -> Bound:
        """Make the plan. Collective over the meshes of the parameters; every rank of them must call it."""
        options = self._options
        meshes = group_by_mesh([param for group in self.param_groups for param in group["params"]], self._layout)
        parameters: list[BoundParameter] = []
        error: Exception | None = None
        try:
            self._checked_groups.check(self.param_groups)
            parameters = self._bind_parameters()
            check_memory(parameters)
            # A user who sends every group to AdamW means it.
            if any(group["algorithm"] != "adamw" for group in self.param_groups):
                require_muon(parameter.route for parameter in parameters)
            self._init_state(parameters)
        except Exception as problem:
            error = problem
        fail_on_all_meshes(error, meshes)
        if self._module is None:
            warn_of_shapes(parameters)
        warn_of_frozen_gradients(parameters)
        device = parameters[0].local.device
        compute_dtype = resolve_compute_dtype(options.compute_dtype, device)
        wire_dtype = resolve_wire_dtype(options.wire_dtype, compute_dtype)
        plan_options = options.plan_options(wire_dtype, device)
        settings = f"compute_dtype={compute_dtype} wire_dtype={wire_dtype} {self._settings()}"
        binding = bind(parameters, meshes, self._private_groups, options=plan_options, settings=settings)
        step = MatrixStep(
            binding.exchange_groups,
            options=plan_options,
            wire_dtype=wire_dtype,
            compute_dtype=compute_dtype,
            layout=self._layout,
            device=device,
            has_momentum=self.has_momentum,
        )
        if self._bound is not None and self._bound.early is not None:
            self._bound.early.close()
        self._begin_anew_together(binding)
        needed = tuple((parameter.tensor, self._state_keys(parameter)) for parameter in parameters)
        self._bound = Bound(self._key(), binding, step, self._early(binding, step), needed)
        return self._bound

    def _agree_on_gradients(self, bound: Bound) -> Agreement | None:
        return agree_on_gradients(
            bound.binding,
            bound.early,
            error_if_nonfinite=self._options.error_if_nonfinite,
            is_stale=self._is_stale(bound),
        )
