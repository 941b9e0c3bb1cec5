"""FlexDeMo: hybrid sharding whose nodes exchange only the fast-moving components of their momenta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.mesh import PrivateGroups, axis_group, host_group
from lightning_muon.config import AdjustLr, DtypeName, MuonConfig
from lightning_muon.optim.binding import COMPARED, Binding, BoundParameter
from lightning_muon.optim.elementwise import init_adamw_state, step_sgd_
from lightning_muon.optim.flexdemo.bucket import Bucket
from lightning_muon.optim.flexdemo.config import (
    Base,
    Compat,
    ExchangeOverlap,
    FlexDeMoConfig,
    Merge,
    ValueFormatName,
)
from lightning_muon.optim.flexdemo.drift import check_equal_on_nodes
from lightning_muon.optim.flexdemo.exchange import Nodes
from lightning_muon.optim.flexdemo.layout import NodeLayout, local_of_node, node_mesh, part_of
from lightning_muon.optim.flexdemo.parts import BucketPlan, Shape, plan_buckets, sent_bytes
from lightning_muon.optim.flexdemo.replication import EarlyExchanges, InFlight, Replication, Rules, Updates
from lightning_muon.optim.gradients import Agreement
from lightning_muon.optim.matrix_step import Gradients, MatrixStep
from lightning_muon.optim.planned_optimizer import Bound, PlannedOptimizer, PlannedOptions
from lightning_muon.params.layout import Layout, TensorLayout, local_tensor
from lightning_muon.replicators.dct_topk import DCTTopK
from lightning_muon.replicators.local_steps import LocalSteps
from lightning_muon.replicators.replicator import Replicator

_DEFAULTS = FlexDeMoConfig()


class FlexDeMo(PlannedOptimizer):
    """SGD, AdamW or Muon on momenta of which the nodes send each other only what moves fast.

    With the gradient ``g``, the mean over the ranks of one node, every rank keeps for its shard the part of the
    momentum that was not sent yet, its residual: ``residual <- decay * residual + g``, of which the replicator
    takes components, for example the largest cosine coefficients of each 64 x 64 block; what is sent leaves the
    residual; the merged components of all nodes, turned back, are the update that the base optimizer gets. Weights
    stay equal on all nodes, bit for bit.

    Parameters are sharded inside of a node only (``fully_shard(module, mesh=mesh["shard"])``), and all nodes begin
    with equal weights. ``step()``, ``state_dict()`` and ``load_state_dict()`` are collective over ``mesh``; every rank
    must call them. With one node nothing travels, and all of the gradient is the update.

    Example::

        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = FlexDeMo(model, lr=1e-3, base="sgd", replicator=DCTTopK(top_k=8))
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()

    Args:
        params: A module, parameters, named parameters, or groups; as in :class:`~lightning_muon.ParallelMuon`.
        lr: Learning rate. For this and the others see :class:`~lightning_muon.FlexDeMoConfig`.
        base: ``"sgd"``, ``"adamw"`` or ``"muon"``.
        replicator: What the nodes send each other.
        decay: Of the residual.
        sign: Apply the sign of the update.
        merge: ``"contributors"`` or ``"mean"``.
        weight_decay: Decoupled weight decay.
        mesh: 2-D, with the axes ``("replicate", "shard")``: nodes, and the ranks of each. Needed as soon as there is
            more than one process.
        value_format: Of what travels between nodes.
        dense_below: Smaller parameters travel whole.
        delay: Steps by which an update is late.
        overlap: When exchanges begin.
        compat: Conventions of other implementations.
        check_every: Steps between comparisons of the weights of all nodes.
        chunk_bytes: Parameters that travel in one buffer.
        betas: Of AdamW.
        adamw_eps: Of AdamW.
        ns_coefficients: Newton-Schulz polynomial of Muon.
        ns_steps: Newton-Schulz iterations.
        eps: Lower bound of the norm before Newton-Schulz.
        adjust_lr_fn: Rule of the learning rate per shape.
        adamw_patterns: Names that AdamW takes.
        muon_patterns: Names that Muon takes.
        fused: Names of fused weights and their parts.
        compute_dtype: Of Newton-Schulz.
        wire_dtype: Of what travels inside of a node.
        error_if_nonfinite: Skip a step on all ranks where a gradient has a NaN or Inf.
        max_skipped_steps: So many steps in a row are skipped.

    Source: From et al. 2025, arXiv:2502.06728, Algorithm 1; DeMo: Peng et al. 2024, arXiv:2411.19870.
    """

    has_momentum: ClassVar[bool] = False

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = FlexDeMoConfig.lr,
        *,
        base: Base = FlexDeMoConfig.base,
        replicator: Replicator | LocalSteps = _DEFAULTS.replicator,
        decay: float = FlexDeMoConfig.decay,
        sign: bool | Literal["auto"] = FlexDeMoConfig.sign,
        merge: Merge = FlexDeMoConfig.merge,
        weight_decay: float = FlexDeMoConfig.weight_decay,
        mesh: DeviceMesh | None = None,
        value_format: ValueFormatName = FlexDeMoConfig.value_format,
        dense_below: int = FlexDeMoConfig.dense_below,
        delay: int = FlexDeMoConfig.delay,
        overlap: ExchangeOverlap = FlexDeMoConfig.overlap,
        compat: Compat = FlexDeMoConfig.compat,
        check_every: int = FlexDeMoConfig.check_every,
        chunk_bytes: int = FlexDeMoConfig.chunk_bytes,
        betas: tuple[float, float] = FlexDeMoConfig.betas,
        adamw_eps: float = FlexDeMoConfig.adamw_eps,
        ns_coefficients: tuple[float, float, float] = FlexDeMoConfig.ns_coefficients,
        ns_steps: int = FlexDeMoConfig.ns_steps,
        eps: float = FlexDeMoConfig.eps,
        adjust_lr_fn: AdjustLr = FlexDeMoConfig.adjust_lr_fn,
        adamw_patterns: tuple[str, ...] = (),
        muon_patterns: tuple[str, ...] = (),
        fused: Mapping[str, int | tuple[int, ...]] = _DEFAULTS.fused,
        compute_dtype: DtypeName = FlexDeMoConfig.compute_dtype,
        wire_dtype: DtypeName = FlexDeMoConfig.wire_dtype,
        error_if_nonfinite: bool = FlexDeMoConfig.error_if_nonfinite,
        max_skipped_steps: int = FlexDeMoConfig.max_skipped_steps,
    ) -> None:
        values = locals()
        self.config = FlexDeMoConfig(**{field.name: values[field.name] for field in fields(FlexDeMoConfig)})
        self._mesh = None if mesh is None else node_mesh(mesh)
        self._replication: Replication | None = None
        self._nodes: Nodes | None = None
        self._has_loaded_residuals = False
        # Exchanges of the last step whose updates are still to be applied.
        self._delayed: list[InFlight] = []
        defaults = {key: values.get(key) for key in COMPARED} | {
            "momentum": 0.0,
            "nesterov": False,
            "algorithm": "auto" if base == "muon" else "adamw",
            "num_exchanges": 0,
        }
        super().__init__(
            params,
            defaults,
            self._planned_options(),
            layout=self._own_layout(),
            max_skipped_steps=max_skipped_steps,
        )

    @classmethod
    def from_config(cls, params: Any, config: FlexDeMoConfig, **overrides: Any) -> FlexDeMo:
        """An optimizer with the options of ``config``; ``overrides`` are further arguments of the constructor."""
        return cls(params, **(vars(config) | overrides))

    def use_mesh(self, mesh: DeviceMesh) -> None:
        """Take the nodes from ``mesh``, before anything else is asked of the optimizer; local."""
        self._mesh = node_mesh(mesh)
        self._layout = self._own_layout()

    def attach(self, module: nn.Module, layout: Layout | None = None) -> None:
        """As in :class:`~lightning_muon.ParallelMuon`, for a model that is sharded inside of a node."""
        if layout is not None:
            raise ValueError(
                "FlexDeMo takes gradients that FSDP2 has averaged inside of a node; set sharding='fsdp', and "
                "optimizer=FlexDeMoConfig(...) so that nodes are left to FlexDeMo"
            )
        self._require_mesh()
        super().attach(module)

    @property
    def num_exchanges(self) -> int:
        """Steps that were taken."""
        return self.param_groups[0]["num_exchanges"]

    @property
    def sent_bytes_per_step(self) -> int:
        """Bytes that this rank sends to other nodes in a step."""
        if self._mesh is None:
            return 0
        if isinstance(self.config.replicator, LocalSteps):
            numel = sum(local_tensor(p).numel() for group in self.param_groups for p in group["params"])
            return round(self.config.replicator.bits_per_parameter() * numel / 8)
        nodes = axis_group(self._mesh, (0,))
        return sum(sent_bytes(plan, nodes.rank, nodes.size) for plan in self._plans(self._trainable()))

    def summary(self) -> str:
        """What applies the updates, what travels between nodes, and the table of parameters."""
        config = self.config
        nodes = 1 if self._mesh is None else self._mesh.size(0)
        head = (
            f"FlexDeMo: base {config.base}, {config.replicator}, {config.value_format}, {nodes} nodes, "
            f"{self.sent_bytes_per_step:,} bytes to other nodes per rank and step"
        )
        return head if config.base == "sgd" else f"{head}\n{super().summary()}"

    def state_dict(self) -> dict[str, Any]:
        """As in torch; an update that is still on its way is waited for."""
        self._require_mesh()
        self._keep_delayed()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Residuals may come from another number of nodes; their sum over the nodes is kept."""
        own = {"residual", "delayed_update"}
        # torch would round them to the dtype of the parameter.
        others = {
            number: {key: value for key, value in state.items() if key not in own}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": others})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        layout = self._layout if isinstance(self._layout, NodeLayout) else None
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            if "residual" in saved:
                local = local_of_node(saved["residual"], parameter, layout)
                self.state[parameter]["residual"] = self._of_all_nodes(parameter, local.contiguous())
            if "delayed_update" in saved:
                kept = torch.zeros_like(parameter, dtype=torch.float32)
                local_tensor(kept).copy_(part_of(saved["delayed_update"], parameter))
                self.state[parameter]["delayed_update"] = kept
        self._delayed = []
        self._has_loaded_residuals = True
        self._unbind()

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, with what this class adds."""
        self._keep_delayed()
        own = {"config": self.config, "_mesh": self._mesh, "_replication": None, "_delayed": [], "_nodes": None}
        return super().__getstate__() | own

    def _planned_options(self) -> PlannedOptions:
        config = self.config
        return PlannedOptions(
            mesh=None,
            compute_dtype=config.compute_dtype,
            wire_dtype=config.wire_dtype,
            chunk_bytes=MuonConfig.chunk_bytes,
            assignment=MuonConfig.assignment,
            # One owner for several nodes would have the whole matrices travel between them.
            dedupe="never",
            overlap="step",
            look_ahead=MuonConfig.look_ahead,
            adamw_patterns=config.adamw_patterns,
            muon_patterns=config.muon_patterns,
            fused=config.fused,
            error_if_nonfinite=config.error_if_nonfinite,
        )

    def _own_layout(self) -> Layout:
        return TensorLayout() if self._mesh is None else NodeLayout(self._mesh)

    def _require_mesh(self) -> None:
        if self._mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "FlexDeMo needs to know the nodes: FlexDeMo(..., mesh=init_device_mesh(device_type, (num_nodes, "
                "ranks_per_node), mesh_dim_names=('replicate', 'shard')))"
            )

    @property
    def _exchanges(self) -> bool:
        """Whether momenta travel."""
        return self._mesh is not None and self._mesh.size(0) > 1 and isinstance(self.config.replicator, Replicator)

    @property
    def _rules(self) -> Rules:
        return Rules(decay=self.config.decay, merge=self.config.merge, sign=self.config.takes_sign)

    def _bind(self) -> Bound:
        self._require_mesh()
        return super()._bind()

    def _unbind(self) -> None:
        """Have the plan made anew at the next step; local."""
        if self._bound is not None and self._bound.early is not None:
            self._bound.early.close()
        self._bound = None

    def _early(self, binding: Binding, step: MatrixStep) -> EarlyExchanges | None:
        del step
        if not self._exchanges:
            return None
        trainable = self._trainable()
        residuals = {tensor: local_tensor(self.state[tensor]["residual"])[0] for tensor in trainable}
        buckets = [Bucket(plan, trainable, residuals) for plan in self._plans(trainable)]
        self._replication = Replication(buckets, self._node_groups(), self._rules, self._scales)
        self._replication.step = self.num_exchanges
        assert isinstance(self._layout, NodeLayout)
        self._layout.expect_in([bucket.parameters for bucket in buckets])
        return EarlyExchanges(self._replication, binding.names) if self.config.overlap == "backward" else None

    def _received(self, bound: Bound, agreed: Agreement) -> Agreement:
        if agreed.verdict is not None:
            agreed.verdict()
        if not self._exchanges:
            return Agreement(self._of_one_node(agreed.gradients), frozenset())
        assert self._replication is not None
        begun = self._replication.run(agreed.gradients, agreed.valid_early)
        if not self.config.delay:
            return Agreement(Updates(begun, self._rules), frozenset())
        ready = self._take_kept()
        due, self._delayed = self._delayed, begun
        return Agreement(Updates(due, self._rules, ready), frozenset())

    def _step(self) -> None:
        super()._step()
        count = self.num_exchanges + 1
        for group in self.param_groups:
            group["num_exchanges"] = count
        if self._replication is not None:
            self._replication.step = count
        if self._exchanges and self.config.check_every and count % self.config.check_every == 0:
            self._check_nodes()

    def _check_nodes(self) -> None:
        """Collective over all ranks of all nodes; every rank must call it."""
        assert self._mesh is not None and self._bound is not None
        binding = self._bound.binding
        check_equal_on_nodes(
            [parameter.tensor for parameter in binding.parameters],
            binding.names,
            nodes=host_group(axis_group(self._mesh, (0,))),
            everyone=host_group(axis_group(self._mesh, (0, 1))),
        )

    def _of_one_node(self, gradients: Gradients) -> Gradients:
        """Updates where no other node has a part in them: all of the momentum, which is the gradient."""
        if self._has_loaded_residuals:
            for tensor in gradients:
                residual = local_tensor(self.state[tensor]["residual"])[0]
                gradients[tensor] = gradients[tensor] + (self.config.decay * residual).to(tensor.dtype)
                residual.zero_()
        return {tensor: grad.sign() if self.config.takes_sign else grad for tensor, grad in gradients.items()}

    def _scales(self) -> dict[Tensor, float]:
        """Factors of the gradients of some parameters."""
        if self.config.compat == "none":
            return {}
        return {tensor: float(group["lr"]) for group in self.param_groups for tensor in group["params"]}

    def _trainable(self) -> list[Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"] if tensor.requires_grad]

    def _plans(self, trainable: list[Tensor]) -> list[BucketPlan]:
        config = self.config
        replicator = config.replicator
        assert isinstance(replicator, Replicator)
        if config.compat == "detonation":
            assert isinstance(replicator, DCTTopK)
            replicator = replace(replicator, strips=True)
        return plan_buckets(
            [Shape(tuple(tensor.shape), tuple(local_tensor(tensor).shape)) for tensor in trainable],
            replicator=replicator,
            value_format_name=config.value_format,
            dense_below=config.dense_below,
            chunk_bytes=config.chunk_bytes,
        )

    def _node_groups(self) -> Nodes:
        """Collective over the nodes the first time; every rank must call it."""
        if self._nodes is None:
            assert self._mesh is not None
            group = axis_group(self._mesh, (0,))
            self._nodes = Nodes(*PrivateGroups().of([group, group]))
        return self._nodes

    def _init_state(self, parameters: Sequence[BoundParameter]) -> None:
        for parameter in parameters:
            state, tensor = self.state[parameter.tensor], parameter.tensor
            if "residual" not in state:
                zeros = torch.zeros(parameter.local.shape, device=parameter.local.device)
                state["residual"] = self._of_all_nodes(tensor, zeros)
                if self.config.delay:
                    state["delayed_update"] = torch.zeros_like(tensor, dtype=torch.float32)
                    state["has_delayed_update"] = torch.zeros((), dtype=torch.float32)
            if self.config.base != "sgd" and parameter.route.algorithm == "adamw" and "exp_avg" not in state:
                state.update(init_adamw_state(tensor, parameter.layout))

    def _of_all_nodes(self, parameter: Tensor, local: Tensor) -> Tensor:
        return self._layout.of_all_nodes(parameter, local) if isinstance(self._layout, NodeLayout) else local[None]

    def _step_elementwise(self, binding: Binding, gradients: Gradients) -> None:
        if self.config.base == "sgd":
            step_sgd_(binding, gradients)
        else:
            super()._step_elementwise(binding, gradients)

    def _keep_delayed(self) -> None:
        """Put the updates that are on their way into the state.

        Collective over the nodes; every rank must call it.
        """
        delayed, self._delayed = self._delayed, []
        updates = Updates(delayed, self._rules)
        for tensor in [tensor for one in delayed for tensor in one.bucket.parameters if tensor in one.taking_part]:
            local_tensor(self.state[tensor]["delayed_update"]).copy_(updates[tensor])
            self.state[tensor]["has_delayed_update"].fill_(1)

    def _take_kept(self) -> dict[Tensor, Tensor]:
        """What :meth:`_keep_delayed` has put there."""
        kept: dict[Tensor, Tensor] = {}
        for tensor in self._trainable():
            state = self.state[tensor]
            if state["has_delayed_update"]:
                kept[tensor] = local_tensor(state["delayed_update"]).to(tensor.dtype, copy=True)
                state["has_delayed_update"].zero_()
        return kept
