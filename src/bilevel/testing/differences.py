"""Central differences, a reference that does not use automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    grads = [torch.zeros(value.shape, dtype=value.dtype, device=value.device) for value in values]
    for index, grad in enumerate(grads):
        for entry in range(grad.numel()):
            direction = [torch.zeros_like(g) for g in grads]
            direction[index].view(-1)[entry] = 1.0
            grad.view(-1)[entry] = slope_along(f, lam, spec.unflatten(direction), step)
    return spec.unflatten(grads)


def slope_along(f: Callable[[Tree], Tensor], lam: Tree, direction: Tree, step: float = 1e-5) -> float:
    """The derivative of f(λ + h·direction) in h at 0, from 4 values of f.

    >>> round(slope_along(lambda lam: lam**3, torch.tensor(1.0).double(), torch.tensor(2.0).double()), 6)
    6.0
    """
    slopes = []
    for width in (step, 2 * step):
        above, below = (
            float(f(trees.map(lambda x, d, h=h: x.detach() + h * d, lam, direction))) for h in (width, -width)
        )
        slopes.append((above - below) / (2 * width))
    return (4 * slopes[0] - slopes[1]) / 3


def directions_in_each_leaf(lam: Tree, seed: int = 17) -> Iterator[Tree]:
    """For every leaf of λ a random direction of length 1 that moves this leaf only."""
    values, spec = trees.flatten(lam)
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(values)):
        direction = [torch.zeros_like(value) for value in values]
        drawn = torch.randn(values[index].shape, generator=generator, dtype=torch.float64)
        direction[index] = (drawn / drawn.norm()).to(values[index])
        yield spec.unflatten(direction)


def relative_error(found: Tree, expected: Tree) -> float:
    """‖found − expected‖ / ‖expected‖ over all leaves."""
    scale = float(trees.norm(expected))
    distance = float(trees.norm(trees.subtract(found, expected)))
    return distance / scale if scale > 0 else distance


def agree(found: Tree, expected: Tree, tolerance: float, what: str, name: str = "λ") -> None:
    """Raise an `AssertionError` that begins with `what` and names the leaf that disagrees, unless all leaves agree.

    Leaves are compared one by one, so that an error in a small leaf is not hidden by a large one.
    """
    assert trees.flatten(found)[1] == trees.flatten(expected)[1], f"{what}: a tree of another structure was returned"
    total = float(trees.norm(expected))
    for path, one, two in zip(trees.paths(expected), trees.leaves(found), trees.leaves(expected), strict=True):
        assert one.shape == two.shape, f"{what}: {name}{path} has shape {list(one.shape)} instead of {list(two.shape)}"
        one, two = one.double(), two.double()
        scale = max(float(two.norm()), 1e-3 * total) or 1.0
        error = float((one - two).norm()) / scale
        assert error <= tolerance, (
            f"{what}: in {name}{path} the relative error is {error:.3g}, allowed {tolerance:.0e}{_likeness(one, two)}"
        )


def _likeness(found: Tensor, expected: Tensor) -> str:
    """How a wrong gradient is related to the right one: zero, the opposite sign or a multiple; an empty text if not."""
    if not float(expected.norm()) > 0:
        return "; it should be zero"
    if not float(found.norm()) > 0:
        return "; it is exactly zero"
    share = float((found * expected).sum() / expected.square().sum())
    if float((found - share * expected).norm()) <= 1e-6 * float(found.norm()):
        return "; it has the opposite sign" if abs(share + 1) < 1e-6 else f"; it is {share:.4g} times the right one"
    return ""
