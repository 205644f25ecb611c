"""The battery for linear solvers."""

from __future__ import annotations

import torch
from torch import Tensor

from bilevel.engine.samplers import same
from bilevel.errors import BilevelError
from bilevel.linear_solvers import LinearSolution, LinearSolver, Operator
from bilevel.testing.differences import agree

SIZE = 12


def check_solver(solver: LinearSolver) -> None:
    """Solve systems A x = b of 12 unknowns; raise an `AssertionError` that says what is wrong.

    On a positive definite system with condition number 8 the solution is right to 1e-8, in float32 to 1e-4, also from
    a warm start, which costs no more. On one that is not symmetric, and on an indefinite one, the solver is right,
    refuses with a `BilevelError`, or reports `converged=False`. The residual and the number of products that it
    reports are the true ones. b = 0 gives x = 0, and no argument is changed.
    """
    positive, skewed, indefinite = _systems()
    b = torch.randn(SIZE, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    cold = _solve(solver, positive, b, symmetric=True)
    exact = torch.linalg.solve(positive, b)
    agree(cold.x, exact, 1e-8, f"{solver} is wrong on a positive definite system", "x")
    assert cold.converged, f"{solver} solved a positive definite system and reports that it did not converge"
    warm = _solve(solver, positive, b, exact, symmetric=True)
    agree(warm.x, exact, 1e-8, f"{solver} moves away from a warm start at the solution", "x")
    assert warm.products <= cold.products + 2, (
        f"{solver} spends {warm.products} products from a start at the solution, and {cold.products} from zero"
    )
    far = _solve(solver, positive, b, exact + 1, symmetric=True)
    agree(far.x, exact, 1e-8, f"{solver} is wrong from a warm start that is not the solution", "x")
    single = _solve(solver, positive.float(), b.float(), symmetric=True)
    agree(single.x, exact, 1e-4, f"{solver} is wrong in float32", "x")
    zero = solver.solve(Operator(lambda v: positive @ v, symmetric=True), torch.zeros_like(b))
    assert float(zero.x.norm()) == 0, f"{solver} does not give x = 0 for b = 0"
    for name, matrix in (("is not symmetric", skewed), ("is indefinite", indefinite)):
        try:
            found = _solve(solver, matrix, b, symmetric=True if name == "is indefinite" else None)
        except BilevelError:
            continue
        if found.converged:
            what = f"{solver} reports that it solved a system that {name}, and is wrong"
            agree(found.x, torch.linalg.solve(matrix, b), 1e-4, what, "x")


def _systems() -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues in [0.5, 4]; the same plus a skew part; the same with two eigenvalues below zero."""
    generator = torch.Generator().manual_seed(5)
    q = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)).Q
    values = torch.linspace(0.5, 4, SIZE, dtype=torch.float64)
    positive = q @ torch.diag(values) @ q.T
    noise = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    signs = torch.ones(SIZE, dtype=torch.float64)
    signs[[2, 7]] = -1
    return positive, positive + 0.3 * (noise - noise.T), q @ torch.diag(values * signs) @ q.T


def _solve(
    solver: LinearSolver, matrix: Tensor, b: Tensor, x0: Tensor | None = None, *, symmetric: bool | None
) -> LinearSolution:
    """One solution, whose reported residual and products are compared with the true ones."""
    products = 0

    def matvec(vector: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return matrix @ vector

    def transposed(vector: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return matrix.T @ vector

    given = [value.clone() for value in (b, x0) if value is not None]
    solution = solver.solve(Operator(matvec, symmetric=symmetric, transposed=transposed), *given)
    assert same(given, [b, x0][: len(given)]), f"{solver} changed b or its warm start"
    assert solution.x.dtype == b.dtype, f"{solver} answers a system in {b.dtype} with {solution.x.dtype}"
    measured = float((b - matrix @ solution.x).norm() / b.norm())
    rounding = 100 * torch.finfo(b.dtype).eps
    assert abs(solution.residual - measured) <= rounding + 1e-3 * measured, (
        f"{solver} reports the residual {solution.residual:.3g}, but ‖b − A x‖/‖b‖ is {measured:.3g}"
    )
    assert abs(solution.products - products) <= 2, (
        f"{solver} reports {solution.products} products with A, but it took {products}"
    )
    return solution
