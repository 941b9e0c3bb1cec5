"""Backward in two parts: first the gradients of a stage's inputs, and those of its weights when there is time.

For ``tanh(x @ w.t())`` autograd has the graph (each node leads to those that its gradients go to)::

    TanhBackward -> MmBackward -+-> AccumulateGrad of x
                                +-> TBackward -> AccumulateGrad of w

The first part runs the nodes that lead to x, TanhBackward and MmBackward. The others, TBackward and the sum for w, are
a :class:`Branch`; MmBackward, which leads into it, is its *joint*. The first part stores the gradient that comes to the
joint; the second one begins there and runs into the branch only. Weights that are added up, or used twice, share a
branch with several joints.
"""

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
    """Connected nodes that do not lead to the inputs of the stage: the rest of the backward for some weights."""

    weights: list[Tensor] = field(default_factory=list)
    # Nodes that lead both to the inputs of the stage and into the branch -> the gradients that came to them.
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
        # Hooks of tensors have changed these gradients already, and they include what comes from one joint to another.
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
    """Compute the gradients of ``leaves``; return also the branches that are left for :func:`backward_weight`.

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
    """Run the other part of the backward, which adds to the gradients of all other leaves of the graph."""
    # Between two joints of a branch there may be joints of others, whose saved tensors must be kept for a further pass.
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
    """Find the branch of each node that does not lead to the ``wanted`` ones, and of each joint."""
    on_way: set[Node] = set()
    # Nodes of branches, and joints, each with those that it leads to or that lead to it.
    neighbours: dict[Node, list[Node]] = {}
    for node in _descendants_first(roots):
        below = [child for child, _ in node.next_functions if child is not None]
        if node in wanted or any(child in on_way for child in below):
            on_way.add(node)
        beside = [child for child in below if child not in on_way]
        if node not in on_way or beside:
            neighbours[node] = beside
            for child in beside:
                neighbours[child].append(node)
    branch_of: dict[Node, Branch] = {}
    for node in neighbours:
        if node not in branch_of:
            branch, reached = Branch(), [node]
            while reached:
                if (near := reached.pop()) not in branch_of:
                    branch_of[near] = branch
                    reached += neighbours[near]
        weight = getattr(node, "variable", None)
        if not node.next_functions and isinstance(weight, Tensor):
            branch_of[node].weights.append(weight)
    joints = {node: branch_of[node] for node in neighbours if node in on_way}
    return {node: branch_of[node] for node in neighbours if node not in on_way}, joints


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
