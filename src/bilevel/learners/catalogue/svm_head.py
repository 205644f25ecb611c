"""A support vector machine as the classifier (MetaOptNet; Lee, Maji, Ravichandran and Soatto, 2019)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.constraints.simplex import Simplex
from bilevel.dynamics.fista import FISTA
from bilevel.dynamics.penalties import Indicator
from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.learners.base import LearnerOptions
from bilevel.learners.linear_head import PENALTY, HeadOptions, Leaves, SolvedHead, of_unit_curvature, row_weights
from bilevel.learners.settings import setting
from bilevel.methods.linear_models import MinimiserMethod, start_of

# Active-set steps in a round, and the number of rounds. Projected steps follow each round.
NEWTON_STEPS, ROUNDS = 10, 40


@dataclass(frozen=True, kw_only=True)
class SvmHeadOptions(HeadOptions):
    """The settings of `SvmHead`.

    Args:
        penalty: the initial 1/C; it is learned.
        smoothing: δ, which is added to the diagonal of the kernel matrix.
    """

    scale: float = setting(1.0, above=0)
    penalty: float = setting(0.1, above=0)
    smoothing: float = setting(0.1, above=0)


class SvmHead(SolvedHead):
    """W = C·Φᵀ(Y − P) with P = argmin over simplices of ½‖Φᵀ(Y − P)‖² + δ/2 ‖Y − P‖² + ⟨P, Y⟩/C.

    This is the dual of the multi-class support vector machine of Crammer and Singer,

        min over W and ξ ≥ 0 of ½‖W‖² + C Σ_n ξ_n   with   (w_{y_n} − w_k)ᵀφ_n ≥ 1 − ξ_n for all k ≠ y_n.

    Its variables are α_n = C(Y_n − P_n): α_nk ≤ C where k = y_n, α_nk ≤ 0 elsewhere, and Σ_k α_nk = 0, which means
    that every row P_n is in the unit simplex. The solution is the limit of projected steps (`FISTA`). `ActiveFace`
    computes it and differentiates there; `SvmHead(…, method=Implicit(Direct()))` runs the steps and gives the same
    result. The scale s of the logits and the penalty 1/C are leaves of λ.

    Open choices: δ > 0 makes the dual strongly convex, like the identity that the authors add to the kernel matrix. The
    features of every episode are scaled to λ_max(ΦΦᵀ) = n, so that one step size converges and C has the same effect in
    all episodes. If classes have different numbers of images, C is larger for the images of small classes.
    """

    Options: ClassVar[type[LearnerOptions]] = SvmHeadOptions
    inner_steps: ClassVar[int] = 300

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        # An example of weight s enters the dual as s·φ. Squared, because of_unit_curvature takes the root of weights.
        return of_unit_curvature(support, queries, row_weights(labels, ways).square())

    def batch(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        weight, examples = row_weights(labels, ways)[..., None], labels.shape[1]
        rows, targets = support * weight, F.one_hot(labels, ways).double()
        kernel = torch.bmm(rows, rows.mT) + self.options.smoothing * torch.eye(examples).to(rows)
        return kernel / examples, targets, lam[PENALTY].double().exp() * weight * targets / examples

    def inner(self, ways: int) -> SimplexQuadratics:
        return SimplexQuadratics()

    def start(self, lam: Leaves, episodes: int, ways: int, examples: int) -> Tensor:
        return lam[PENALTY].double().new_full((episodes, examples, ways), 1 / ways)

    def classifier(self, w: Tensor, lam: Leaves, support: Tensor, labels: Tensor) -> Tensor:
        ways = w.shape[2]
        dual = (F.one_hot(labels, ways) - w) * row_weights(labels, ways)[..., None]
        return torch.bmm(support.mT, dual) / lam[PENALTY].double().exp()

    @property
    def dynamics(self) -> FISTA:
        return FISTA(1 / (1 + self.options.smoothing), Indicator(Simplex()))

    def best_method(self) -> Method:
        return ActiveFace()


@dataclass(frozen=True)
class SimplexQuadratics:
    """L(P) = Σ_j ½⟨P_j − Y_j, G_j(P_j − Y_j)⟩ + ⟨c_j, P_j⟩, the dual of one support vector machine per episode j.

    The batch is (G, Y, c): kernel matrices episodes × n × n, one-hot labels and costs episodes × n × ways. λ enters
    through them.
    """

    def __call__(self, w: Tensor, lam: Leaves, batch: tuple[Tensor, ...]) -> Tensor:
        kernel, targets, cost = batch
        difference = w - targets
        return (difference * torch.bmm(kernel, difference)).sum() / 2 + (cost * w).sum()

    def slope(self, w: Tensor, lam: Leaves, batch: tuple[Tensor, ...]) -> Tensor:
        """∇L(P)."""
        kernel, targets, cost = batch
        return torch.bmm(kernel, w - targets) + cost


@dataclass(frozen=True)
class ActiveFace(MinimiserMethod):
    """The minimiser of `SimplexQuadratics` over simplices, found from the entries of P that are not zero.

    If these entries are known, P solves a linear system on the face of the simplices that they span: ΠGΠ d = −Π∇L,
    where Π is the projection onto the directions of the face, whose rows sum to 0. Projected steps find the face. The
    adjoint is q with ΠGΠ q = Π∇E. Both systems are solved by conjugate gradients, for all episodes together.
    """

    structure: ClassVar[type | None] = SimplexQuadratics

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the fixed point", "the outer objective"})

    def check_dynamics(self, process: Process) -> None:
        penalty = getattr(process.bound.dynamics, "penalty", None)
        if not isinstance(penalty, Indicator) or penalty.constraint != Simplex():
            raise BilevelError(
                f"ActiveFace needs FISTA(lr, Indicator(Simplex())), not {process.bound.dynamics}. Use Implicit()."
            )

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner, bound = process.problem.inner, process.bound
        assert isinstance(inner, SimplexQuadratics)
        step = bound.dynamics.largest_step(1.0, 1)
        assert step is not None
        kernel = bound.task.train[0].detach()
        w, face = self._minimiser(process, kernel, step[0])
        value, slope, direct = self.outer_slope(process, w)
        q = face.solve(kernel, slope)
        return self.from_adjoint(process, w, q, value, direct, peak_memory=4 * w.nbytes)

    def _minimiser(self, process: Process, kernel: Tensor, lr: float) -> tuple[Tensor, _Face]:
        inner: Any = process.problem.inner
        lam, batch, w = process.bound.lam, process.bound.task.train, start_of(process)

        def projected_step(point: Tensor) -> Tensor:
            image: Tensor = Simplex().project(point - lr * inner.slope(point, lam, batch))
            return image

        for round_ in range(ROUNDS):
            face = None
            for _ in range(NEWTON_STEPS):
                free = projected_step(w) > 0
                # If the face is the same again, its minimiser is a fixed point of the projected step.
                if face is not None and torch.equal(free, face.free):
                    return w, face
                face = _Face(free)
                w = face.nearest(w)
                w = w - face.solve(kernel, inner.slope(w, lam, batch))
            w = previous = Simplex().project(w)
            for t in range(1, 50 * (round_ + 1) + 1):  # accelerated projected steps converge from anywhere
                w, previous = projected_step(w + (t - 1) / (t + 2) * (w - previous)), w
        change = float((projected_step(w) - w).norm())
        warnings.warn(
            f"ActiveFace did not converge: a projected step still changes P by {change:.2g}, and the hypergradient has "
            "an error of that order. Set a larger smoothing.",
            BilevelWarning,
            stacklevel=2,
        )
        return w, _Face(projected_step(w) > 0)


@dataclass(frozen=True, eq=False)
class _Face:
    """The face of the simplices whose entries outside of `free` are zero."""

    free: Tensor

    def nearest(self, w: Tensor) -> Tensor:
        """The nearest point of the plane of the face: zero outside of `free`, with rows that sum to 1."""
        inside = w * self.free
        return inside + self.free * (1 - inside.sum(-1, keepdim=True)) / self.free.sum(-1, keepdim=True)

    def along(self, v: Tensor) -> Tensor:
        """Πv: zero outside of `free`, with rows that sum to 0."""
        inside = v * self.free
        return inside - self.free * inside.sum(-1, keepdim=True) / self.free.sum(-1, keepdim=True)

    def solve(self, kernel: Tensor, right: Tensor, tol: float = 1e-13) -> Tensor:
        """d on the face with ΠGΠ d = Π right, by conjugate gradients for every episode."""
        x = torch.zeros_like(right)
        residual = direction = self.along(right)
        square = residual.square().sum((1, 2), keepdim=True)
        # Relative to the right side before the projection: if Π removes nearly all of it, the rest is rounding error.
        target = tol**2 * right.square().sum((1, 2), keepdim=True)
        for _ in range(10 * right[0].numel()):
            if bool((square <= target).all()):
                break
            image = self.along(torch.bmm(kernel, direction))
            curvature = (direction * image).sum((1, 2), keepdim=True)
            # An episode that has converged is not changed.
            size = torch.where(square > target, square / curvature, 0.0)
            x, residual = x + size * direction, residual - size * image
            after = residual.square().sum((1, 2), keepdim=True)
            direction = residual + torch.where(square > target, after / square, 0.0) * direction
            square = after
        return x
