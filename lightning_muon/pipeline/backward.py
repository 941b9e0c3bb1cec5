"""Backward in two parts: the gradients of what a stage got first, and those of its weights when there is time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup


@dataclass(eq=False)
class Branch:
    """A part of a graph in which nothing depends on what the stage got: what is left to do for some weights.

    Branches of a graph have no node in common.
    """

    weights: list[Tensor] = field(default_factory=list)
    # Nodes on the way to what the stage got that lead into the branch, too, with the gradients that came to them.
    joints: dict[Node, Sequence[Tensor | None]] = field(default_factory=dict)
    # Where outputs of the stage begin in the branch, with their gradients.
    roots: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def run(self, *, retain_graph: bool) -> None:
        """Add to the gradients of the weights."""
        starts = [
            (GradientEdge(joint, place), gradient)
            for joint, gradients in self.joints.items()
            for place, gradient in enumerate(gradients)
            if gradient is not None
        ]
        starts += self.roots
        if not starts or not self.weights:
            return
        # Hooks of tensors have changed these gradients already; and what comes from one joint to another counts in it.
        handles = [joint.register_prehook(partial(_replace, known)) for joint, known in self.joints.items()]
        try:
            edges, gradients = zip(*starts, strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=retain_graph, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Branch]]:
    """The gradients of ``leaves``, and what is left for :func:`backward_weight`.

    ``outputs`` and ``leaves`` require gradients; ``gradients`` are those of the outputs, or ones.
    """
    if gradients is None:
        gradients = [torch.ones_like(output) for output in outputs]
    edges = [get_gradient_edge(output) for output in outputs]
    branches, joints = _find_branches([edge.node for edge in edges], {get_gradient_edge(leaf).node for leaf in leaves})
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node in branches:
            branches[edge.node].roots.append((edge, gradient))
    handles = [joint.register_prehook(partial(branch.joints.__setitem__, joint)) for joint, branch in joints.items()]
    try:
        found = torch.autograd.grad(outputs, leaves, gradients, retain_graph=bool(branches), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), list(dict.fromkeys([*branches.values(), *joints.values()]))


def backward_weight(branches: Sequence[Branch]) -> None:
    """The other part of the backward, which adds to the gradients of all other leaves of the graph."""
    # Between two joints of one branch lie joints of others, whose saved tensors must last, and be computed once more.
    apart: list[Branch] = []
    for branch in branches:
        if len(branch.joints) > 1:
            branch.run(retain_graph=True)
        else:
            apart.append(branch)
    with GraphExecGroup():  # Checkpointed activations are computed once for all of them.
        for branch in apart:
            branch.run(retain_graph=False)


def _find_branches(roots: Sequence[Node], wanted: set[Node]) -> tuple[dict[Node, Branch], dict[Node, Branch]]:
    """Branch of each node that does not lead to the ``wanted`` ones, and of each that does and leads to a branch."""
    on_way: set[Node] = set()
    of: dict[Node, Node] = {}  # A node of the same branch, which is nearer to its first node, or that itself.
    nodes = _descendants_first(roots)

    def first(node: Node) -> Node:
        while of[node] is not node:
            of[node] = node = of[of[node]]
        return node

    for node in nodes:
        below = [child for child, _ in node.next_functions if child is not None]
        if node in wanted or any(child in on_way for child in below):
            on_way.add(node)
        beside = [child for child in below if child not in on_way]
        if node not in on_way or beside:
            of[node] = node
            for child in beside:
                of[first(child)] = node
    made: dict[Node, Branch] = {}
    branches, joints = dict[Node, Branch](), dict[Node, Branch]()
    for node in of:
        branch = made.setdefault(first(node), Branch())
        (joints if node in on_way else branches)[node] = branch
        weight = getattr(node, "variable", None)
        if not node.next_functions and isinstance(weight, Tensor):
            branch.weights.append(weight)
    return branches, joints


def _descendants_first(roots: Sequence[Node]) -> list[Node]:
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return list(found)


def _replace(known: Sequence[Tensor | None], _: Any) -> Any:
    return known
