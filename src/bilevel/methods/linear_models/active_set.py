"""The elastic net by its active set: the coefficients that are not zero satisfy linear equations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bilevel.dynamics import Dynamics
from bilevel.engine.method import Hypergradient, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.methods.linear_models._at_minimiser import (
    NO_MINIMUM,
    LinearModelMethod,
    Minimum,
    least_norm_solver,
    regular_solver,
    semidefinite,
    start_of,
)
from bilevel.methods.linear_models._feature_signs import feature_sign_search
from bilevel.methods.linear_models._shared_work import Parts, fold_parts, shared
from bilevel.structures.data_checks import remembered
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.penalties import FunctionOfLam
from bilevel.structures.rows import GramOfRows

NEWTON_STEPS = 10
# Features that are added to a working set at once.
WORKING = 200
# A relative residual of the adjoint's system above this is reported.
UNSOLVED = 1e-6


@dataclass(frozen=True)
class ActiveSet(LinearModelMethod):
    """The minimiser of `LeastSquares` plus an L1 penalty, the limit of `ISTA(lr, L1(…))` and `FISTA(lr, L1(…))`.

    Where the signs of w are known, the fixed point of the proximal step is w_S = (b_S − β_S sign(w_S)) A_SS⁻¹ on the
    support S, with A = G + diag(α) and β the strengths of the L1 penalty. Newton's method on these equations finds the
    signs if it starts near the minimiser; otherwise a feature-sign search finds them. The adjoint is
    q_S = ∇_S E A_SS⁻¹, and zero off the support. λ may enter through α and β.

    Args:
        strengths: β as a function of λ, if it is a `FunctionOfLam`: it is then differentiated without autograd. It must
            have the values of the dynamics' penalty.
    """

    strengths: FunctionOfLam | None = None
    structure: ClassVar[type | None] = LeastSquares

    def check_key(self) -> Hashable:
        return type(self), type(self.strengths)

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the fixed point", "the outer objective"})

    def check_dynamics(self, process: Process) -> None:
        if _strengths(process) is None:
            raise BilevelError(
                "ActiveSet is for proximal dynamics with an L1 penalty, such as FISTA(lr, L1(strength)), not for "
                f"{process.bound.dynamics}. Use Implicit()."
            )

    def minimum(self, process: Process) -> Minimum:
        inner, bound, w = process.problem.inner, process.bound, start_of(process)
        assert isinstance(inner, LeastSquares)
        gram, moments = bound.task.train
        strengths = torch.as_tensor(_strengths(process), dtype=w.dtype, device=w.device)
        alpha = inner.penalty(bound.lam)
        if alpha.ndim != 1:
            raise BilevelError("ActiveSet takes one penalty for every feature, not a matrix. Use Implicit().")
        if bool((strengths < 0).any()) or not _has_minimum(gram, alpha):
            raise BilevelError(NO_MINIMUM)
        positive = bool(getattr(bound.dynamics.penalty, "positive", False))
        nets = _Nets(gram, moments, strengths.expand_as(w), alpha, positive)
        w, solve = nets.minimise_by_fold(w)
        if self.strengths is None:
            return Minimum(w, solve)
        if not torch.allclose(self.strengths.linearised(bound.lam)[0], strengths):
            raise BilevelError(
                "ActiveSet(strengths=…) has other values than the L1 penalty of the dynamics. Pass the same "
                "function to both, or leave strengths out."
            )
        return Minimum(w, solve, others=((self.strengths, w.sign()),))

    def at_minimiser(self, process: Process) -> Hypergradient:
        if self.strengths is not None:
            return super().at_minimiser(process)
        found = self.minimum(process)
        value, slope, direct = self.outer_slope(process, found.w)
        with torch.enable_grad():
            extra_slope = (
                torch.as_tensor(_strengths(process), dtype=found.w.dtype, device=found.w.device) * found.w.sign()
            )
        memory = 4 * found.w.nbytes
        return self.from_adjoint(process, found.w, found.solve(slope), value, direct, extra_slope, peak_memory=memory)


def _strengths(process: Process) -> Any:
    """β, or None if the dynamics has no L1 penalty, or has other steps than ISTA and FISTA."""
    dynamics = process.bound.dynamics
    if type(dynamics).stationary_step is Dynamics.stationary_step:
        return None
    penalty = getattr(dynamics, "penalty", None)
    return None if penalty is None else penalty.absolute_weights(max(process.times.stop - 1, 1))


def _has_minimum(gram: Any, alpha: Tensor) -> bool:
    """Whether G + diag(α) has no negative eigenvalue. G itself is tested once."""
    if bool((alpha >= 0).all()) and (isinstance(gram, GramOfRows) or remembered(semidefinite, gram)):
        return True
    return not isinstance(gram, GramOfRows) and semidefinite(gram + alpha.diag())


# Solves A_SS x_S = b_S for every fold and output, with x = 0 off the support S.
SupportSolver: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Nets:
    """½⟨w, wG⟩ − ⟨linear, w⟩ + Σ l1_j |w_j| + ½ Σ l2_j w_j² for all folds and outputs, folds × outputs × features."""

    gram: Any
    linear: Tensor
    l1: Tensor
    l2: Tensor
    positive: bool = False

    def minimise_by_fold(self, w: Tensor) -> tuple[Tensor, SupportSolver]:
        """`minimise`, divided among the processes that share the work. Each keeps the matrices of its own folds."""
        parts = self._parts(w)
        solvers: dict[int, SupportSolver] = {}

        def minimised(part: int) -> Tensor:
            here = parts.slices[part]
            nets = self if len(parts.slices) == 1 else self._of_folds(here)
            found, solvers[part] = nets.minimise(w[here])
            return found

        def solve(right: Tensor) -> Tensor:
            return parts.joined(lambda part: solvers[part](right[parts.slices[part]]), torch.empty_like(right))

        return parts.joined(minimised, w), solve

    def _parts(self, w: Tensor) -> Parts:
        # With a Gram matrix for each fold, folds share no work. An evaluation takes at least two products with each.
        # A product with the rows of a wide table serves all folds, so these stay together.
        return fold_parts(len(w), 0 if isinstance(self.gram, GramOfRows) else 4 * w.numel() * w.shape[-1])

    def _of_folds(self, folds: slice) -> _Nets:
        return _Nets(self.gram[folds], self.linear[folds], self.l1[folds], self.l2, self.positive)

    def minimise(self, w: Tensor) -> tuple[Tensor, SupportSolver]:
        """The minimisers, and products with the inverses of the matrices on their supports."""
        found, settled, solve = self._newton(w, regular=True)
        if bool(settled.all()):
            return found, solve
        w = torch.where(settled[..., None], found, w)
        wanted = (~settled).nonzero().tolist()
        searched = shared(lambda i: self._by_sign_search(w, *wanted[i]), len(wanted), w[0, 0])
        for (k, output), row in zip(wanted, searched, strict=True):
            w[k, output] = row
        found, settled, solve = self._newton(w)
        if bool(settled.all()):
            return found, self._watched(solve, found)
        last = self._solver(w != 0)
        assert last is not None
        return w, self._watched(last, w)

    def _watched(self, solve: SupportSolver, w: Tensor) -> SupportSolver:
        """`solve`, with a warning if the system has no solution: its matrix is singular, and w is not unique."""

        def solved(right: Tensor) -> Tensor:
            found = solve(right)
            if right.ndim == 3:
                inside = (w != 0) * right
                left = (w != 0) * (self._slope(found) + self.linear) - inside
                error = float(left.norm() / inside.norm().clamp(min=torch.finfo(w.dtype).tiny))
                if error > UNSOLVED:
                    warnings.warn(
                        "The minimiser is not unique, for example because two features are equal, and the outer "
                        "objective depends on which one is found. The system of the adjoint has no solution (relative "
                        f"residual {error:.2g}), and the hypergradient has an error of that order. Use a positive "
                        "penalty in LeastSquares(…), or remove one of the features.",
                        BilevelWarning,
                        stacklevel=2,
                    )
            return found

        return solved

    def _slope(self, w: Tensor) -> Tensor:
        image = self.gram.times(w) if isinstance(self.gram, GramOfRows) else w @ self.gram
        return image + self.l2 * w - self.linear

    @cached_property
    def _steps(self) -> Tensor:
        """1 / the curvature of each coordinate, folds × 1 × features."""
        diagonal = self.gram.diagonal() if isinstance(self.gram, GramOfRows) else self.gram.diagonal(dim1=1, dim2=2)
        return 1 / (diagonal + self.l2).clamp(min=1e-300)[:, None]

    def _newton(self, w: Tensor, regular: bool = False) -> tuple[Tensor, Tensor, SupportSolver]:
        """Newton's method for the fixed point of a proximal step, w = prox(w − step·∇L(w)).

        The map is linear where the signs of its image stay the same, so a step solves a linear system on the support;
        once the signs repeat, w is the fixed point. Close to it a few steps are enough. Far from it they may cycle, so
        the loop ends once the number of changed signs stops falling. The second result says which folds and outputs
        are at their fixed points.

        Args:
            regular: end also where a system is singular. Far from the fixed point, the support may have more
                coefficients than there are rows, and a pseudo-inverse takes longer than the sign search that follows.
        """
        steps, threshold, penalised = self._steps, self._steps * self.l1, self.l1 > 0
        # A singular system may have no solution. Then the signs repeat, but the slope on the support is not zero.
        tolerance = 1e-9 * self.linear.abs().amax(-1, keepdim=True)
        signs = torch.full_like(w, torch.nan)
        solve: SupportSolver = torch.zeros_like
        changes = math.inf
        for _ in range(NEWTON_STEPS):
            slope = self._slope(w)
            image = w - steps * slope
            # A coefficient without an L1 penalty is always in the support.
            next_signs = torch.where(penalised, image.sign() * (image.abs() > threshold), 1.0)
            if self.positive:
                next_signs = (image > threshold).to(image.dtype)
            other = signs != next_signs
            unbalanced = (slope + self.l1 * signs).abs() > tolerance
            settled = ~(other | (unbalanced & (signs != 0))).any(-1)
            before, changes = changes, int(other.sum())
            if changes == 0 or changes >= before:
                break
            found = self._solver(next_signs != 0, regular)
            if found is None:
                break
            signs, solve = next_signs, found
            w = solve(self.linear - self.l1 * signs)
        return w, settled, solve

    def _by_sign_search(self, start: Tensor, k: int, output: int) -> Tensor:
        """The minimiser of one fold and output, by sign searches on a working set of features.

        The features that violate the optimality conditions most are added until none does.
        """
        w, l1, linear = start[k, output], self.l1[k, output], self.linear[k, output]
        gram: Any = self.gram.fold(k) if isinstance(self.gram, GramOfRows) else self.gram[k]
        tolerance, working, solved = 1e-10 * linear.abs().max(), w != 0, False
        while True:
            image = gram.times(w[None, None])[0, 0] if isinstance(gram, GramOfRows) else w @ gram
            slope = linear - image - self.l2 * w
            violation = ((slope if self.positive else slope.abs()) - l1).masked_fill(working, 0)
            room = min(max(WORKING, int(working.sum())), len(w))
            wrong = violation >= violation.topk(room).values[-1].clamp(min=tolerance)
            working |= wrong
            if not bool(wrong.any()) and (solved or not bool(working.any())):
                return w
            here = working.nonzero()[:, 0]
            several = isinstance(gram, GramOfRows)
            block = gram.blocks(here[None, None])[0, 0] if several else gram[here][:, here]
            block.diagonal().add_(self.l2[here])
            found = feature_sign_search(
                block.numpy(), linear[here].numpy(), l1[here].numpy(), w[here].numpy(), self.positive
            )
            w, solved = torch.zeros_like(w).index_copy(0, here, torch.from_numpy(found)), True

    def _solver(self, support: Tensor, regular: bool = False) -> SupportSolver | None:
        """All systems are filled up with rows of the identity to the size of the largest one.

        With `regular`, None where one of them is singular.
        """
        size = int(support.sum(-1).max())
        if size == 0:
            return torch.zeros_like
        order = support.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :size]
        on = support.gather(-1, order).to(self.l2.dtype)
        if isinstance(self.gram, GramOfRows):
            blocks = self.gram.blocks(order)
        else:
            fold = torch.arange(len(self.gram), device=order.device)[:, None, None, None]
            blocks = self.gram[fold, order[..., :, None], order[..., None, :]]
        blocks = blocks * (on[..., :, None] * on[..., None, :])
        blocks.diagonal(dim1=-2, dim2=-1).add_(1 + on * (self.l2[order] - 1))
        matrices = blocks.flatten(0, 1)
        inverse = regular_solver(matrices, 4 * size * torch.finfo(matrices.dtype).eps)
        if inverse is None and regular:
            return None
        inverse = inverse or least_norm_solver(matrices)

        def solve(right: Tensor) -> Tensor:
            """Right sides of the shape of w, or folds × right sides × outputs × features."""
            many = right if right.ndim == 4 else right[:, None]
            index = order[:, None].expand(-1, many.shape[1], -1, -1)
            inside = (many.gather(-1, index) * on[:, None]).transpose(1, 2)
            found = inverse(inside.flatten(0, 1)).reshape(inside.shape).transpose(1, 2) * on[:, None]
            return torch.zeros_like(many).scatter_(-1, index, found).reshape(right.shape)

        return solve
