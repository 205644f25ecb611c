"""Broken linear solvers: the public battery rejects each and says what is wrong.

Every mutant is a part that passes its battery (`test_batteries.py`) with one thing changed.
"""

from dataclasses import dataclass, replace

import pytest
import torch

import bilevel as bl
from bilevel.linear_solvers.base import LinearSolution, LinearSolver, as_operator, relative
from bilevel.testing import check_solver
from testing.mutants import rejected


class FalseResidual(bl.CG):
    def solve(self, matvec, b, x0=None):
        return replace(super().solve(matvec, b, x0), residual=0.0 if x0 is None else 1e-3)


class Loose(bl.CG):
    """It stops early and reports so truthfully; it is not accurate enough all the same."""

    def solve(self, matvec, b, x0=None):
        return bl.CG(tol=1e-2).solve(matvec, b, x0)


class ReturnsTheWarmStart(bl.CG):
    def solve(self, matvec, b, x0=None):
        if x0 is None:
            return super().solve(matvec, b)
        return LinearSolution(x0, relative(b - as_operator(matvec)(x0), b), 1, True)


class ChangesB(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        b.mul_(1 + 1e-9)
        return solution


class Miscounts(bl.CG):
    def solve(self, matvec, b, x0=None):
        return replace(super().solve(matvec, b, x0), products=1)


class NotANumberForZero(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        return replace(solution, x=solution.x * (b.norm() / b.norm()))


class InDouble(bl.CG):
    def solve(self, matvec, b, x0=None):
        solution = super().solve(matvec, b, x0)
        return replace(solution, x=solution.x.double() if b.dtype == torch.float32 else solution.x)


@dataclass(frozen=True)
class Symmetrised(LinearSolver):
    """It solves with (A + Aᵀ)/2 whatever A is, and says that it has converged."""

    always: bool = True

    def solve(self, matvec, b, x0=None):
        operator = as_operator(matvec)
        matrix = operator.rows(torch.eye(len(b), dtype=b.dtype))
        x = torch.linalg.solve((matrix + matrix.T) / 2, b)
        return LinearSolution(x, relative(b - operator(x), b), len(b) + 1, self.always)


class AlwaysConverged(bl.FixedPoint):
    def solve(self, matvec, b, x0=None):
        operator = as_operator(matvec)
        x, products = 0.2 * b if x0 is None else x0, 200
        for _ in range(products):
            x = x + 0.2 * (b - operator(x))
        return LinearSolution(x, relative(b - operator(x), b), products + 1, True)


SOLVERS = [
    (FalseResidual(), "reports the residual 0.001, but"),
    (Loose(), "wrong on a positive definite system"),
    (ReturnsTheWarmStart(), "warm start that is not the solution"),
    (ChangesB(), "changed b"),
    (Miscounts(), "reports 1 products"),
    (NotANumberForZero(), "x = 0 for b = 0"),
    (InDouble(), "float32"),
    (Symmetrised(), "not symmetric, and is wrong"),
    (Symmetrised(always=False), "reports that it did not converge"),
    (AlwaysConverged(), "is indefinite, and is wrong"),
]


@pytest.mark.parametrize(("mutant", "match"), SOLVERS, ids=lambda value: type(value).__name__)
def test_a_broken_linear_solver(mutant, match):
    rejected(check_solver, mutant, match)
