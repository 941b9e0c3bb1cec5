"""FlexDeMo: hybrid sharding whose nodes exchange only the fast-moving components of their momenta."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.collectives import axis_group, host_group
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.config import takes_options
from lightning_muon.flexdemo.config import FlexDeMoConfig, FlexDeMoOptions
from lightning_muon.flexdemo.replicators import DiLoCo, LocalSteps
from lightning_muon.flexdemo.sync import NODES, DiLoCoSync, InterNodeSync, MomentumSync, Trained, check_equal
from lightning_muon.optim.matrix_step import Elementwise, MatrixStep, sgd_step_
from lightning_muon.optim.parallel_muon import PlannedOptimizer
from lightning_muon.optim.parameters import SECOND_MOMENT, Gradients, StateCompletion, as_saved, understood
from lightning_muon.params.layout import Layout, RoutedParameter, local_tensor, parameters_of
from lightning_muon.schedule.program import Op

_DEFAULTS = FlexDeMoConfig()
_OF_BASE = ("algorithm", "momentum", "nesterov")


@takes_options(FlexDeMoConfig)
class FlexDeMo(PlannedOptimizer):
    """Muon, AdamW or SGD on momenta of which the nodes send each other only a few components.

    Every rank keeps for its shard a residual, the part of the momentum that was not sent yet. With the gradient ``g``,
    the mean over the ranks of one node, a step computes ``residual <- decay * residual + g``. The replicator chooses
    components of the residual, for example the largest cosine coefficients of each 64 x 64 block. They are sent to the
    other nodes and subtracted from the residual. The average of what all nodes sent, transformed back, is the update
    that the base optimizer applies. Weights stay equal on all nodes, bit for bit.

    Parameters are sharded inside of a node only (``fully_shard(module, mesh=mesh["shard"])``), and all nodes begin
    with equal weights. ``step()``, ``state_dict()`` and ``load_state_dict()`` are collective over ``mesh``; every rank
    must call them. With one node nothing is sent, and the update is the gradient.

    Example::

        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = FlexDeMo(model, lr=1e-3, base="adamw", replicator=DCTTopK(top_k=8))
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()

    Args:
        params: A module, parameters, named parameters, or groups; as in :class:`~lightning_muon.ParallelMuon`.
        mesh: 2-D, with the axes ``("replicate", "shard")``: nodes, and the ranks of each. Needed as soon as there is
            more than one process.
        options: The fields of :class:`~lightning_muon.FlexDeMoConfig`.

    Source: From et al. 2025, arXiv:2502.06728, Algorithm 1; DeMo: Peng et al. 2024, arXiv:2411.19870.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = FlexDeMoConfig.lr,
        *,
        mesh: DeviceMesh | None = None,
        **options: Unpack[FlexDeMoOptions],
    ) -> None:
        self.config = FlexDeMoConfig(lr=lr, **options)  # type: ignore[arg-type]
        self._sync = make_sync(self.config, mesh)
        self._checked: MatrixStep | None = None
        without = {} if self.has_momentum else {"momentum": 0.0, "nesterov": False}
        super().__init__(
            params,
            self.config.inside_nodes,
            mesh=mesh,
            algorithm="auto" if self.config.base == "muon" else "adamw",
            num_exchanges=0,
            **without,
        )

    def use_mesh(self, mesh: DeviceMesh) -> None:
        """Take the nodes from ``mesh``; call it before any other method. Local."""
        if self._mesh is not None and self._mesh != mesh:
            raise ValueError(
                f"FlexDeMo was made for {self._mesh}, but the model is trained on {mesh}; leave out mesh=, or set the "
                "replicate_size and shard_size of the strategy to it"
            )
        self._mesh, self._sync = mesh, make_sync(self.config, mesh)
        self._completion, self._layout = self._new_state_and_layout()
        if self.is_fresh:
            self._existing_state.clear()  # The state of a single process.

    @override
    def attach(self, module: nn.Module, layout: Layout | None = None) -> None:
        if layout is not None:
            raise ValueError(
                "FlexDeMo takes gradients that FSDP2 has averaged inside of a node; set sharding='fsdp', and "
                "optimizer=FlexDeMoConfig(...) so that nodes are left to FlexDeMo"
            )
        self._require_mesh()
        super().attach(module)

    @property
    def has_momentum(self) -> bool:
        """Whether matrices keep a moving average of their gradients; not if nodes exchange momenta."""
        return self.config.has_inner_momentum

    @property
    def num_exchanges(self) -> int:
        """Number of steps that were taken."""
        return self.param_groups[0]["num_exchanges"]

    @property
    def sent_bytes_per_step(self) -> int:
        """Bytes that this rank sends to other nodes in a step; with DiLoCo on average."""
        return self._sync.sent_bytes(self._trained().trainable)

    @property
    def per_node(self) -> Collection[str]:
        """Saved state entries of shape (R, *shape), with an entry for each node."""
        return self._sync.per_node

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Context in which parameters are equal on all nodes: with DiLoCo they are those of the last average; local.

        Save or evaluate the model with these. FSDP2 gathers the changed weights if the optimizer knows the module; else
        call ``reshard()`` on the model before and after.
        """
        has_changed = self.show_common_weights()
        try:
            yield
        finally:
            if has_changed:
                self.show_own_weights()

    def show_common_weights(self, *, for_good: bool = False) -> bool:
        """Switch to :meth:`common_weights` until :meth:`show_own_weights`, or ``for_good``.

        Returns whether any weight has changed. A saved state still has the weights of the node. Local.
        """
        sync, own = self._sync, self._sync.own_weights
        if own:  # The parameters are the common ones already.
            sync.is_for_good |= for_good
            return False
        sync.is_for_good = for_good
        for parameter, weights in zip(parameters_of(self), sync.common(self._trained()), strict=False):
            if weights is not parameter:
                local = local_tensor(parameter.detach())
                own[parameter] = local.to("cpu" if for_good else local.device, copy=True)
                local.copy_(local_tensor(weights.detach()))
        return self._weights_have_changed(bool(own))

    def show_own_weights(self) -> bool:
        """Undo :meth:`show_common_weights`, unless it was for good; return whether parameters have changed. Local."""
        sync = self._sync
        if sync.is_for_good or not sync.own_weights:
            return False
        for parameter, weights in sync.own_weights.items():
            local_tensor(parameter.detach()).copy_(weights)
        self.forget_own_weights()
        return self._weights_have_changed()

    def forget_own_weights(self) -> None:
        """Keep the parameters as they are, and forget what :meth:`show_common_weights` has stored; local."""
        self._sync.own_weights = {}

    def summary(self) -> str:
        """Text: what applies the updates, what nodes send each other, and the table of parameters."""
        config = self.config
        nodes, sent = self._sync.num_nodes, self.sent_bytes_per_step
        summed = 8 * (nodes - 1) * sum(local_tensor(each).numel() for each in self._trained().trainable) / nodes
        head = (
            f"FlexDeMo: base {config.base}, {config.replicator}, {config.value_format}, {nodes} nodes, {sent:,} bytes "
            "to other nodes per rank and step"
        )
        head += f", 1/{summed / sent:.1f} of an all-reduce of float32 gradients" if sent else ""
        return head if config.base == "sgd" else f"{head}\n{super().summary()}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with what each node has of its own."""
        self._require_mesh()
        packed = super().state_dict()
        for number, parameter in enumerate(parameters_of(self)):
            packed["state"][number] |= self._sync.saved(parameter, self._existing_state[parameter])
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does; it may be that of another number of nodes (see docs/flexdemo.md)."""
        sync, self._planned = self._sync, None
        sync.check_saved(state_dict["state"].values(), state_dict["param_groups"])
        state_dict = understood(state_dict)
        # Loaded below: torch would round these to the dtype of the parameter.
        extra = {*sync.loads, *sync.per_node, SECOND_MOMENT}
        others = {
            number: {key: value for key, value in state.items() if key not in extra}
            for number, state in state_dict["state"].items()
        }
        # Keep the options of the base optimizer, which a loaded state must not change.
        own = [{key: group[key] for key in _OF_BASE} for group in self.param_groups]
        self._load({**state_dict, "state": others})
        for group, of_base in zip(self.param_groups, own, strict=True):
            group.update(of_base)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        with torch.no_grad():
            for number, parameter in zip(numbers, parameters_of(self), strict=True):
                sync.load(parameter, self._existing_state[parameter], state_dict["state"].get(number, {}))
        self._weights_have_changed()

    def _weights_have_changed(self, has_changed: bool = True) -> bool:
        """Let the next forward gather the current weights, if they have changed; local."""
        if has_changed and self._module is not None:
            free_unsharded(self._module)
        return has_changed

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"config": self.config, "_checked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict() calls this, too, with a state that has no config.
        if "config" in state:
            state = state | {"_sync": make_sync(state["config"], state["_mesh"])}
        super().__setstate__(state)

    def _new_state_and_layout(self) -> tuple[StateCompletion, Layout]:
        return self._sync, self._sync.layout

    def _require_mesh(self) -> None:
        if self._mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(f"FlexDeMo needs to know the nodes: FlexDeMo(..., mesh={NODES})")

    def _trained(self) -> Trained:
        return Trained(parameters_of(self), self._existing_state)

    def _can_make_state(self) -> bool:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        return (is_alone or self._mesh is not None) and super()._can_make_state()

    def _prepare(self, parameters: Sequence[RoutedParameter]) -> None:
        self._require_mesh()
        self._sync.plan(self._trained(), self.num_exchanges)

    def _exchange(self, planned: MatrixStep, gradients: Gradients) -> Gradients:
        with planned.executor.measured(Op(kind="nodes", key="all", rank=0)):
            return self._sync.updates(self._trained(), gradients, self.num_exchanges)

    @property
    def _elementwise(self) -> Elementwise:
        return sgd_step_ if self.config.base == "sgd" else super()._elementwise

    def _end_step(self, planned: MatrixStep) -> None:
        super()._end_step(planned)
        count = self.num_exchanges + 1
        for group in self.param_groups:
            group["num_exchanges"] = count
        self._sync.finish(self._trained(), count)
        every = self.config.check_every
        # Also right after a new plan, so that weights that were never equal are found at once.
        is_due = every > 0 and (count % every == 0 or self._checked is not planned)
        if is_due and self._mesh is not None:
            names, common = planned.plan.names, self._sync.common(self._trained())
            named = [(names[p], tensor) for p, tensor in zip(parameters_of(self), common, strict=False)]
            check_equal(named, host_group(axis_group(self._mesh, (0, 1))))
            self._checked = planned

    def _settings(self) -> str:
        return f"{super()._settings()} {as_saved(vars(self.config))} after {self.num_exchanges} steps"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; most options of FlexDeMo cannot differ between groups."""
        for key in sorted(vars(self.config).keys() & param_group.keys() - self.defaults.keys()):
            raise ValueError(f"{key} is an option of FlexDeMo, not of a param group")
        if param_group.get("normuon"):
            raise ValueError("normuon is an option of ParallelMuon, which FlexDeMo does not have; remove it")
        super().add_param_group(param_group)


def make_sync(config: FlexDeMoConfig, mesh: DeviceMesh | None) -> InterNodeSync:
    """Make the object that synchronizes the nodes of ``mesh`` with these options."""
    if isinstance(config.replicator, DiLoCo):
        return DiLoCoSync(config, mesh)
    return InterNodeSync(config, mesh) if isinstance(config.replicator, LocalSteps) else MomentumSync(config, mesh)
