"""Implicit differentiation of the condition that holds at the inner minimiser."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.diagnosis import refuse_diverged
from bilevel.engine.limits import objective_at_rest, refuse_other_limits
from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Gradients, Process, State, accumulate, live_copy
from bilevel.engine.products import batched_grad, jacobian_vector_products
from bilevel.engine.purity import refuse_impure
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.linear_solvers import LinearSolver, Operator
from bilevel.linear_solvers.bicgstab import BiCGSTAB
from bilevel.linear_solvers.cg import CG
from bilevel.linear_solvers.direct import Direct
from bilevel.linear_solvers.fixed_point import FixedPoint
from bilevel.linear_solvers.gmres import GMRES
from bilevel.linear_solvers.neumann import Neumann
from bilevel.linear_solvers.normal_cg import NormalCG
from bilevel.linear_solvers.nystrom import Nystrom
from bilevel.methods.implicit.kinks import refuse_kink, warn_of_kinks
from bilevel.methods.implicit.near_minimiser import newton
from bilevel.methods.implicit.preconditioner import Preconditioner, inverse_at

# A residual of the condition above which it is tested whether the dynamics diverged.
HUGE = 1e6


@dataclass(frozen=True)
class Implicit(Method):
    """∇f = ∇_λ E − ∇²_{λw}L (∇²_w L)⁻¹ ∇_w E at w_T, from ∇_w L(w_λ, λ) = 0 and the implicit function theorem.

    It is the gradient of the limit f, evaluated at w_T. It is exact if the inner problem has converged; otherwise
    `certify` bounds its error. With `newton` the inner problem is solved to a tolerance instead of in T steps. A λ that
    enters through the step size or the start is refused.

    Proximal dynamics, whose limits do not satisfy ∇L = 0, are differentiated through their fixed point w = Φ(w, λ)
    instead; there λ may enter through the penalty. A weight decay that a `torch.optim` class adds to the gradient is
    added to L. For other dynamics, every call tests whether the step converges to ∇L = 0, without calling L. A decay, a
    shrinkage, a projection or a mirror map in the step is refused. For these, and for a λ that enters a step function
    itself, pass `condition="fixed-point"`.

    Args:
        solver: of the linear system. None means CG() for a Hessian, FixedPoint() for a fixed point, and GMRES() for a
            fixed point that the problem itself declares.
        condition: "auto", or "fixed-point" to differentiate w = Φ_T(w, λ) of a smooth dynamics too.
        newton: after the T steps (one is enough), continue by Newton's method, with CG, until ‖∇_w L‖ is at most this.
            Value and gradient are those at the resulting point.
        preconditioner: `f(w, lam, task)` that returns a function of v, a tree like w, with roughly (∇²_w L)⁻¹ v: a
            symmetric positive definite map, such as a Cholesky factor of the Hessian on some of the rows. It is called
            once per hypergradient, at w_T, and used in Newton's method and in the linear system. A poor one costs more
            products, but no accuracy.
        check_kinks: refuse a w_T beside a kink of L. Pass False if an approximation is enough, as for a network with
            ReLUs that is trained for a few steps: there are kinks everywhere, and the minimiser is at none of them.

    Both tolerances may be large while λ is far from the solution: `solve` takes a function of the hyperiteration, as in
    `method=lambda k: Implicit(CG(tol=0.1 * 0.9**k), newton=0.1 * 0.9**k)`. With `start="warm"` both solvers start from
    their last results.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: torch.cosh(w - x) + lam.exp() * w**2,
    ...     outer=lambda w, lam, x: (w - x) ** 2,
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> task, lam = bl.Task(torch.tensor(2.0).double(), torch.tensor(1.0).double()), torch.zeros(()).double()
    >>> method = bl.Implicit(bl.CG(tol=1e-9), newton=1e-9)
    >>> hg = bl.hypergradient(problem, lam, task, dynamics=bl.GradientDescent(0.1), steps=1, method=method)
    >>> round(float(hg.value), 6), round(float(hg.grad), 6)
    (0.050018, 0.180541)
    """

    solver: LinearSolver | None = None
    condition: Literal["auto", "fixed-point"] = "auto"
    newton: float | None = None
    preconditioner: Preconditioner | None = None
    check_kinks: bool = True
    exact: ClassVar[bool] = False
    sees_dynamics: ClassVar[bool] = False

    def check(self, process: Process) -> None:
        if self.solver is not None and not isinstance(self.solver, LinearSolver):
            raise BilevelError(
                f"Implicit(solver={self.solver!r}) is not a linear solver. Pass one such as CG(tol=1e-8), "
                "Neumann(terms=50) or Direct()."
            )
        if callable(process.bound.task.train):
            warnings.warn(
                "Implicit differentiates one inner objective, but task.train is a function of t: it uses the batch of "
                "the last step. Use Reverse() or Truncated(k) for the gradient of what was run.",
                BilevelWarning,
                stacklevel=2,
            )
        if self.condition not in ("auto", "fixed-point"):
            raise BilevelError(f"Implicit(condition={self.condition!r}) is not known; pass 'auto' or 'fixed-point'.")
        if self.preconditioner is not None:
            self._check_preconditioner(process)
        if self.newton is None:
            return
        if isinstance(self.newton, bool) or not isinstance(self.newton, (int, float)) or not self.newton > 0:
            raise BilevelError(f"Implicit(newton={self.newton!r}) is not a norm of ∇L to stop at; pass a number > 0.")
        if self._at_fixed_point(process):
            raise BilevelError(
                f"Implicit(newton={self.newton}) seeks a point with ∇L = 0, and the limits of this dynamics are other "
                "points, its fixed points. Leave newton out and run more steps."
            )

    def _check_preconditioner(self, process: Process) -> None:
        if not callable(self.preconditioner):
            raise BilevelError(
                f"Implicit(preconditioner={type(self.preconditioner).__name__}) is not a function of (w, lam, task). "
                "Pass one that returns a function of v, as in `lambda w, lam, task: lambda v: v / diagonal`."
            )
        if not isinstance(self.solver or CG(), CG) or getattr(self.solver, "preconditioner", None):
            raise BilevelError(
                f"Implicit({self.solver!r}, preconditioner=…) would not use the preconditioner. Pass CG(tol), without "
                "a preconditioner of its own, or leave one of the two out."
            )
        if self._at_fixed_point(process):
            raise BilevelError(
                "Implicit(preconditioner=…) is for the Hessian of the inner objective, but here the fixed point of the "
                "dynamics is differentiated, whose matrix is not symmetric. Leave the preconditioner out."
            )

    def check_key(self) -> Hashable:
        # The checks do not depend on tolerances, which may change at every call.
        return type(self), self.condition

    def sees(self, process: Process) -> frozenset[Part]:
        at_rest: set[Part] = {"the fixed point"} if self._at_fixed_point(process) else set()
        return frozenset({"the inner objective", "the outer objective", *at_rest})

    def _at_fixed_point(self, process: Process) -> bool:
        if self.condition == "fixed-point":
            return True
        bound, t = process.bound, process.times.stop - 1
        with torch.no_grad():
            return bound.dynamics.stationary_step(bound.loss(max(t, 1)), bound.start()[0], max(t, 1)) is not None

    def __call__(self, process: Process) -> Hypergradient:
        state = process.run()
        self._warn_unless_finished(process, state)
        inverse = None if self.preconditioner is None else inverse_at(self.preconditioner, process, state[0])
        state, spent = self._solved(process, state, inverse)
        value, alpha, direct, _ = process.outer_gradients(state)
        system = _fixed_point(process, state) if self._at_fixed_point(process) else _stationary(process, state)
        points, form, sign, symmetric = system
        self._refuse_diverged(process, state, system)
        b = trees.to_vector([torch.zeros_like(p) if a is None else a for p, a in zip(points, alpha, strict=False)])

        operator = replace(_adjoint_operator(form, points, sign, symmetric), inverse=inverse)
        if symmetric:
            slope = trees.to_vector(form).detach()
            refuse_other_limits(process, state[0], slope)
            if self.check_kinks:
                refuse_kink(_slope_at(process, state), trees.to_vector(points).detach(), slope, operator.matvec)
        declared = process.problem.fixed_point is not None
        solver = self.solver or (CG() if symmetric else GMRES() if declared else FixedPoint())
        if process.adjoint is not None and process.adjoint.shape != b.shape:
            raise BilevelError(
                f"adjoint has shape {list(process.adjoint.shape)}, but this system has {b.numel()} unknowns. Pass the "
                "`.adjoint` of a result for the same problem and method."
            )
        solution = solver.solve(operator, b, process.adjoint)
        if not solution.converged:
            stopped = (
                f"{type(solver).__name__} stopped at a relative residual of {solution.residual:.2g} after "
                f"{solution.products} products"
            )
            if not math.isfinite(solution.residual) or not bool(solution.x.any()):
                raise BilevelError(f"{stopped}, without any progress towards the solution. {solver.advice}")
            warnings.warn(
                f"{stopped}; the hypergradient carries an error of that order. {solver.advice}",
                BilevelWarning,
                stacklevel=2,
            )
        parts = trees.from_vector(solution.x, points)
        recorded = [(f, v) for f, v in zip(form, parts, strict=True) if f.requires_grad]
        heads, cotangents = zip(*recorded, strict=True)
        cross = torch.autograd.grad(heads, process.variables, cotangents, allow_unused=True, retain_graph=True)
        gradients: Gradients = [
            accumulate(d, None if c is None else -sign * c) for d, c in zip(direct, cross, strict=True)
        ]
        return self.result(
            process,
            value,
            state,
            gradients,
            extra={"adjoint": solution.x},
            steps=process.steps,
            residual=solution.residual,
            products=solution.products + spent,
            peak_memory=4 * trees.nbytes(points),
        )

    def _refuse_diverged(self, process: Process, state: State, system: System) -> None:
        """Refuse a w_T that is on its way to infinity: there is no limit to differentiate."""
        points, form, sign, _ = system
        with torch.no_grad():
            left = form if sign > 0 else [f - p for f, p in zip(form, points, strict=True)]
            if self.newton is None and process.steps and float(trees.norm(left)) > HUGE:
                refuse_diverged(process, state)

    def _warn_unless_finished(self, process: Process, state: State) -> None:
        """Warn about a dynamics with a tolerance that T steps did not reach."""
        dynamics = process.bound.dynamics
        if self.newton is not None or not process.steps or dynamics.iterations(state[1]) is None:
            return
        if not dynamics.finished(state[1]):
            warnings.warn(
                f"{dynamics} did not reach its tolerance in steps={process.steps}, so that the implicit gradient is "
                "not evaluated at its limit. Allow more steps or iterations, or a larger tolerance.",
                BilevelWarning,
                stacklevel=3,
            )

    def _solved(self, process: Process, state: State, inverse: Callable[[Tensor], Tensor] | None) -> tuple[State, int]:
        """The state to differentiate at, and the number of products that Newton's method took."""
        if self.newton is None:
            return state, 0
        loss = objective_at_rest(process.bound, max(process.times.stop - 1, 1))
        found = newton(loss, state[0], self.newton, inverse=inverse)
        if not found.gradient_norm <= self.newton:
            warnings.warn(
                f"Newton's method stopped at ‖∇L‖ = {found.gradient_norm:.3g}, above newton={self.newton:.3g}; the "
                "hypergradient carries an error of that order. Use float64, or a larger tolerance.",
                BilevelWarning,
                stacklevel=3,
            )
        with torch.no_grad():
            return (found.w, process.bound.dynamics.init(found.w)), found.products

    @classmethod
    def examples(cls) -> list[Self]:
        return [
            cls(),
            cls(CG(tol=1e-12), newton=1e-10),
            cls(CG(tol=1e-12)),
            cls(FixedPoint(tol=1e-12)),
            cls(Neumann(terms=500)),
            cls(Nystrom(rank=100)),
            cls(Direct()),
            cls(FixedPoint(tol=1e-12), condition="fixed-point"),
            cls(Direct(), condition="fixed-point"),
            cls(GMRES(tol=1e-12), condition="fixed-point"),
            cls(BiCGSTAB(tol=1e-12), condition="fixed-point"),
            cls(NormalCG(tol=1e-12), condition="fixed-point"),
        ]


# (points, form, sign, symmetric). The points satisfy form(points, λ) = 0 if the sign is 1, and form(points, λ) = points
# if it is −1. `symmetric` says whether the derivative of form in the points is symmetric.
System = tuple[list[Tensor], list[Tensor], float, bool]


def _stationary(process: Process, state: State) -> System:
    """F = ∇_w L(w, λ), a weight decay of the dynamics included, with the Hessian as its derivative."""
    points, spec = trees.flatten(state[0])
    points = [point.detach().requires_grad_() for point in points]
    with torch.enable_grad():
        loss = objective_at_rest(process.bound, max(process.times.stop - 1, 1))
        form = trees.leaves(gradient(loss, spec.unflatten(points)))
    with torch.no_grad():
        refuse_impure(form, gradient(loss, trees.detach(state[0])), "∇L at w_T was different")
    if not any(part.requires_grad for part in form):
        raise BilevelError(
            "The gradient of the inner objective does not depend on w or λ (a linear objective?), so it has no "
            "minimiser to differentiate. Use Reverse()."
        )
    return points, form, 1.0, True


def _slope_at(process: Process, state: State) -> Callable[[Tensor], Tensor]:
    """∇_w L as a function of w, both as vectors."""
    leaves, spec = trees.flatten(state[0])
    loss = objective_at_rest(process.bound, max(process.times.stop - 1, 1))
    return lambda w: trees.to_vector(trees.leaves(gradient(loss, spec.unflatten(trees.from_vector(w, leaves)))))


def _fixed_point(process: Process, state: State) -> System:
    """F = Φ(s, λ) − s. Only Φ is recorded; the operator adds the identity."""
    t = max(process.times.stop - 1, 1)
    points, live = live_copy(state)
    step = process.bound.dynamics.stationary_step
    with torch.enable_grad():
        stationary = step(process.bound.loss(t), live[0], t)
        if stationary is not None:
            points, form = trees.leaves(live[0]), trees.leaves(stationary)
        else:
            form = trees.leaves(process.bound.step(live, t))
    with torch.no_grad():
        again = process.bound.step(state, t) if stationary is None else step(process.bound.loss(t), state[0], t)
    refuse_impure(form, again, f"Step {t} gave another result")
    if stationary is not None:
        warn_of_kinks(lambda w: step(process.bound.loss(t), w, t), state[0])
    pairs = [(p, f) for p, f in zip(points, form, strict=True) if trees.is_variable(p)]
    if not any(f.requires_grad for _, f in pairs):
        raise BilevelError(
            "The step does not depend on w or λ, so it has no fixed point to differentiate. Use Reverse()."
        )
    return [p for p, _ in pairs], [f for _, f in pairs], -1.0, False


def _adjoint_operator(form: list[Tensor], points: list[Tensor], sign: float, symmetric: bool) -> Operator:
    """v ↦ (∂F)ᵀ v for a Hessian; v ↦ v − (∂Φ)ᵀ v for a fixed point."""

    def product(vector: Tensor, batched: bool) -> Tensor:
        pieces = trees.from_vector(vector, points)
        outputs, cotangents = zip(*((f, v) for f, v in zip(form, pieces, strict=True) if f.requires_grad), strict=True)
        if batched:
            parts = batched_grad(outputs, points, cotangents, retain_graph=True)
        else:
            parts = torch.autograd.grad(outputs, points, cotangents, retain_graph=True, allow_unused=True)
        batch = vector.shape[:-1]
        filled = [p.new_zeros(batch + p.shape) if g is None else g for p, g in zip(points, parts, strict=True)]
        image = torch.cat([part.reshape(*batch, -1) for part in filled], dim=-1)
        return image if sign > 0 else vector - image

    def transposed(vector: Tensor) -> Tensor:
        """∂F v, without the transpose: v − ∂Φ v for a fixed point."""
        rows = [piece.unsqueeze(0) for piece in trees.from_vector(vector, points)]
        parts = jacobian_vector_products(form, points, rows)
        filled = [torch.zeros_like(p) if g is None else g[0] for p, g in zip(points, parts, strict=True)]
        return trees.to_vector(filled) if sign > 0 else vector - trees.to_vector(filled)

    return Operator(
        matvec=lambda v: product(v, False),
        matmat=lambda rows: product(rows, True),
        symmetric=True if symmetric else None,
        step=None if symmetric else 1.0,
        transposed=None if symmetric else transposed,
    )
