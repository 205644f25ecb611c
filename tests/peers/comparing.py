"""Hypergradients beside references that know nothing of this library, and a few data sets to compare them on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.testing import central_differences, relative_error

NO_DATA = bl.Task(None, None)
EXACT = (bl.Unrolled(), bl.Reverse(), bl.Reverse(3, group_bytes=0), bl.Forward())


class Reference(NamedTuple):
    """f(λ) and ∇f(λ) by other means."""

    value: float
    grad: Any


def slope(f: Callable[[Any], torch.Tensor], lam: Any) -> Reference:
    """The reference for an f that plain torch can differentiate: a closed form, or steps written out."""
    leaves, spec = trees.flatten(lam)
    live = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = f(spec.unflatten(live))
    return Reference(float(value.detach()), spec.unflatten(torch.autograd.grad(value, live)))


def differences(f: Callable[[Any], Any], lam: Any, step: float = 1e-4) -> Reference:
    """The reference for any f: central differences, whose floor is about 1e-9."""
    return Reference(float(f(lam)), central_differences(f, lam, step))


def agree(
    reference: Reference,
    problem: bl.Problem,
    lam: Any,
    task: Any = NO_DATA,
    *,
    methods: Any = EXACT,
    tolerance: float = 1e-7,
    **run: Any,
) -> None:
    """Every method gives the reference's value and gradient."""
    for method in methods:
        found = bl.hypergradient(problem, lam, task, method=method, **run)
        close(found.grad, reference.grad, tolerance, method)
        assert float(found.value) == pytest.approx(reference.value, rel=tolerance, abs=1e-12), method


def close(found: Any, expected: Any, tolerance: float = 1e-7, what: Any = "the answer") -> None:
    error = relative_error(found, expected)
    assert error <= tolerance, f"{what}: relative error {error:.2g}, allowed {tolerance:.0e}"


def right_or_refused(ask: Callable[[], Any], expected: Any, *, tolerance: float = 1e-6) -> bool:
    """`ask()` gives the expected gradient, or a `BilevelError` that gives a reason; whether it was an answer."""
    try:
        found = ask()
    except bl.BilevelError as refusal:
        assert len(str(refusal).split()) > 10, f"the refusal gives no reason: {refusal}"
        return False
    close(found, expected, tolerance)
    return True


def along(f: Callable[[Any], Any], lam: Any, found: Any, tolerance: float = 1e-6, step: float = 1e-5) -> None:
    """⟨found, d⟩ is the derivative of f along random directions d: central differences where λ has many numbers."""
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        direction = trees.map(lambda leaf, g=generator: torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), lam)

        def moved(s: Any, direction: Any = direction) -> Any:
            return f(trees.map(lambda leaf, d: leaf + s * d, lam, direction)).detach()

        expected = differences(moved, torch.zeros(()), step).grad
        close(trees.dot(found, direction), expected, tolerance, f"along direction {seed}")


def unrolled(inner: Any, w: Any, steps: int, lr: Any, graph: bool = True) -> Any:
    """w after steps of gradient descent on inner(w, t), written out in plain torch and kept in its graph."""
    for t in range(1, steps + 1):
        leaves, spec = trees.flatten(w)
        live = [leaf if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves]
        slopes = torch.autograd.grad(inner(spec.unflatten(live), t), live, create_graph=graph, allow_unused=True)
        rates = trees.leaves(lr) if isinstance(lr, dict) else [lr] * len(live)
        w = spec.unflatten(
            leaf if g is None else leaf - rate * g for leaf, g, rate in zip(live, slopes, rates, strict=True)
        )
    return w


def minimiser(loss: Callable[[Any, Any], torch.Tensor], start: torch.Tensor, lam: Any) -> torch.Tensor:
    """argmin_w loss(w, λ) by Newton's method in plain torch; its last step, −H⁻¹∇L, carries the derivative in λ."""
    fixed = trees.detach(lam)
    w = start
    for _ in range(50):
        step, length = newton_step(loss, w, fixed).detach(), 1.0
        while length > 1e-3 and loss(w - length * step, fixed) > loss(w, fixed):
            length /= 2  # far from the minimum a whole step may climb
        w = w - length * step
    return w - newton_step(loss, w, lam)


def newton_step(loss: Callable[[Any, Any], torch.Tensor], w: torch.Tensor, lam: Any) -> torch.Tensor:
    curvature = torch.autograd.functional.hessian(lambda w: loss(w, trees.detach(lam)), w).reshape(w.numel(), w.numel())
    live = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(live, lam), live, create_graph=True)
    return torch.linalg.solve(curvature, gradient.reshape(-1)).reshape(w.shape)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@functools.cache
def regression(rows: int = 30, columns: int = 6, seed: int = 0) -> bl.Task:
    """A linear relation with noise, half of whose coefficients are zero; as many rows for validation."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x, true = draw(2 * rows, columns), torch.cat([draw(columns - columns // 2), torch.zeros(columns // 2)]).double()
    y = x @ true + 0.3 * draw(2 * rows)
    return bl.Task((x[:rows], y[:rows]), (x[rows:], y[rows:]))


@functools.cache
def classification(rows: int = 30, columns: int = 4, classes: int = 2, seed: int = 0) -> bl.Task:
    """Classes that overlap: labels 0…classes−1 drawn from a linear model."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = draw(2 * rows, columns)
    y = torch.multinomial((x @ draw(columns, classes)).softmax(1), 1, generator=generator)[:, 0]
    return bl.Task((x[:rows], y[:rows]), (x[rows:], y[rows:]))


def squares(w: Any, lam: Any, data: Any) -> torch.Tensor:
    """The mean squared error, halved, of a linear model."""
    return 0.5 * ((data[0] @ w - data[1]) ** 2).mean()


def zeros(*shape: int) -> Callable[[Any], torch.Tensor]:
    """An `init` that begins at 0, whatever λ is."""
    return lambda lam: torch.zeros(shape)


@dataclass(frozen=True)
class Within(bl.Penalty):
    """0 in a convex set and infinite outside: the proximal map is the projection, for any step size."""

    project: Callable

    def value(self, w, t=1):
        return torch.zeros(())

    def prox(self, w, step, t=1):
        return self.project(w)


def quadratic_program(q, c, project, low=0.0, high=math.inf, a=None, b=None):
    """argmin ½wᵀQw − cᵀw with low ≤ w ≤ high and A w = b, differentiable in Q, c, A, b and the bounds.

    A long projected descent finds which bounds are met; the other variables follow from linear optimality conditions.
    """
    low, high = (torch.as_tensor(bound).expand_as(c) for bound in (low, high))
    with torch.no_grad():
        rough, lr = torch.zeros_like(c), 1 / torch.linalg.eigvalsh(q)[-1]
        for _ in range(3000):
            rough = project(rough - lr * (q @ rough - c))
        free = (rough > low + 1e-7) & (rough < high - 1e-7)
    fixed = torch.where(rough <= low + 1e-7, low, high)
    matrix, right = q[free][:, free], c[free] - q[free][:, ~free] @ fixed[~free]
    if a is not None:
        corner = torch.zeros(len(b), len(b))
        matrix = torch.cat([torch.cat([matrix, a[:, free].T], 1), torch.cat([a[:, free], corner], 1)])
        right = torch.cat([right, b - a[:, ~free] @ fixed[~free]])
    w = fixed.index_put((free,), (torch.linalg.pinv(matrix) @ right)[: int(free.sum())])
    close(w.detach(), rough, 1e-5, "the optimality conditions and the projected descent")
    return w


def descent_rate(q):
    return 1 / float(torch.linalg.eigvalsh(q)[-1])
