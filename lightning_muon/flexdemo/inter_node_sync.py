"""What FlexDeMo asks of the ways in which nodes follow each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.groups import ALONE, PrivateGroups, axis_group
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.node_exchange import Nodes
from lightning_muon.flexdemo.node_state import NodeLayout, Rule
from lightning_muon.optim.backward_prefetch import BackwardPrefetch
from lightning_muon.optim.matrix_step import Gradients, States
from lightning_muon.optim.state import StateCompletion, zero_state
from lightning_muon.optim.step_plan import BoundParameter


@dataclass(frozen=True, eq=False)
class OptimizerView:
    """What a way needs of the optimizer.

    Attributes:
        config: Options.
        mesh: Nodes, and the ranks of each; ``None`` for a process alone.
        current_states: Of the optimizer, which torch replaces when it loads.
        all_parameters: In the order of the param groups.
        learning_rates: Of them.
    """

    config: FlexDeMoConfig
    mesh: DeviceMesh | None
    current_states: Callable[[], States]
    all_parameters: Callable[[], Sequence[Tensor]]
    learning_rates: Callable[[], Mapping[Tensor, float]]

    @property
    def states(self) -> States:
        """Of the optimizer, now."""
        return self.current_states()

    @cached_property
    def layout(self) -> NodeLayout | None:
        """Where parameters lie; ``None`` for a process alone."""
        return None if self.mesh is None else NodeLayout(self.mesh)

    @cached_property
    def nodes(self) -> Nodes:
        """Collective over the nodes the first time; every rank must call it."""
        if self.mesh is None:
            return Nodes(ALONE, ALONE)
        group = axis_group(self.mesh, (0,))
        return Nodes(*PrivateGroups().of([group, group]))

    @property
    def trainable(self) -> Sequence[Tensor]:
        """The parameters that may change now."""
        return [parameter for parameter in self.all_parameters() if parameter.requires_grad]

    @property
    def node(self) -> int:
        """Number of this node; local."""
        return 0 if self.mesh is None else axis_group(self.mesh, (0,)).rank

    @property
    def num_nodes(self) -> int:
        """How many nodes there are; local."""
        return 1 if self.mesh is None else self.mesh.size(0)

    def of_all_nodes(self, parameter: Tensor, local: Tensor) -> Tensor:
        """(R, *parameter.shape) of the local parts of all nodes; shares memory."""
        return local.unsqueeze(0) if self.layout is None else self.layout.of_all_nodes(parameter, local)


class BetweenNodes(ABC):
    """One way in which nodes follow each other.

    Attributes:
        own_state: Keys of the state of a parameter that :meth:`load` takes.
        per_node: Those of them, and of :meth:`saved`, that have an entry for each node, (R, *shape) -> what another
            number of nodes gets: the ``"sum"`` over the saved nodes divided by the number of nodes now, so that the sum
            over the nodes stays what it was, or the ``"mean"`` over the saved nodes.
        marks: Keys by which a saved state is known for one of this way.
    """

    own_state: ClassVar[frozenset[str]] = frozenset()
    per_node: ClassVar[Mapping[str, Rule]] = {}
    marks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, optimizer: OptimizerView) -> None:
        self._optimizer = optimizer

    @property
    @abstractmethod
    def state_keys(self) -> frozenset[str]:
        """What the state of a parameter must have."""

    @abstractmethod
    def init_state(self, parameter: Tensor) -> None:
        """What the state of a parameter lacks; local."""

    def is_current(self) -> bool:
        """Whether the state is still what :meth:`plan` was called with; local."""
        return True

    def common(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """What must have the same bits on all nodes, one for each of ``parameters``, or nothing; local."""
        return parameters

    def check(self) -> None:  # noqa: B027 - most need not
        """Raise if the parameters that there are now cannot be exchanged; local."""

    def plan(self, names: Mapping[Tensor, str], num_steps: int) -> BackwardPrefetch | None:
        """Make ready for the parameters that there are now, after so many steps; what is sent early.

        Collective over the nodes; every rank must call it.
        """
        del names, num_steps
        return None

    @property
    def order(self) -> Sequence[Sequence[Tensor]]:
        """The parameters in the order in which their updates arrive, those together that arrive together."""
        return ()

    @abstractmethod
    def updates(self, gradients: Gradients, sent_early: frozenset[str]) -> Gradients:
        """Local updates from the local gradients of the node, of the parameters that take part in the step.

        Collective over the nodes; every rank must call it with the same parameters.
        """

    def finish(self, num_steps: int) -> None:  # noqa: B027 - most need not
        """A step has been taken, the so many-th. Collective over the nodes; every rank must call it."""

    def finish_in_flight(self) -> None:  # noqa: B027
        """Put all that is on its way into the state. Collective over the nodes; every rank must call it."""

    def saved(self, parameter: Tensor) -> dict[str, Tensor]:
        """What a checkpoint has beside the state; local."""
        del parameter
        return {}

    def check_saved(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise if the states of parameters are of nodes that followed each other in another way; local."""
        marks = {"residual", "node_weights", "anchor"} & {key for state in states for key in state}
        if marks == {"anchor"}:
            raise ValueError(
                "the state has no node_weights, which flatten_optimizer_state_dict=True of "
                "torch.distributed.checkpoint.state_dict leaves out; get and set it without"
            )
        if marks and marks != self.marks:
            alone = "DiLoCo" if "anchor" in marks else "NoReplication"
            saved_with = "components of momenta" if "residual" in marks else alone
            raise ValueError(
                f"the state was saved with {saved_with}, the replicator is {self._optimizer.config.replicator} now; "
                "go on with the replicator of before, or load only the weights of the model"
            )

    @abstractmethod
    def load(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """Take ``own_state``, and what :meth:`saved` has added, from the saved state of a parameter.

        Collective over the mesh; every rank must call it.
        """

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Inside, the weights are equal on all nodes, if there are such weights; local."""
        yield

    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other nodes in a step, on average."""


class NodeStateCompletion(StateCompletion):
    """State of a way in which nodes follow each other, and of the base optimizer.

    Args:
        nodes: The way.
        has_moments: Whether the base optimizer is, or uses, AdamW.
        has_momentum: Whether it has a momentum for matrices.
    """

    def __init__(self, nodes: Callable[[], BetweenNodes], *, has_moments: bool, has_momentum: bool) -> None:
        super().__init__()
        self._nodes, self._has_moments, self._has_momentum = nodes, has_moments, has_momentum

    def keys(self, parameter: BoundParameter) -> frozenset[str]:
        """As in :class:`StateCompletion`."""
        return self._nodes().state_keys | self._of_base(parameter)

    def fill(self, parameter: BoundParameter, state: dict[str, Any]) -> None:
        """As in :class:`StateCompletion`."""
        self._nodes().init_state(parameter.tensor)
        if not state.keys() >= self._of_base(parameter):
            state.update(zero_state(parameter))

    def complete(self, parameters: Sequence[BoundParameter], states: States) -> None:
        """As in :class:`StateCompletion`.

        Raises:
            ValueError: If the parameters cannot be exchanged.
        """
        self._nodes().check()
        super().complete(parameters, states)

    def is_complete(self, states: States) -> bool:
        """As in :class:`StateCompletion`; also whether the plan was made with this state."""
        return super().is_complete(states) and self._nodes().is_current()

    def _of_base(self, parameter: BoundParameter) -> frozenset[str]:
        has_state = self._has_moments if parameter.route.algorithm == "adamw" else self._has_momentum
        return super().keys(parameter) if has_state else frozenset()
