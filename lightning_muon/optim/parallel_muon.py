"""ParallelMuon: Muon for matrices that lie in shards on many ranks, AdamW for everything else.

Its base class has what FlexDeMo shares: routes, one plan on all ranks, and steps that all take or skip together.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import named_waits, together, warn_on_first_rank
from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast, drop_unreduced_gradients_of, profiled
from lightning_muon.config import (
    Algorithm,
    ComputeDtypeName,
    MuonConfig,
    MuonOptions,
    OptimizerConfig,
    from_arguments,
    takes_options,
)
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.optim import parameters
from lightning_muon.optim.gradients import GradientsAreNotFinite, agree_on_gradients, skipped_steps, skips_step
from lightning_muon.optim.matrix_step import Elementwise, MatrixStep, adamw_step_, orthogonalized_by
from lightning_muon.optim.parameters import completed_groups, understood, with_routes_of_now
from lightning_muon.optim.step_plan import make_step_plan, require_equal_parameters
from lightning_muon.params.layout import (
    Layout,
    PlacedState,
    RoutedParameter,
    group_by_mesh,
    neuron_dims,
    neuron_shape,
    parameters_of,
)
from lightning_muon.params.routing import Route, require_muon, routing_table
from lightning_muon.removed import removed
from lightning_muon.schedule.exchange import PlanOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# Keys of param groups of other optimizers, which would have no effect -> what is meant.
_OTHER_WORDS = {
    "learning_rate": "lr",
    "lrr": "lr",
    "wd": "weight_decay",
    "muon_lr": "muon_lr_factor",
    "use_muon": "algorithm='muon' or 'adamw'",
}


class PlannedOptimizer(torch.optim.Optimizer):
    """An optimizer that makes one plan with all ranks at its first step, and a new one when its parameters change.

    Its state is complete from the start, but made when it is first read: frameworks replace parameters after the
    optimizer was made. ``mesh`` is where plain tensors are replicated, if it is known; ``defaults`` are further entries
    of the param groups, which outweigh those of ``config``.
    """

    def __init__(
        self, params: nn.Module | Iterable[Any], config: MuonConfig, *, mesh: DeviceMesh | None, **defaults: Any
    ) -> None:
        self._options = config
        self._mesh = mesh
        self._module = params if isinstance(params, nn.Module) else None
        self._begin_anew(is_fresh=True)
        super().__init__(
            params.named_parameters() if isinstance(params, nn.Module) else params,
            {key: value for key, value in vars(config).items() if key in parameters.COMPARED} | defaults,
        )
        if self._module is not None:
            self._routed_parameters()

    def _begin_anew(self, *, is_fresh: bool) -> None:
        """Reset what is not pickled: plan, layout, and what was found out about parameters."""
        # What runs the plan, and the key of the parameters and options for which it was made.
        self._planned: MatrixStep | None = None
        self._planned_for: tuple[Any, ...] = ()
        self._checked_groups = parameters.CheckedGroups()
        # The routes that were found, and the algorithm of the group that each was found for.
        self._routes: dict[Tensor, Route] = {}
        self._routed_for: dict[Tensor, str] = {}
        self._completion, self._layout = self._new_state_and_layout()
        # Whether the state is still zeros that can be made again: no step was taken, and nothing loaded.
        self.is_fresh = is_fresh
        self._num_gradients = 0  # In the last step.
        # Set by a pipeline before each step: whether other stages have found a NaN or an Inf, so that all skip the
        # step, which resets it; a bool on the device.
        self.nonfinite_elsewhere: Tensor | None = None
        self.needs_matrices = True  # False for a stage of a pipeline, which may have no matrices.

    @classmethod
    def from_config(cls, params: Any, config: OptimizerConfig, **overrides: Any) -> Self:
        """An optimizer with these options, whose learning rate was chosen for AdamW; ``overrides`` win."""
        options: dict[str, Any] = vars(config) | {"muon_lr_factor": config.lr_factor_over_adamw}
        return cls(params, **(options | overrides))

    def route(self, module: nn.Module) -> None:
        """Take names and routes from ``module``; local. :meth:`attach` must follow before the first step."""
        self._module, self._routed_for = module, {}

    def attach(self, module: nn.Module, layout: Layout | None = None) -> None:
        """Take names and routes from ``module``, and create the state of every parameter now; local.

        Call it on each rank once the parameters have their final form (after ``fully_shard``). ``layout`` says where
        their parts and gradients lie; without it the tensors say so themselves. State that is laid out in another way
        is divided anew; that is collective over the mesh of the parameters.
        """
        self.route(module)
        if layout is not None and layout is not self._layout:
            saved = self.state_dict() if self._existing_state and not self.is_fresh else None
            self._existing_state.clear()
            self._layout, self._planned = layout, None
            if saved is not None:
                self.load_state_dict(saved)
        self._complete_state()

    @property
    def routes(self) -> list[Route]:
        """The route of each parameter, in the order of the param groups."""
        return [parameter.route for parameter in self._routed_parameters()]

    def frozen_routes(self) -> list[Route]:
        """Routes of the module's frozen parameters, which may be unfrozen and added to this optimizer; local."""
        frozen = [] if self._module is None else [p for p in self._module.parameters() if not p.requires_grad]
        group = {"params": frozen, "algorithm": "auto"}
        return list(parameters.routes_of([group], self._module, self._options).values()) if frozen else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the plan is made anew at the next step. Keys of others stay, but not one that resembles ours."""
        for key in map(str, param_group.keys() - {"params", *self.defaults}):
            if key in vars(self._options).keys() - {"fused"}:  # Of that name torch's AdamW has an option of a group.
                raise ValueError(f"{key} is an option of {type(self).__name__}, not of a param group")
            alike = difflib.get_close_matches(key.lower(), self.defaults, n=1, cutoff=0.85)
            meant = _OTHER_WORDS.get(key.lower()) or next((each for each in alike if each[0] == key[0].lower()), None)
            if why := removed(key) or (meant and f"there is no option {key!r}; did you mean {meant}?"):
                raise ValueError(f"{type(self).__name__}: a param group: {why}")
        group = self.defaults | param_group
        parameters.check_group_(group)
        given: list[Any] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        trained = list(filter(_is_number, given))
        if len(trained) < len(given):
            integers = f"{len(given) - len(trained)} parameters of integers (quantized weights)"
            warn_on_first_rank(f"{integers} are left out of {type(self).__name__}", stacklevel=4)
        are_named = self.param_groups and "param_names" in self.param_groups[0]
        if are_named and all(isinstance(each, Tensor) for each in trained):
            # Groups of torch have names all or none; those of a module got theirs from this class.
            named = () if self._module is None else self._module.named_parameters()
            names: dict[Tensor, str] = {each: name for name, each in named}
            number = len(self.param_groups)
            trained = [(names.get(each, f"{number}.{place}"), each) for place, each in enumerate(trained)]
        super().add_param_group(group | {"params": trained})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Collective over the meshes of the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with named_waits(late=self._planned is None):
                planned, gradients = self._agree()
            planned.run(self._exchange(planned, gradients), self.state)
            self._end_step(planned)
        except GradientsAreNotFinite as found:
            self._layout.forget(parameters_of(self))
            skips_step(self, found.names, most_in_a_row=self._options.max_skipped_steps)
        else:
            skips_step(self, ())
        finally:
            self.nonfinite_elsewhere = None
        return loss

    @property
    def has_momentum(self) -> bool:
        """Whether matrices keep a moving average of their gradients."""
        return True

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because a gradient had a NaN or an Inf."""
        return skipped_steps(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those that live outside of the tensors."""
        super().zero_grad(set_to_none)
        self._layout.forget(parameters_of(self))
        drop_unreduced_gradients_of(parameters_of(self))

    def _agree(self) -> tuple[MatrixStep, parameters.Gradients]:
        """Return the plan, a new one if any rank needs it, and gradients. Collective as :meth:`step` is."""
        planned = self._planned or self._make_plan()
        with profiled("agree", "gradients"):
            gradients = self._agree_on_gradients(planned)
        if gradients is None:
            planned = self._make_plan()
            gradients = self._agree_on_gradients(planned)
            assert gradients is not None, "parameters changed during the step"
        if len(gradients) < self._num_gradients or not gradients:
            parameters.require_those_of_module(self.param_groups, self._module, self._routes)
        if self.is_fresh and self._module is None and not gradients:
            warn_on_first_rank(
                f"no parameter of {type(self).__name__} has a gradient in its first step; where fully_shard or a new "
                "layer has put others into the module, make the optimizer afterwards",
                stacklevel=5,
            )
        self._num_gradients = len(gradients)
        self.is_fresh = False
        return planned, gradients

    def _exchange(self, planned: MatrixStep, gradients: parameters.Gradients) -> parameters.Gradients:
        """The gradients that the update uses. Collective as :meth:`step` is."""
        return gradients

    def _end_step(self, planned: MatrixStep) -> None:
        """End a step that has updated the parameters. Collective as :meth:`step` is."""
        self._layout.end_step()

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter, complete: zeros are made when it is first asked for, but not on the meta device."""
        if (self.is_fresh or not self._existing_state) and self._can_make_state():
            self._complete_state()
        return self._existing_state

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        # State without what the property adds to it.
        self._existing_state = state if isinstance(state, defaultdict) else defaultdict[Tensor, Any](dict, state)

    def _can_make_state(self) -> bool:
        """Whether some parameters have no state, and none is on the meta device; local."""
        given = parameters_of(self)
        return not all(each in self._existing_state for each in given) and not any(each.is_meta for each in given)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_options", "_mesh", "_module")
        return super().__getstate__() | {key: getattr(self, key) for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        if "state" in own:  # An ordinary attribute in torch.
            self.state = own.pop("state")  # pyright: ignore[reportIncompatibleVariableOverride]
        super().__setstate__(own)
        if "_layout" not in vars(self):  # A copy; torch's load_state_dict() calls this, too.
            self._begin_anew(is_fresh=False)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states; every parameter has a state, also before the first step.

        Collective over the mesh of parameters whose state is on one rank: all with ``sharding="zero2"``, matrices with
        ``normuon``.
        """
        self._complete_state()
        self._write_second_moments()
        packed = super().state_dict()
        given, layout = dict(enumerate(parameters_of(self))), self._layout
        states: dict[int, dict[str, Any]] = {number: dict(state) for number, state in packed["state"].items()}
        located = [(given[number], state) for number, state in states.items()]
        parameters.convert_(located, layout.saved, self._placed)
        return packed | {"state": states, "param_groups": list(map(parameters.as_saved, packed["param_groups"]))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; collective as :meth:`state_dict` is. Hyper-parameters that are not in it stay as they are.

        A state of whole tensors, which every rank has, is divided as the parameters are. One of ``torch.optim`` goes on
        by our names, and a matrix that has changed between Muon and AdamW with what the two have in common.

        Raises a ``ValueError`` for wrong hyper-parameters, entries or shapes; nothing has changed then.
        """
        keys = [(each, self._completion.keys(each)) for each in self._routed_parameters()]
        self._load(with_routes_of_now(understood(state_dict), keys))

    def _load(self, state_dict: dict[str, Any]) -> None:
        groups = completed_groups(state_dict["param_groups"], self.param_groups, self.defaults.keys())
        parameters.check_shapes(state_dict, self.param_groups, self._placed)
        super().load_state_dict({**state_dict, "param_groups": groups})
        self.is_fresh = False
        self._completion.made.clear()
        if self._planned is not None:
            self._planned.moments.outdate()
        given, states = parameters_of(self), self._existing_state
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, given, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                dtype = torch.float32 if key == parameters.SECOND_MOMENT else self._layout.dtype(parameter)
                if key != "step" and dtype != parameter.dtype:  # To which torch rounds it.
                    states[parameter][key] = value.to(parameter.device, dtype)
        located = [(each, states[each]) for each in given if each in states]
        parameters.convert_(located, self._layout.loaded, self._placed)

    def _placed(self, parameter: Tensor, key: str, state: Tensor) -> PlacedState:
        """How an entry of the state of a parameter is laid out; local."""
        if key != parameters.SECOND_MOMENT:
            return PlacedState(parameter, state, tuple(parameter.shape))
        self._find_routes()
        return PlacedState(parameter, state, *_neurons(parameter, self._routes[parameter]))

    def _new_state_and_layout(self) -> tuple[parameters.StateCompletion, Layout]:
        """What makes missing state, and the layout of the parameters until :meth:`attach` gives another one."""
        return parameters.StateCompletion(), Layout(self._mesh)

    def _settings(self) -> str:
        """Further settings, as text, that must be the same on all ranks."""
        return ""

    def _prepare(self, routed: Sequence[RoutedParameter]) -> None:
        """Prepare a plan for these parameters. Collective as :meth:`step` is."""

    def _write_second_moments(self) -> None:
        """Bring the second moments of NorMuon from their owners into the state. Collective as :meth:`step` is."""
        if self._planned is not None:
            self._planned.moments.write(self._existing_state, newer=self._completion.made)

    def _complete_state(self) -> None:
        self._completion.complete(self._routed_parameters(), self._existing_state)

    @property
    def _elementwise(self) -> Elementwise:
        """The function that updates the parameters that are no matrices."""
        return adamw_step_

    def summary(self) -> str:
        """Table of what runs on Muon, what on AdamW, and why."""
        routed = self._routed_parameters()
        return routing_table([(each.route, tuple(each.tensor.shape), not each.tensor.requires_grad) for each in routed])

    def _routed_parameters(self) -> list[RoutedParameter]:
        """Parameters with their routes; local."""
        self._find_routes()
        return [
            RoutedParameter(param, group, self._routes[param], self._layout)
            for group in self.param_groups
            for param in group["params"]
        ]

    def _find_routes(self) -> None:
        """Find all routes if a framework has swapped parameters, or a group has another ``algorithm``; local.

        State that nobody needs is dropped. Raises for parameters that cannot be trained.
        """
        groups, states = self.param_groups, self._existing_state
        current: dict[Tensor, str] = {param: group["algorithm"] for group in groups for param in group["params"]}
        if current == self._routed_for:
            return
        before, self._routes = self._routes, parameters.routes_of(groups, self._module, self._options)
        for parameter in [each for each in states if each not in current]:
            del states[parameter]
        for parameter in before.keys() & current.keys() & states.keys():
            if _neurons(parameter, before[parameter]) != _neurons(parameter, self._routes[parameter]):
                states[parameter].pop(parameters.SECOND_MOMENT, None)
        parameters.require_updatable(self._routes)
        self._routed_for = current

    def _key(self) -> tuple[Any, ...]:
        """A key that changes when the plan must be made anew."""
        params = [(id(group), id(p), p.requires_grad) for group in self.param_groups for p in group["params"]]
        kinds = [group.get(key) for group in self.param_groups for key in ("algorithm", "normuon", "orthogonalize")]
        return id(self._module), *kinds, *params

    def _make_plan(self) -> MatrixStep:
        """Make the plan. Collective over the meshes of the parameters."""
        parameters.require_those_of_module(self.param_groups, self._module, self._routes)
        meshes = group_by_mesh(parameters_of(self), self._layout)
        axes = [members.axes for members in meshes]
        routed = together(self._checked_parameters, axes)
        guessed = [p.route.name for p in routed if p.group["algorithm"] == "auto" and p.route.algorithm == "muon"]
        if guessed and self._module is None:
            warn_on_first_rank(
                f"{len(guessed)} parameters ({guessed[0]}, ...) are routed to Muon by their shape alone, embeddings "
                "and heads among them; pass the module, call optimizer.attach(module), or set algorithm= per group",
                stacklevel=4,
            )
        device = self._layout.local(routed[0].tensor).device
        wire_dtype, options = self._plan_options(device)
        settings = f"wire_dtype={wire_dtype} {self._settings()} {options}"
        require_equal_parameters(routed, meshes, settings, self._completion.made)
        together(lambda: self._try_functions(options.arithmetic, wire_dtype, device), axes)
        self._layout.watch([parameter.tensor for parameter in routed])
        self._write_second_moments()
        self._completion.settle(routed)
        self._prepare(routed)
        if self._planned is not None:
            self._planned.close()
        plan = make_step_plan(routed, meshes, options=options)
        self._planned_for = self._key()
        self._planned = MatrixStep(
            plan,
            self._existing_state,
            wire_dtype=wire_dtype,
            has_momentum=self.has_momentum,
            elementwise=self._elementwise,
        )
        return self._planned

    def _checked_parameters(self) -> list[RoutedParameter]:
        """Return the parameters, each with state; raise for wrong hyper-parameters and without a matrix. Local."""
        self._checked_groups.check(self.param_groups)
        routed = self._routed_parameters()
        # No error if the user sends every group to AdamW.
        if self.needs_matrices and any(group["algorithm"] != "adamw" for group in self.param_groups):
            require_muon(chain((parameter.route for parameter in routed), self.frozen_routes()))
        self._completion.complete(routed, self._existing_state)
        return routed

    def _try_functions(self, arithmetic: Arithmetic, dtype: torch.dtype, device: torch.device) -> None:
        """Raise for a function of a param group that cannot be called, or returns something else; local.

        In a step the owner alone would raise.
        """
        for group in self.param_groups:
            if callable(group["orthogonalize"]):
                example = torch.arange(6, dtype=dtype, device=device).view(1, 2, 3)
                newton_schulz = NewtonSchulzOptions.of(group).choice(2, 3, arithmetic)
                orthogonalized_by(group["orthogonalize"], example, newton_schulz, eps=group["eps"])

    def _plan_options(self, device: torch.device) -> tuple[torch.dtype, PlanOptions]:
        """The dtype in which matrices are sent, and the options of the plan; local."""
        arithmetic = Arithmetic(device.type, resolve_compute_dtype(self._options.compute_dtype, device))
        wire_dtype = _DTYPES.get(self._options.wire_dtype, arithmetic.dtype)
        if self._options.wire_dtype == "auto" and arithmetic.dtype == torch.float16:
            wire_dtype = torch.bfloat16
        found = {"itemsize": wire_dtype.itemsize, "arithmetic": arithmetic}
        return wire_dtype, from_arguments(PlanOptions, vars(self._options) | found)

    def _agree_on_gradients(self, planned: MatrixStep) -> parameters.Gradients | None:
        return agree_on_gradients(
            planned.plan,
            error_if_nonfinite=self._options.error_if_nonfinite,
            is_stale=self._is_stale(planned),
            nonfinite_elsewhere=self.nonfinite_elsewhere,
        )

    def _is_stale(self, planned: MatrixStep) -> bool:
        """Whether a new plan must be made, or a hyper-parameter is wrong; local."""
        try:
            self._checked_groups.check(self.param_groups)
        except Exception:  # Any, since anything may be compared with a number. The plan raises it on all ranks.
            return True
        is_complete = self._completion.is_complete(self._existing_state)
        return self._planned_for != self._key() or not is_complete or planned.moments.are_outdated


def without_matrices(parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """The ``parameters`` that none of ``optimizers`` orthogonalizes; local."""
    matrices = {
        parameter
        for optimizer in optimizers
        if isinstance(optimizer, PlannedOptimizer)
        for parameter, route in zip(parameters_of(optimizer), optimizer.routes, strict=True)
        if route.algorithm != "adamw"
    }
    return [parameter for parameter in parameters if parameter not in matrices]


def _is_number(given: Tensor | tuple[str, Tensor]) -> bool:
    """Whether a parameter, or a pair of a name and one, may be trained; local."""
    tensor = given[1] if isinstance(given, tuple) else given
    return tensor.is_floating_point() or tensor.is_complex()


def _neurons(parameter: Tensor, route: Route) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a tensor with a value for each neuron, and which dimensions of ``parameter`` it has."""
    shape = tuple(parameter.shape)
    return neuron_shape(shape, route), neuron_dims(shape, route)


def resolve_compute_dtype(name: ComputeDtypeName, device: torch.device) -> torch.dtype:
    """Dtype of Newton-Schulz; ``"auto"`` is bfloat16 where ``device`` multiplies it faster than float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type == "cpu" and cpu_multiplies_bfloat16_fast()
    return torch.bfloat16 if is_fast else torch.float32


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
