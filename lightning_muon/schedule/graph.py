"""The graph of a program, of what waits for what: dependencies, lanes, and communications of several ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_muon.schedule.program import Op, Program

# Number of ops that an error names; it also says how many more there are.
NAMED = 8


@dataclass(frozen=True, slots=True)
class GraphNode:
    """Ops that begin and end together: one op, or the ops of all ranks of a communication."""

    ops: list[int]  # The ops, as indices into `ops`.
    num_members: int  # Number of ops it must have; the node never begins with fewer.
    after: list[int]  # Indices of nodes that wait for this one, each once per dependency.


@dataclass(frozen=True, slots=True)
class Graph:
    """All ops of a program, and what they wait for."""

    ops: list[Op]  # The ops of all ranks.
    nodes: list[GraphNode]
    node_of: list[int]  # Node of each op.
    # For each op, the ops of its rank that must end before it: those of `deps`, and the previous one in its lane.
    waits: list[list[int]]

    def order(self) -> Iterator[int]:
        """Yield nodes, each after all that it waits for; raise ``ValueError`` at the end if some can never begin."""
        missing = [node.num_members - len(node.ops) for node in self.nodes]
        for op, before in enumerate(self.waits):
            missing[self.node_of[op]] += len(before)
        ready = deque(index for index, count in enumerate(missing) if not count)
        done = [False] * len(self.nodes)
        while ready:
            index = ready.popleft()
            done[index] = True
            yield index
            for later in self.nodes[index].after:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        if not all(done):
            raise ValueError(self._explain(done))

    def _explain(self, done: list[bool]) -> str:
        """Say what the first op of each rank that cannot begin waits for."""
        stuck = [op for op in range(len(self.ops)) if not done[self.node_of[op]]]
        firsts = list({self.ops[op].rank: op for op in reversed(stuck)}.values())[::-1]
        lines = [f"{where(self.ops[op])} waits for {self._reason(op, done)}" for op in firsts[:NAMED]]
        more = f"; and {len(firsts) - NAMED} more ranks" if len(firsts) > NAMED else ""
        return f"deadlock, {len(stuck)} ops can never begin: " + "; ".join(lines) + more

    def _reason(self, op: int, done: list[bool]) -> str:
        own = [self.ops[other].name for other in self.waits[op] if not done[self.node_of[other]]]
        members = self.nodes[self.node_of[op]].ops
        here = [each for each in members if all(done[self.node_of[other]] for other in self.waits[each])]
        absent = set(self.ops[op].group).difference(self.ops[each].rank for each in here)
        return ", ".join(own or [f"rank {rank}" for rank in sorted(absent)][:NAMED])


def validate(program: Program) -> None:
    """Check that a program, with all ranks of every group, can run; a ``ValueError`` names the op and its rank.

    Names must be unique, ``deps`` exist, results be used, and no op wait forever: all ranks of a communication must
    reach it, in one order.
    """
    for ops in program.values():
        used = {name for op in ops for name in op.deps}
        for op in ops:
            if op.memory and op.name not in used:
                raise ValueError(f"{where(op)} has a result of {op.memory} bytes that nothing uses")
    # Raises for unknown dependencies, equal names, wrong groups, and ops that can never begin.
    deque(build_graph(program).order(), maxlen=0)


def build_graph(program: Program) -> Graph:
    """Build the graph; a ``ValueError`` says which names, dependencies or groups are wrong."""
    ops = [op for listed in program.values() for op in listed]
    nodes: list[GraphNode] = []
    node_of: list[int] = []
    # By identity, since groups of thousands of ranks are long; ids stay valid while the program lives.
    groups: dict[int, frozenset[int]] = {}
    shared: dict[tuple[str, frozenset[int]], int] = {}
    for index, op in enumerate(ops):
        place = len(nodes)
        if len(op.group) > 1:
            group = groups.get(id(op.group)) or groups.setdefault(id(op.group), frozenset(op.group))
            if op.rank not in group or len(group) != len(op.group):
                raise ValueError(f"{where(op)} is a communication of {op.group[:NAMED]}; it must be in there, and once")
            place = shared.setdefault((op.name, group), place)
        if place == len(nodes):
            nodes.append(GraphNode([], len(op.group) or 1, []))
        nodes[place].ops.append(index)
        node_of.append(place)
    waits: list[list[int]] = []
    for listed in program.values():
        waits += _waits_of_rank(listed, first=len(waits))
    for later, before in zip(node_of, waits, strict=True):
        for other in before:
            nodes[node_of[other]].after.append(later)
    return Graph(ops, nodes, node_of, waits)


def _waits_of_rank(ops: list[Op], first: int) -> list[list[int]]:
    place: dict[str, int] = {}
    for index, op in enumerate(ops, first):
        if place.setdefault(op.name, index) != index:
            raise ValueError(f"{where(op)} is there twice; give each op of a rank a kind and key of its own")
    last: dict[str, int] = {}
    waits: list[list[int]] = []
    for index, op in enumerate(ops, first):
        try:
            before = [place[name] for name in op.deps]
        except KeyError as error:
            raise ValueError(
                f"{where(op)} depends on {error.args[0]}, which this rank does not have; check deps"
            ) from None
        if op.lane in last:
            before.append(last[op.lane])
        last[op.lane] = index
        waits.append(before)
    return waits


def where(op: Op) -> str:
    """The op and its rank, for messages."""
    return f"{op.name} of rank {op.rank}"
