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
from bilevel.methods.linear_models._at_minimiser import MinimiserMethod, start_of

NEWTON_STEPS, ROUNDS = 10, 40


@dataclass(frozen=True, kw_only=True)
class SvmHeadOptions(HeadOptions):
    """The settings of `SvmHead`.

    Args:
        penalty: 1/C at the start of training.
        smoothing: δ, which is added to the diagonal of the kernel matrix.
    """

    scale: float = 1.0
    penalty: float = 0.1
    smoothing: float = 0.1


class SvmHead(SolvedHead):
    """W = C·Φᵀ(Y − P) with P = argmin over simplices of ½‖Φᵀ(Y − P)‖² + δ/2 ‖Y − P‖² + ⟨P, Y⟩/C.

    This is the dual of the multi-class machine of Crammer and Singer,

        min over W and ξ ≥ 0 of ½‖W‖² + C Σ_n ξ_n   with   (w_{y_n} − w_k)ᵀφ_n ≥ 1 − ξ_n for all k ≠ y_n.

    Its variables are α_n = C(Y_n − P_n): α_nk ≤ C where k = y_n, α_nk ≤ 0 elsewhere, and Σ_k α_nk = 0, which says that
    every row P_n is in the unit simplex. The solution is the limit of projected steps (`FISTA`). `ActiveFace` finds it
    and differentiates at it; `SvmHead(…, method=Implicit(Direct()))` runs the steps and gives the same. The scale s of
    the logits and the penalty 1/C are part of λ.

    Open choices: δ > 0 makes the dual strongly convex, as the authors' identity that is added to the kernel matrix
    does. The features of every episode are scaled to λ_max(ΦΦᵀ) = n, so that one step size converges and C means the
    same on all of them. Where classes have different numbers of images, C is larger for the images of small classes.
    """

    Options: ClassVar[type[LearnerOptions]] = SvmHeadOptions
    inner_steps: ClassVar[int] = 300

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        # An example of weight s enters the dual as s·φ, and of_unit_curvature takes the root of what it is given.
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
        apart = (F.one_hot(labels, ways) - w) * row_weights(labels, ways)[..., None]
        return torch.bmm(support.mT, apart) / lam[PENALTY].double().exp()

    @property
    def dynamics(self) -> FISTA:
        return FISTA(1 / (1 + self.options.smoothing), Indicator(Simplex()))

    def best_method(self, unknowns: int) -> Method:
        return ActiveFace()


@dataclass(frozen=True)
class SimplexQuadratics:
    """L(P) = Σ_j ½⟨P_j − Y_j, G_j(P_j − Y_j)⟩ + ⟨c_j, P_j⟩, the dual of a machine for each episode j.

    The batch is (G, Y, c): kernel matrices episodes × n × n, one-hot labels and costs episodes × n × ways. λ enters
    through them.
    """

    def __call__(self, w: Tensor, lam: Leaves, batch: tuple[Tensor, ...]) -> Tensor:
        kernel, targets, cost = batch
        apart = w - targets
        return (apart * torch.bmm(kernel, apart)).sum() / 2 + (cost * w).sum()

    def slope(self, w: Tensor, lam: Leaves, batch: tuple[Tensor, ...]) -> Tensor:
        """∇L(P)."""
        kernel, targets, cost = batch
        return torch.bmm(kernel, w - targets) + cost


@dataclass(frozen=True)
class ActiveFace(MinimiserMethod):
    """The minimiser of `SimplexQuadratics` over simplices, from the entries of P that are not zero.

    Where these are known, P solves a linear system on the face of the simplices that they span: ΠGΠ d = −Π∇L with Π the
    projection on the directions of the face, which keep the sums of rows. Projected steps find the face. The adjoint
    is q with ΠGΠ q = Π∇E. Both systems are solved by conjugate gradients, all episodes at once.
    """

    structure: ClassVar[type | None] = SimplexQuadratics

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the fixed point", "the outer objective"})

    def check_dynamics(self, process: Process) -> None:
        penalty = getattr(process.bound.dynamics, "penalty", None)
        if not isinstance(penalty, Indicator) or penalty.constraint != Simplex():
            raise BilevelError(
                f"ActiveFace is for FISTA(lr, Indicator(Simplex())), not for {process.bound.dynamics}. Use Implicit()."
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

        def moved(point: Tensor) -> Tensor:
            image: Tensor = Simplex().project(point - lr * inner.slope(point, lam, batch))
            return image

        for round_ in range(ROUNDS):
            known = None
            for _ in range(NEWTON_STEPS):
                free = moved(w) > 0
                # Where the face repeats, its minimiser is the fixed point of the projected step.
                if known is not None and torch.equal(free, known.free):
                    return w, known
                known = _Face(free)
                w = known.nearest(w)
                w = w - known.solve(kernel, inner.slope(w, lam, batch))
            w = previous = Simplex().project(w)
            for t in range(1, 50 * (round_ + 1) + 1):  # accelerated projected steps converge from anywhere
                w, previous = moved(w + (t - 1) / (t + 2) * (w - previous)), w
        rest = float((moved(w) - w).norm())
        warnings.warn(
            f"ActiveFace did not settle on a face: a projected step still moves P by {rest:.2g}, and the hypergradient "
            "carries an error of that order. Set a larger smoothing.",
            BilevelWarning,
            stacklevel=2,
        )
        return w, _Face(moved(w) > 0)


@dataclass(frozen=True, eq=False)
class _Face:
    """The points of the simplices that are zero outside of `free`."""

    free: Tensor

    def nearest(self, w: Tensor) -> Tensor:
        """The nearest point of the face's plane: its rows sum to 1."""
        kept = w * self.free
        return kept + self.free * (1 - kept.sum(-1, keepdim=True)) / self.free.sum(-1, keepdim=True)

    def along(self, v: Tensor) -> Tensor:
        """Πv: zero outside, and rows that sum to 0."""
        kept = v * self.free
        return kept - self.free * kept.sum(-1, keepdim=True) / self.free.sum(-1, keepdim=True)

    def solve(self, kernel: Tensor, right: Tensor, tol: float = 1e-13) -> Tensor:
        """d on the face with ΠGΠ d = Π right, by conjugate gradients for every episode."""
        x = torch.zeros_like(right)
        residual = direction = self.along(right)
        square = residual.square().sum((1, 2), keepdim=True)
        # Relative to what is projected: where Π takes nearly all of it away, the rest is rounding.
        target = tol**2 * right.square().sum((1, 2), keepdim=True)
        for _ in range(10 * right[0].numel()):
            if bool((square <= target).all()):
                break
            image = self.along(torch.bmm(kernel, direction))
            curvature = (direction * image).sum((1, 2), keepdim=True)
            # An episode that is solved stays where it is.
            size = torch.where(square > target, square / curvature, 0.0)
            x, residual = x + size * direction, residual - size * image
            after = residual.square().sum((1, 2), keepdim=True)
            direction = residual + torch.where(square > target, after / square, 0.0) * direction
            square = after
        return x
