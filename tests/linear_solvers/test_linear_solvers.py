"""Linear solvers against `torch.linalg.solve`, with the residuals and the products that they report counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bilevel as bl
from bilevel import linear_solvers, testing
from bilevel.linear_solvers import Operator
from bilevel.testing import relative_error

# Each with the accuracy that it reaches on the systems below, and whether it needs a symmetric matrix.
SOLVERS = [
    (bl.CG(tol=1e-12), 1e-10, True),
    (bl.CG(tol=1e-12, preconditioner=bl.Nystrom(rank=4)), 1e-10, True),
    (bl.Nystrom(rank=20), 1e-6, True),
    (bl.Direct(), 1e-12, False),
    (bl.FixedPoint(tol=1e-12), 1e-10, False),
    (bl.Neumann(terms=2000), 1e-10, False),
    (bl.GMRES(tol=1e-12), 1e-10, False),
    (bl.GMRES(tol=1e-12, restart=7), 1e-10, False),
    (bl.BiCGSTAB(tol=1e-12), 1e-10, False),
    (bl.NormalCG(tol=1e-12), 1e-10, False),
]
GENERAL = [case for case in SOLVERS if not case[2]]


class Counted:
    """A matrix that counts the products with it."""

    def __init__(self, matrix):
        self.matrix, self.products = matrix, 0

    def __call__(self, vector):
        self.products += 1
        return self.matrix @ vector

    def transposed(self, vector):
        self.products += 1
        return self.matrix.T @ vector

    def operator(self, symmetric=True, **facts):
        return Operator(self, symmetric=symmetric, transposed=self.transposed, **facts)


def positive_definite(size, seed, condition=20.0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return q @ torch.diag(torch.logspace(0, torch.tensor(condition).log10().item(), size)) @ q.T


def vector(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + 1))


def nonsymmetric(size, seed):
    """Symmetric part positive definite, skew part as large as its smallest eigenvalue."""
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed + 2))
    skew = noise - noise.T
    return positive_definite(size, seed) + skew / torch.linalg.matrix_norm(skew, 2)


def check(solver, accuracy, matrix, b, x0=None, symmetric=True):
    """The solution is right, and what is reported about it is true."""
    counted = Counted(matrix)
    solution = solver.solve(counted.operator(symmetric), b, x0)
    assert solution.converged and relative_error(solution.x, torch.linalg.solve(matrix, b)) < 1e2 * accuracy
    true = float((b - matrix @ solution.x).norm() / b.norm())
    assert true <= accuracy and solution.residual == pytest.approx(true, rel=1e-6, abs=1e-14)
    assert solution.products == counted.products
    return solution


@pytest.mark.parametrize(("solver", "accuracy", "_"), SOLVERS, ids=str)
@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 20), seed=st.integers(0, 1000), symmetric=st.sampled_from([True, None]))
def test_positive_definite_systems(solver, accuracy, _, size, seed, symmetric):
    """Products are counted where the symmetry is known, and where two products test it."""
    check(solver, accuracy, positive_definite(size, seed), vector(size, seed), symmetric=symmetric)


@pytest.mark.parametrize(("solver", "accuracy", "_"), GENERAL, ids=str)
@settings(max_examples=25, deadline=None)
@given(size=st.integers(2, 20), seed=st.integers(0, 1000))
def test_systems_that_are_not_symmetric(solver, accuracy, _, size, seed):
    check(solver, accuracy, nonsymmetric(size, seed), vector(size, seed), symmetric=None)


@pytest.mark.parametrize("solver", [case[0] for case in SOLVERS if case[2]], ids=str)
def test_solvers_for_symmetric_matrices_refuse_others(solver):
    with pytest.raises(bl.BilevelError, match="not symmetric"):
        solver.solve(Operator(lambda v: nonsymmetric(8, 0) @ v), vector(8, 0))


@pytest.mark.parametrize(("solver", "accuracy", "_"), SOLVERS, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), distance=st.sampled_from([1e-8, 1e-3, 1.0, 1e6]))
def test_a_warm_start_changes_the_way_and_not_the_solution(solver, accuracy, _, seed, distance):
    matrix, b = positive_definite(12, seed), vector(12, seed)
    check(solver, accuracy, matrix, b, torch.linalg.solve(matrix, b) + distance * vector(12, seed + 7))


@pytest.mark.parametrize(
    ("solver", "facts"), [(bl.CG(), {}), (bl.FixedPoint(), {"step": 0.05})], ids=["CG", "FixedPoint"]
)
def test_a_warm_start_at_the_solution_costs_one_product_which_measures_the_residual(solver, facts):
    matrix, b = positive_definite(10, 3), vector(10, 3)
    counted, x = Counted(matrix), torch.linalg.solve(matrix, b)
    solution = solver.solve(counted.operator(**facts), b, x)
    assert counted.products == solution.products == 1 and torch.equal(solution.x, x)


@pytest.mark.parametrize("solver", [case[0] for case in SOLVERS], ids=str)
@pytest.mark.parametrize("x0", [None, torch.ones(6)], ids=["cold", "warm"])
def test_zero_is_the_solution_of_b_equal_to_zero(solver, x0):
    solution = solver.solve(Operator(lambda v: positive_definite(6, 1) @ v, symmetric=True), torch.zeros(6), x0)
    assert float(solution.x.norm()) < 1e-8 and solution.residual == 0 and solution.converged


def test_conjugate_gradients_end_after_as_many_products_as_there_are_eigenvalues():
    matrix = torch.diag(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0]))
    assert bl.CG(tol=1e-12).solve(Counted(matrix).operator(), vector(8, 0)).products == 3 + 1


@pytest.mark.parametrize(
    "solver",
    [
        *(bl.CG(max_iter=2), bl.FixedPoint(max_iter=2), bl.Neumann(2)),
        *(bl.GMRES(max_iter=0), bl.BiCGSTAB(max_iter=0), bl.NormalCG(max_iter=0)),
    ],
    ids=str,
)
def test_a_solver_that_stops_early_reports_its_residual(solver):
    matrix, b = positive_definite(20, 0, condition=1000.0), vector(20, 0)
    solution = solver.solve(Counted(matrix).operator(), b)
    assert not solution.converged
    assert solution.residual == pytest.approx(float((b - matrix @ solution.x).norm() / b.norm()), rel=1e-9)


@pytest.mark.parametrize("solver", [bl.CG(), bl.Nystrom(rank=6)], ids=str)
def test_negative_curvature_is_refused(solver):
    with pytest.raises(bl.BilevelError, match=r"curvature|positive"):
        solver.solve(Counted(torch.diag(torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, -1.0]))).operator(), torch.ones(6))


def test_a_fixed_point_iteration_that_diverges_is_refused():
    with pytest.raises(bl.BilevelError, match="diverged"):
        bl.FixedPoint(step=1.0).solve(Counted(5 * torch.eye(4)).operator(), torch.ones(4))


def test_a_singular_matrix_is_refused():
    with pytest.raises(bl.BilevelError, match="singular"):
        bl.Direct().solve(Counted(torch.zeros(3, 3)).operator(), torch.ones(3))


@pytest.mark.parametrize("solver", [cls() for cls in linear_solvers.find().values()], ids=str)
def test_the_advice_of_a_warning_names_settings_that_the_solver_has(solver):
    """`Direct` has no max_iter to raise."""
    words = solver.advice.replace("(", " ").replace(",", " ").split()
    raised = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "Raise"]
    assert solver.advice and all(hasattr(solver, name) for name in raised)
    assert bool(raised) == (type(solver) is not bl.Direct)


def test_implicit_ends_its_warning_with_the_advice_of_the_solver():
    x = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 3e-7]])
    problem = bl.Problem(
        lambda w, lam, b: 0.5 * ((b @ w - lam) ** 2).sum(),
        lambda w, lam, b: w[0] - w[1],
        lambda lam: torch.zeros(2),
    )
    with pytest.warns(bl.BilevelWarning, match="nearly singular"):
        bl.hypergradient(
            problem, torch.ones(2), bl.Task(x, x), dynamics=bl.GradientDescent(0.2), steps=0,
            start=torch.tensor([1.0, 0.0]), method=bl.Implicit(bl.Direct()),
        )  # fmt: skip


def test_a_matrix_too_large_for_direct_is_refused():
    with pytest.raises(bl.BilevelError, match="limit is 3"):
        bl.Direct(largest=3).solve(lambda v: v, torch.ones(4))


def test_conjugate_gradients_on_an_operator_that_brings_its_inverse():
    torch.manual_seed(2)
    matrix = torch.diag(torch.logspace(0, 6, 50))
    b = torch.randn(50)
    plain = bl.CG(tol=1e-10).solve(Operator(lambda v: matrix @ v, symmetric=True), b)
    known = Operator(lambda v: matrix @ v, symmetric=True, inverse=lambda v: v / matrix.diagonal())
    fast = bl.CG(tol=1e-10).solve(known, b)
    assert fast.products == 2 and plain.products > 50
    assert relative_error(fast.x, b / matrix.diagonal()) < 1e-10


@pytest.mark.parametrize("solver", [one for cls in linear_solvers.find().values() for one in cls.examples()], ids=str)
def test_battery(solver):
    testing.check_solver(solver)


def neither_symmetric_nor_contractive(size, seed):
    """Eigenvalues on both sides of zero and far from 1, eigenvectors that are not orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    # Well conditioned, because CG on the normal equations squares the condition number.
    vectors = torch.eye(size) + 0.4 * torch.randn(size, size, generator=generator) / size**0.5
    values = torch.linspace(1, 4, size) * torch.tensor([1.0, -1.0]).repeat(size)[:size]
    return vectors @ torch.diag(values) @ torch.linalg.inv(vectors)


@pytest.mark.parametrize("solver", [bl.GMRES(tol=1e-12), bl.BiCGSTAB(tol=1e-12), bl.NormalCG(tol=1e-12)], ids=str)
@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 16), seed=st.integers(0, 1000))
def test_maps_that_are_neither_symmetric_nor_contractive(solver, size, seed):
    matrix, b = neither_symmetric_nor_contractive(size, seed), vector(size, seed)
    counted = Counted(matrix)
    solution = solver.solve(counted.operator(None), b)
    true = float((b - matrix @ solution.x).norm() / b.norm())
    assert solution.products == counted.products and solution.residual == pytest.approx(true, rel=1e-3, abs=1e-13)
    assert solution.converged == (true <= 1e-11)
    if not isinstance(solver, bl.BiCGSTAB):  # it may give up, and says so
        assert solution.converged


def test_minimal_residuals_end_after_as_many_products_as_there_are_eigenvalues():
    matrix = torch.diag(torch.tensor([1.0, 1.0, -4.0, -4.0, -4.0, 9.0, 9.0, 9.0]))
    assert bl.GMRES(tol=1e-12).solve(Counted(matrix).operator(), vector(8, 0)).products == 3 + 1


@pytest.mark.parametrize("solver", [bl.GMRES(), bl.NormalCG()], ids=str)
def test_a_singular_system_without_a_solution_is_refused(solver):
    matrix = torch.diag(torch.tensor([1.0, -2.0, 3.0, 0.0]))
    with pytest.raises(bl.BilevelError, match="singular"):
        solver.solve(Counted(matrix).operator(None), torch.ones(4))
    assert not bl.BiCGSTAB().solve(Counted(matrix).operator(None), torch.ones(4)).converged


@pytest.mark.parametrize("size", [3, 10, 50])
@pytest.mark.parametrize("seed", range(4))
def test_conjugate_gradients_refuse_a_singular_system_without_a_solution(size, seed):
    """Whatever the sign of the rounding error that is left of the curvature."""
    q = torch.linalg.qr(torch.stack([vector(size, 100 * seed + i) for i in range(size)])).Q
    values = torch.cat([torch.linspace(1, 2, size - 1), torch.zeros(1)])
    with pytest.raises(bl.BilevelError, match=r"singular|curvature .* ≤ 0"):
        bl.CG().solve(Counted(q * values @ q.T).operator(True), vector(size, seed))
    exact = torch.diag(values)
    with pytest.raises(bl.BilevelError, match=r"singular|curvature .* ≤ 0"):
        bl.CG().solve(Counted(exact).operator(True), vector(size, seed))
    solved = bl.CG().solve(Counted(exact + 1e-9 * torch.eye(size)).operator(True), vector(size, seed))
    assert solved.residual < 1e-6


def test_the_normal_equations_need_the_transpose():
    with pytest.raises(bl.BilevelError, match="Aᵀ"):
        bl.NormalCG().solve(Operator(lambda v: nonsymmetric(8, 0) @ v), vector(8, 0))


@pytest.mark.parametrize("solver", [bl.GMRES(tol=1e-12), bl.BiCGSTAB(tol=1e-12)], ids=str)
def test_a_preconditioner_saves_products_and_no_accuracy(solver):
    matrix, b = nonsymmetric(20, 4) + torch.diag(torch.logspace(0, 4, 20)), vector(20, 4)
    diagonal = matrix.diagonal()
    plain = solver.solve(Counted(matrix).operator(None), b)
    helped = solver.solve(Counted(matrix).operator(None, inverse=lambda v: v / diagonal), b)
    assert relative_error(helped.x, torch.linalg.solve(matrix, b)) < 1e-8 and helped.products < plain.products


@pytest.mark.parametrize("method", [bl.Implicit(bl.BiCGSTAB(max_iter=1)), bl.Implicit(bl.GMRES(max_iter=0))])
def test_a_solver_without_progress_is_an_error(method):
    rotation = torch.tensor([[0.0, 2.0], [-2.0, 0.0]])
    problem = bl.Problem(
        fixed_point=lambda w, lam, data: rotation @ w + lam,
        outer=lambda w, lam, data: (w**2).sum(),
        init=lambda lam: torch.zeros(2),
    )
    lam = torch.tensor([1.0, 2.0])
    start = torch.linalg.solve(torch.eye(2) - rotation, lam)
    with pytest.raises(bl.BilevelError, match="without any progress"):
        bl.hypergradient(problem, lam, bl.Task(0, 0), dynamics=bl.Picard(), steps=1, start=start, method=method)
