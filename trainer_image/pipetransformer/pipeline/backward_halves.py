"""Computes a backward in two halves, so that the span before gets its gradient before the weights get theirs.

`begin` computes the gradient of the span's input. It keeps the gradients that arrive at each computation with weights.
`finish` runs the backward of these computations again, only for their weights. The two halves cost little more than one
whole backward; a second pass through the whole graph would cost a third more (`python -m benchmarks.split`).

torch's own halves (`torch.distributed.pipelining._backward`, 2.13) fail if the output is a view, or if computations
share weights in some ways. They lose the gradients of leaves that are not weights, and run a tensor's hook twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

_Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Group:
    """Computations that must have one common backward for their weights, because they share weights.

    Attributes:
        roots: the graph nodes of the computations, each with the gradients of its outputs. The first half sets them.
        weights: the graph nodes of their weights.
    """

    roots: dict[Node, _Gradients]
    weights: set[Node]


@dataclass(slots=True)
class WeightGradients:
    """The second half of a backward, which `finish` runs. It keeps the span's graph alive."""

    groups: list[_Group] = field(default_factory=list)


def begin(
    output: Tensor, span_input: Tensor, output_gradient: Tensor | None, *, at_once: bool = False
) -> tuple[Tensor | None, WeightGradients]:
    """Run the first half of a backward.

    It leaves the gradients of each `nn.Parameter` to `finish`. It adds the gradients of other leaves at once. Hooks of
    tensors run now. If a computation with weights returned the tensor, its hooks run again in `finish`, which ignores
    their result.

    Args:
        output: the span's output, or its loss.
        span_input: the span's input, a leaf that requires a gradient. If the input needs no gradient, run one whole
            backward instead (`RoundShape.gives_gradient`).
        output_gradient: the gradient of `output`; None for a loss.
        at_once: whether to compute the weights' gradients now too, so that `finish` has nothing to do. With activation
            checkpointing, each of two halves would repeat the span's forward.

    Returns:
        The gradient of `span_input` (None if the output does not depend on it), and the argument of `finish`.

    Raises:
        ValueError: `span_input` is not a leaf that requires a gradient.
    """
    if not (span_input.is_leaf and span_input.requires_grad):
        raise ValueError("the input of a span whose backward has two halves must be a leaf that requires a gradient")
    gradients = None if output_gradient is None else [output_gradient]
    groups, others = ([], []) if at_once else _parts(output)
    if not others:
        torch.autograd.backward([output], gradients)
        return _taken(span_input), WeightGradients()
    hooks = [root.register_prehook(_Keep(group, root)) for group in groups for root in group.roots]
    try:
        torch.autograd.backward([output], gradients, retain_graph=True, inputs=others)
    finally:
        for hook in hooks:
            hook.remove()
    return _taken(span_input), WeightGradients(groups)


def finish(rest: WeightGradients) -> None:
    """Run the second half: add the weights' gradients. Call it once for each `begin`."""
    # Larger groups come first. Their backward may pass through computations of smaller groups, whose saved tensors are
    # freed by their own backward.
    for group in sorted(rest.groups, key=lambda group: -len(group.roots)):
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for root, kept in group.roots.items():
            for number, gradient in enumerate(kept):
                if gradient is not None:
                    edges.append(GradientEdge(root, number))
                    gradients.append(gradient)
        # Each root must get exactly the gradient that it kept. Otherwise it would get a second one from the backward of
        # another root of the group, and a tensor's hook would change its gradient twice.
        hooks = [root.register_prehook(_Give(kept)) for root, kept in group.roots.items()]
        weights = [node.variable for node in group.weights]  # type: ignore[attr-defined]
        try:
            if edges:
                torch.autograd.backward(edges, gradients, retain_graph=len(group.roots) > 1, inputs=weights)
        finally:
            for hook in hooks:
                hook.remove()
    rest.groups.clear()


@dataclass(slots=True)
class _Keep:
    """A hook that keeps the gradients that arrive at a computation."""

    group: _Group
    root: Node

    def __call__(self, gradients: _Gradients) -> None:
        self.group.roots[self.root] = gradients


@dataclass(slots=True)
class _Give:
    """A hook that replaces the gradients that arrive at a computation."""

    gradients: _Gradients

    def __call__(self, _: _Gradients) -> _Gradients:
        return self.gradients


def _taken(span_input: Tensor) -> Tensor | None:
    gradient, span_input.grad = span_input.grad, None
    return gradient


def _parts(output: Tensor) -> tuple[list[_Group], list[Tensor]]:
    """The computations with weights, and the leaves that are not weights, in the graph that made `output`."""
    on_way: set[Node] = set()  # nodes that lead to a leaf that is not a weight
    weights: dict[Node, set[Node]] = {}  # the other nodes that lead to weights, each with these weights
    others: list[Tensor] = []
    uses: dict[Node, set[Node]] = {}
    for node in _children_first(output):
        children = [child for child, _ in node.next_functions if child is not None]
        used = {weight for child in children for weight in weights.get(child, ())}
        variable = None if children else getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            weights[node] = {node}
        elif variable is not None:
            others.append(variable)
            on_way.add(node)
        elif not on_way.isdisjoint(children):
            on_way.add(node)
            if used:
                uses[node] = used
        elif used:
            weights[node] = used
    return _grouped(uses), others


def _children_first(output: Tensor) -> Iterator[Node]:
    """All nodes of the graph that made `output`, each after the nodes that it leads to."""
    stack = [] if output.grad_fn is None else [(output.grad_fn, False)]
    seen: set[Node] = set()
    while stack:
        node, passed = stack.pop()
        if passed:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]


def _grouped(uses: Mapping[Node, set[Node]]) -> list[_Group]:
    """Group the computations: two that share a weight are in one group, also if they share it through others."""
    groups: list[_Group] = []
    for root, weights in uses.items():
        merged, apart = _Group({root: ()}, set(weights)), []
        for group in groups:
            if group.weights.isdisjoint(weights):
                apart.append(group)
            else:
                merged.roots |= group.roots
                merged.weights |= group.weights
        groups = [*apart, merged]
    return groups
