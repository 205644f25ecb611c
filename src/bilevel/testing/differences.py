"""Central differences: the oracle that knows nothing about automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bilevel import trees
from bilevel.trees import Tree


def central_differences(f: Callable[[Tree], Tensor], lam: Tree, step: float = 1e-5) -> Tree:
    """∇f(λ) from 4 values of f per number in λ: central differences at two step sizes, extrapolated (error O(step⁴)).

    >>> slopes = central_differences(lambda lam: (lam**3).sum(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    >>> [round(slope, 6) for slope in slopes.tolist()]
    [3.0, 12.0]
    """
    values, spec = trees.flatten(lam)
    leaves = [value.detach().clone(memory_format=torch.contiguous_format) for value in values]
    grads = [torch.zeros_like(leaf) for leaf in leaves]
    for leaf, grad in zip(leaves, grads, strict=True):
        for index in range(leaf.numel()):
            grad.view(-1)[index] = _extrapolated(lambda: float(f(spec.unflatten(leaves))), leaf.view(-1), index, step)
    return spec.unflatten(grads)


def _extrapolated(value: Callable[[], float], flat: Tensor, index: int, step: float) -> float:
    slopes = []
    here = float(flat[index])
    for width in (step, 2 * step):
        flat[index] = here + width
        above = value()
        flat[index] = here - width
        below = value()
        slopes.append((above - below) / (2 * width))
    flat[index] = here
    return (4 * slopes[0] - slopes[1]) / 3


def relative_error(found: Tree, expected: Tree) -> float:
    """‖found − expected‖ / ‖expected‖ over all leaves."""
    scale = float(trees.norm(expected))
    distance = float(trees.norm(trees.subtract(found, expected)))
    return distance / scale if scale > 0 else distance
