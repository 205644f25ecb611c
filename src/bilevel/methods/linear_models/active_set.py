"""The elastic net by its active set: the coefficients that are not zero satisfy linear equations."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient, Part
from bilevel.engine.process import Process
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._at_minimiser import MinimiserMethod, cholesky_solver, started
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.penalties import FunctionOfLam
from bilevel.structures.rows import GramOfRows

NEWTON_STEPS, ROUNDS = 10, 40


@dataclass(frozen=True)
class ActiveSet(MinimiserMethod):
    """The minimiser of `LeastSquares` plus an L1 penalty, the limit of `ISTA(lr, L1(…))` and `FISTA(lr, L1(…))`.

    Where the signs of w are known, the fixed point of the proximal step is w_S = (b_S − β_S sign(w_S)) A_SS⁻¹ on the
    support S, with A = G + diag(α) and β the strengths of the L1 penalty. Proximal steps find the signs, the equations
    do the rest. The adjoint is q_S = ∇_S E A_SS⁻¹, and zero off the support. λ may enter through α and β.

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
        if _weights(process) is None:
            raise BilevelError(
                "ActiveSet is for proximal dynamics with an L1 penalty, such as FISTA(lr, L1(strength)), not for "
                f"{process.bound.dynamics}. Use Implicit()."
            )

    def at_minimiser(self, process: Process) -> Hypergradient:
        inner, bound, w = process.problem.inner, process.bound, started(process)
        assert isinstance(inner, LeastSquares)
        with torch.set_grad_enabled(self.strengths is None):
            strengths = torch.as_tensor(_weights(process), dtype=w.dtype)
        step = bound.dynamics.largest_step(1.0, _time(process))
        assert step is not None
        gram, moments = bound.task.train
        l1, positive = strengths.detach().expand_as(w), _is_positive(process)
        nets = _Nets(gram, moments, l1, inner.penalty(bound.lam), step[0], positive)
        w, solve = nets.minimise(w)
        value, slope, direct = self.outer_slope(process, w)
        q = solve(slope)
        if self.strengths is None:
            with torch.enable_grad():
                beside = strengths * w.sign()
            return self.combined(process, w, q, value, direct, beside, peak_memory=4 * w.nbytes)
        declared = self.strengths.linearised(bound.lam)[0]
        if not torch.allclose(declared, strengths.detach()):
            raise BilevelError(
                "ActiveSet(strengths=…) has other values than the L1 penalty of the dynamics. Pass the same "
                "function to both, or leave strengths out."
            )
        more = [(self.strengths, -(q * w.sign()).sum((0, 1)))]
        return self.combined(process, w, q, value, direct, more=more, peak_memory=4 * w.nbytes)


def _time(process: Process) -> int:
    return max(process.times.stop - 1, 1)


def _weights(process: Process) -> Any:
    """β, or None where the dynamics has no L1 penalty."""
    penalty = getattr(process.bound.dynamics, "penalty", None)
    return None if penalty is None else penalty.absolute_weights(_time(process))


def _is_positive(process: Process) -> bool:
    """Whether the penalty allows no negative coefficients."""
    return bool(getattr(process.bound.dynamics.penalty, "positive", False))


# Solves A_SS x_S = b_S for every fold and output, with x = 0 off the support S.
SupportSolver: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Nets:
    """½⟨w, wG⟩ − ⟨linear, w⟩ + Σ l1_j |w_j| + ½ Σ l2_j w_j² for all folds and outputs, folds × outputs × features."""

    gram: Any
    linear: Tensor
    l1: Tensor
    l2: Tensor
    lr: float
    positive: bool = False

    def minimise(self, w: Tensor) -> tuple[Tensor, SupportSolver]:
        """The minimisers, and products with the inverses of the matrices on their supports."""
        for round_ in range(ROUNDS):
            found, settled, solve = self._newton(w)
            if settled is None:
                return found, solve
            w = torch.where(settled[..., None], found, self._proximal_steps(w, 50 * (round_ + 1)))
        return w, self._solver(w != 0)

    def _slope(self, w: Tensor) -> Tensor:
        image = self.gram.times(w) if isinstance(self.gram, GramOfRows) else w @ self.gram
        return image + self.l2 * w - self.linear

    def _newton(self, w: Tensor) -> tuple[Tensor, Tensor | None, SupportSolver]:
        """Newton's method for the fixed point of the proximal step, w = prox(w − lr·∇L(w)).

        The map is linear where the signs of its image stay the same, so a step solves a linear system on the support;
        once the signs repeat, w is the fixed point. Close to it a few steps are enough. Far from it they may cycle:
        then the second result says which folds and outputs are at their fixed points. It is None if all are.
        """
        threshold, penalised = self.lr * self.l1, self.l1 > 0
        signs = solve = None
        settled: Tensor | None = None
        for _ in range(NEWTON_STEPS):
            image = w - self.lr * self._slope(w)
            # A coefficient without an L1 penalty is always in the support.
            next_signs = torch.where(penalised, image.sign() * (image.abs() > threshold), 1.0)
            if self.positive:
                next_signs = (image > threshold).to(image.dtype)
            if signs is not None and solve is not None and torch.equal(signs, next_signs):
                return w, None, solve
            settled = None if signs is None else (signs == next_signs).all(-1)
            signs, solve = next_signs, self._solver(next_signs != 0)
            w = solve(self.linear - self.l1 * signs)
        assert settled is not None and solve is not None
        return w, settled, solve

    def _proximal_steps(self, w: Tensor, steps: int) -> Tensor:
        """Accelerated proximal gradient steps (FISTA), which converge from anywhere."""
        previous = w
        for t in range(1, steps + 1):
            ahead = w + (t - 1) / (t + 2) * (w - previous)
            image = ahead - self.lr * self._slope(ahead)
            shrunk = (image.abs() - self.lr * self.l1).relu()
            previous, w = w, (image > 0) * shrunk if self.positive else image.sign() * shrunk
        return w

    def _solver(self, support: Tensor) -> SupportSolver:
        """All systems are filled up with rows of the identity to the size of the largest one."""
        size = int(support.sum(-1).max())
        if size == 0:
            return torch.zeros_like
        order = support.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :size]
        on = support.gather(-1, order).to(self.l2.dtype)
        if isinstance(self.gram, GramOfRows):
            blocks = self.gram.blocks(order)
        else:
            fold = torch.arange(len(self.gram))[:, None, None, None]
            blocks = self.gram[fold, order[..., :, None], order[..., None, :]]
        blocks = blocks * (on[..., :, None] * on[..., None, :])
        blocks.diagonal(dim1=-2, dim2=-1).add_(1 + on * (self.l2[order] - 1))
        inverse = cholesky_solver(blocks.flatten(0, 1))

        def solve(right: Tensor) -> Tensor:
            found = inverse((right.gather(-1, order) * on).reshape(-1, 1, size)).reshape(on.shape)
            return torch.zeros_like(right).scatter_(-1, order, found * on)

        return solve
