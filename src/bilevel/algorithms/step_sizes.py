"""Step sizes of single-loop algorithms, from the curvature of both objectives on a few batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bilevel.engine.oracles import Derivatives, Triple
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import Operator, largest_eigenvalue, random_directions
from bilevel.linear_solvers.cg import conjugate
from bilevel.linear_solvers.lanczos import Spectrum, lanczos
from bilevel.methods.implicit.near_minimiser import newton_from
from bilevel.trees import Tree

# Products with Hessians for the extreme curvatures, for a linear system, and power iterations for the gain.
PRODUCTS, SOLVE, POWER = 30, 20, 6
# The fraction of the largest stable outer step that is taken, because curvatures are underestimated by some per cent.
FRACTION = 0.5
# Products with the Hessian of one batch, to compare the curvature of L at several λ.
FEW = 10
# While λ moves, the curvature of L may exceed the one for which step sizes were chosen by this factor.
STEEPER = 1.5


@dataclass(frozen=True)
class Probe:
    """The problem at the start, on a few batches of both levels; means over them represent the whole data."""

    name: str
    at: Derivatives
    begin: Triple
    train: Sequence[Tree]
    val: Sequence[Tree]
    # More training batches, from which only the largest curvature is taken.
    steep: Sequence[Tree] = ()
    # The number of the batch, of `train` and then `steep`, on which the steepness of L is compared at several λ.
    steepest: int = 0

    def curvatures(self) -> tuple[float, float, int]:
        """At the start, μ of the mean of the batches, the largest ν of a batch, and the number of that batch."""
        w, lam = self.begin.w, self.begin.lam
        batches = [*self.train, *self.steep]
        spectra = [lanczos(_operator(partial(self._product, w, lam, batch)), w, PRODUCTS) for batch in batches]
        nu, steepest = max((spectrum.largest, number) for number, spectrum in enumerate(spectra))
        return max(self._of_mean(nu).attained, 0.0), nu, steepest

    def images(self, batches: Iterable[Tree]) -> list[float]:
        """The length of the product of each batch's Hessian with one random vector: ∞ if it is not finite."""
        w, lam = self.begin.w, self.begin.lam
        vector = random_directions(1, w, seed=4)[0]
        lengths = [float(self._product(w, lam, batch, vector).norm()) for batch in batches]
        return [length if math.isfinite(length) else math.inf for length in lengths]

    def check_convexity(self) -> None:
        """Refuse a saddle. It looks at one batch, and at the mean of all of them only if that one has a saddle."""
        w, lam = self.begin.w, self.begin.lam
        one = lanczos(_operator(partial(self._product, w, lam, self.train[0])), w, PRODUCTS)
        if _is_saddle(one.attained, one.largest):
            self._of_mean(one.largest)

    def _of_mean(self, nu: float) -> Spectrum:
        """The curvature of the mean of the batches. A saddle is refused."""
        w, lam = self.begin.w, self.begin.lam
        mean = lanczos(_operator(lambda v: self._hessian(w, lam, v)), w, PRODUCTS)
        if _is_saddle(mean.attained, nu):
            raise BilevelError(
                f"{self.name} needs a convex inner problem with positive curvature: w_λ is a smooth function of λ only "
                "where ∇²L is positive definite, but at the start the curvature of the inner objective reaches "
                f"{mean.attained:.3g} (and {nu:.3g} upwards). Add an L2 term to the inner objective, or use Descent() "
                "with method=Reverse(), which needs no convexity."
            )
        return mean

    def outer_step(self, inner_rate: float) -> float:
        """A step for λ that keeps w, v and λ stable together, when w and v contract at the rate `inner_rate`·∇²L.

        In the slow limit λ follows λ' = −γ (∇²h + N/ρ s) λ with the delay N = C H⁻² A H⁻¹ Cᵀ of w and v, so that γ must
        stay below about 1/‖∇²h + N/ρ‖.
        """
        at, lam = self.at, self.begin.lam
        w = self._near_minimiser()
        slopes = [at.outer(w, lam, batch)[1] for batch in self.val]
        v = -self._solve(w, torch.stack(slopes).mean(0))

        def gain(u: Tensor) -> Tensor:
            size = self._width(u)
            step = -2 * size * self._solve(w, self._crossed(w, u))
            one = self._directions(Triple(w + step / 2, v, lam + size * u))
            two = self._directions(Triple(w - step / 2, v, lam - size * u))
            pulled = -self._solve(w, one.v - two.v)
            delayed = pulled + self._solve(w, pulled) / inner_rate
            return ((one.lam - two.lam) + self._cross(w, lam, delayed)) / (2 * size)

        largest = largest_eigenvalue(Operator(gain), lam, POWER)
        if not math.isfinite(largest) or largest <= 0:
            raise BilevelError(
                f"{self.name} found no curvature of f at the start to choose outer_lr by (its estimate is "
                f"{largest:.3g}). Pass outer_lr=…, a step size for λ."
            )
        return FRACTION / largest

    def curvature_in_lam(self) -> float:
        """The largest curvature in λ of L(w, λ) − L(w_λ, λ) for a fixed w: that of C H⁻¹ Cᵀ at the inner minimiser."""
        w, lam = self._near_minimiser(), self.begin.lam

        def product(u: Tensor) -> Tensor:
            return self._cross(w, lam, self._solve(w, self._crossed(w, u)))

        return largest_eigenvalue(Operator(product), lam, POWER)

    def steepness(self, lam: Tensor) -> float:
        """The largest curvature of L on the steepest batch, for another λ; ∞ if it cannot be computed there."""
        w, batch = self.begin.w, [*self.train, *self.steep][self.steepest]
        if not bool(torch.isfinite(self._product(w, lam, batch, torch.ones_like(w))).all()):
            return math.inf
        return lanczos(_operator(partial(self._product, w, lam, batch)), w, FEW).largest

    def radius(self, most: float, limit: float) -> float:
        """How far all components of λ may move together, at most `most`, while the steepness of L is below a limit."""
        lam = self.begin.lam
        for _ in range(30):
            if max(self.steepness(lam + most), self.steepness(lam - most)) <= limit:
                break
            most /= 4
        return most

    def outer_curvature(self) -> float:
        """The largest curvature of E in w on a batch at the start, by differences of its gradients; at least 0."""
        w, lam = self.begin.w, self.begin.lam
        h = torch.finfo(w.dtype).eps ** (1 / 3) * (1 + float(w.norm()))

        def product(batch: Tree, v: Tensor) -> Tensor:
            size = h / max(float(v.norm()), 1e-30)
            above, below = (self.at.outer(w + sign * size * v, lam, batch)[1] for sign in (1, -1))
            return (above - below) / (2 * size)

        return max(lanczos(_operator(partial(product, batch)), w, PRODUCTS).largest for batch in self.val)

    def _width(self, u: Tensor) -> float:
        """How far along u differences in λ reach."""
        return torch.finfo(u.dtype).eps ** (1 / 3) * (1 + float(self.begin.lam.norm())) / max(float(u.norm()), 1e-30)

    def _crossed(self, w: Tensor, u: Tensor) -> Tensor:
        """Cᵀu, the derivative of ∇_w L along u in λ."""
        lam, size = self.begin.lam, self._width(u)
        return (self._slope(w, lam + size * u) - self._slope(w, lam - size * u)) / (2 * size)

    def _near_minimiser(self) -> Tensor:
        flat, lam = self.at.w, self.begin.lam

        def derivatives(w: Tree) -> tuple[Tensor, Operator]:
            here = flat.vector(w)
            return self._slope(here, lam), _operator(lambda v: self._hessian(here, lam, v))

        tol = 0.01 * float(self._slope(self.begin.w, lam).norm())
        return flat.vector(newton_from(derivatives, flat.tree(self.begin.w), tol, limit=10).w)

    def _solve(self, w: Tensor, b: Tensor) -> Tensor:
        return conjugate(_operator(lambda v: self._hessian(w, self.begin.lam, v)), b, None, 0.1, SOLVE)[0]

    def _slope(self, w: Tensor, lam: Tensor) -> Tensor:
        return torch.stack([self.at.gradient(w, lam, batch) for batch in self.train]).mean(0)

    def _hessian(self, w: Tensor, lam: Tensor, v: Tensor) -> Tensor:
        return torch.stack([self.at.hessian(w, lam, v, batch) for batch in self.train]).mean(0)

    def _product(self, w: Tensor, lam: Tensor, batch: Tree, v: Tensor) -> Tensor:
        return self.at.hessian(w, lam, v, batch)

    def _cross(self, w: Tensor, lam: Tensor, v: Tensor) -> Tensor:
        return torch.stack([self.at.cross(w, lam, v, batch) for batch in self.train]).mean(0)

    def _directions(self, at: Triple) -> Triple:
        return mean_directions(self.at, at, self.train, self.val)[1]


def mean_directions(
    derivatives: Derivatives, at: Triple, train: Sequence[Tree], val: Sequence[Tree]
) -> tuple[Tensor, Triple]:
    """E and the three directions, as means over the batches of both levels."""
    inner = [derivatives.products(at.w, at.lam, at.v, batch) for batch in train]
    outer = [derivatives.outer(at.w, at.lam, batch) for batch in val]
    slope, hessian, cross = (torch.stack(parts).mean(0) for parts in zip(*inner, strict=True))
    value, outer_w, outer_lam = (torch.stack(parts).mean(0) for parts in zip(*outer, strict=True))
    return value, Triple(slope, hessian + outer_w, cross + outer_lam)


def neumann_terms(mu: float, nu: float, accuracy: float = 1e-3, most: int = 1000) -> int:
    """The number of terms of Σ_q (I − H/ν)^q / ν for a relative error of `accuracy`, with curvatures in [μ, ν]."""
    if not mu > 0:
        return most
    return max(2, min(most, math.ceil(math.log(accuracy) / math.log1p(-min(mu / nu, 0.999)))))


def step_size(name: str, given: Any, k: int) -> float:
    """The step size at iteration k, of a number or a function of k. A schedule may end at 0."""
    try:
        value = given(k) if callable(given) else given
        size = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError) as error:
        raise BilevelError(
            f"{name}={given!r} is not a step size; pass a number > 0, a function of k, or None. ({error})"
        ) from error
    if not 0 <= size < math.inf or (size == 0 and not callable(given)):
        said = f" is {size:g} at k = {k}, which" if callable(given) else f"={given!r}"
        raise BilevelError(f"{name}{said} is not a step size; pass a number > 0, a function of k, or None.")
    return size


def _is_saddle(smallest: float, largest: float) -> bool:
    return smallest < -1e-3 * abs(largest) or not largest > 0


def _operator(product: Callable[[Tensor], Tensor]) -> Operator:
    return Operator(product, symmetric=True)
