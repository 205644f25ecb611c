"""Bounds on the distance of w_T and f_T from their limits, from computed quantities (Theorem 3.2, Remark 3.3)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bilevel import trees
from bilevel.dynamics import DynamicsLike
from bilevel.engine.calls import continued, one_each
from bilevel.engine.checks import check_arguments, check_process
from bilevel.engine.curvature import contraction_rate, hessian
from bilevel.engine.diagnosis import explain_divergence
from bilevel.engine.limits import objective_at_rest
from bilevel.engine.memory import memory_of
from bilevel.engine.method import Method
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, BilevelWarning, Outcome
from bilevel.hypergradients import Evaluator, Start, hypergradient
from bilevel.linear_solvers.lanczos import lanczos
from bilevel.methods.implicit import Implicit
from bilevel.methods.implicit.error_bound import error_bound
from bilevel.methods.implicit.near_minimiser import NearMinimiser, near_minimiser
from bilevel.methods.unrolled import Unrolled
from bilevel.problem import Problem, Task
from bilevel.trees import Tree

# The distance of u from w_λ, as a share of ‖w‖, up to which derivatives at u are those at w_λ.
SAME_POINT = 1e-6


@dataclass(frozen=True)
class Certificate:
    """How far w_T and f_T(λ) can be from their limits w_λ and f(λ).

    Attributes:
        steps: T.
        value: f_T(λ).
        gradient_norm: ‖∇L(w_T)‖, or ‖w_T − Φ(w_T)‖/lr for proximal dynamics.
        mu: the smallest curvature of L, found at w_T by Lanczos or given by the user.
        nu: the largest curvature of L.
        rate: factor by which the distance to w_λ shrinks per step of this dynamics; None where no theory gives it.
        best_rate: (ν − μ)/(ν + μ), that of gradient descent with the best constant step (Remark 3.3).
        step_size: the step size in use; None if unknown.
        step_limit: the largest step size that converges at this ν (2/ν for gradient descent); None if unknown.
        inner_distance: a bound on ‖w_T − w_λ‖; infinite where none applies.
        value_gap: a bound on |f_T(λ) − f(λ)|; infinite where none applies.
        hypergradient_error: an estimate of ‖g − ∇f(λ)‖ for the g of the `method` that was passed.
        hypergradient_relative: that estimate divided by ‖∇f(λ)‖.
        hypergradient_bound: a bound on ‖g − ∇f(λ)‖, as `error_bound` derives it from μ, the residual of the linear
            system, and norms of second derivatives at u. μ, unless it was given, and these norms are estimates by
            Lanczos' method. Infinite if L has no third derivative, None for proximal dynamics. Estimate and bound are
            infinite if ∇L is not almost zero at u, as at a kink of L.
        residual: relative residual of that method's linear system, if it solves one.
        outcome: a sentence that says what the bounds rest on, or why there are none.
    """

    steps: int
    value: float
    gradient_norm: float
    mu: float
    nu: float
    rate: float | None
    best_rate: float
    step_size: float | None
    step_limit: float | None
    inner_distance: float
    value_gap: float
    outcome: Outcome
    hypergradient_error: float | None = None
    hypergradient_relative: float | None = None
    hypergradient_bound: float | None = None
    residual: float | None = None
    search: Callable[[float, int], int] | None = field(default=None, repr=False, compare=False)

    @property
    def applies(self) -> bool:
        """Whether the bounds are finite, which needs μ > 0."""
        return math.isfinite(self.inner_distance)

    @property
    def step_ok(self) -> bool | None:
        """Whether the step size lies below its limit; None where the limit is unknown."""
        return None if self.step_size is None or self.step_limit is None else self.step_size < self.step_limit

    def smallest_steps(self, gap: float, limit: int = 100_000) -> int:
        """The smallest T for which |f_T(λ) − f(λ)| ≤ gap is certified.

        The dynamics is run for at most `limit` steps, until the bound on the distance to w_λ is small enough.
        """
        if not gap > 0:
            raise BilevelError(f"smallest_steps(gap={gap}) cannot be reached by a finite T; pass gap > 0.")
        if self.search is None or not self.applies:
            raise BilevelError(f"No number of steps can be certified: {self.outcome}")
        return self.search(gap, limit)

    def __str__(self) -> str:
        lines = [
            f"Certificate for T = {self.steps}: f_T(λ) = {self.value:.6g}",
            f"  ‖∇L(w_T)‖ = {self.gradient_norm:.3g}, curvature of L in [μ, ν] = [{self.mu:.3g}, {self.nu:.3g}]",
        ]
        if self.step_size is not None and self.step_limit is not None:
            lines.append(
                f"  step size {self.step_size:.3g} {'<' if self.step_ok else '≥'} its limit {self.step_limit:.3g}"
            )
        if self.rate is not None:
            lines.append(
                f"  contraction {self.rate:.6f} per step (the best constant step would give {self.best_rate:.6f})"
            )
        lines += [f"  ‖w_T − w_λ‖ ≤ {self.inner_distance:.3g}", f"  |f_T(λ) − f(λ)| ≤ {self.value_gap:.3g}"]
        if self.residual is not None:
            lines.append(f"  linear system solved to a relative residual of {self.residual:.2g}")
        if self.hypergradient_error is not None:
            lines.append(
                f"  hypergradient within {self.hypergradient_error:.3g} of ∇f(λ) (relative "
                f"{self.hypergradient_relative:.3g})"
                + ("" if self.hypergradient_bound is None else f", at most {self.hypergradient_bound:.3g}")
            )
        return "\n".join([*lines, f"  {self.outcome}"])


def certify(
    problem: Problem,
    lam: Tree,
    task: Task | Sequence[Task],
    *,
    dynamics: DynamicsLike,
    steps: int,
    method: Method | None = None,
    mu: float | None = None,
    nu: float | None = None,
    products: int = 200,
    start: Start = None,
) -> Certificate:
    """Bound ‖w_T − w_λ‖ and |f_T(λ) − f(λ)| a posteriori.

    For a μ-strongly convex L every point u satisfies ‖u − w_λ‖ ≤ ‖∇L(u)‖/μ. The inequality is applied at the point u
    that Newton's method reaches from w_T, where ∇L is almost zero, so that ‖w_T − w_λ‖ ≤ ‖w_T − u‖ + ‖∇L(u)‖/μ is
    nearly the distance itself. The bound on f follows from |E(w_T) − E(u)| and the slope and curvature of E at u.
    A weight decay that a `torch.optim` class adds to the gradient is added to L, as in `Implicit`.

    Args:
        problem, lam, task, dynamics, steps, start: as for `hypergradient`; for a list of tasks the worst case is
            reported.
        method: also estimate the distance of this method's hypergradient from ∇f(λ).
        mu: a known modulus of strong convexity, for example the strength of an L2 term. Without it μ is the smallest
            curvature at w_T, which is exact for a quadratic and an assumption otherwise.
        nu: a known upper bound on the curvature of L, in the place of the largest curvature at w_T.
        products: how many Hessian products may be used to find μ and ν.

    Warns:
        BilevelWarning: if the step size lies above its limit.
    """
    tasks = check_arguments(problem, lam, task, steps)
    evaluator = Evaluator(problem, dynamics, steps, allow_unused=True, memory=memory_of(problem))
    certificates = [
        _certify(evaluator.process(lam, one, begin), method, mu, nu, products)
        for one, begin in zip(tasks, one_each(start, tasks, task, "start"), strict=True)
    ]
    result = certificates[0] if not isinstance(task, (list, tuple)) else _worst(certificates)
    if result.step_ok is False:
        warnings.warn(
            f"The step size {result.step_size:.4g} lies above {result.step_limit:.4g}, the largest that converges when "
            f"the curvature reaches ν = {result.nu:.4g}; the iterates will not converge. Use a smaller step.",
            BilevelWarning,
            stacklevel=2,
        )
    return result


def _certify(process: Process, method: Method | None, mu: float | None, nu: float | None, products: int) -> Certificate:
    bound = process.bound
    if callable(bound.task.train):
        raise BilevelError(
            "A certificate is about one inner objective, but task.train is a function of t. Certify on the whole "
            "training set: Task(train=all_of_it, val=…)."
        )
    check_process(process, Unrolled() if bound.dynamics.differentiable else Implicit())
    bound = process.bound  # the checks may have made another one
    with continued(process):
        state = process.run()
    if not trees.all_finite(state):
        explain_divergence(process)
    w, t = state[0], max(process.times.stop - 1, 1)
    loss = objective_at_rest(bound, t)
    slope, operator = hessian(loss, w)
    spectrum = None if mu is not None and nu is not None else lanczos(operator, slope, products)
    if spectrum is not None:
        nu, smallest = spectrum.largest if nu is None else nu, spectrum.smallest if mu is None else mu
    else:
        assert nu is not None and mu is not None
        smallest = mu
    limit = bound.dynamics.largest_step(nu, t) if nu > 0 else None
    with torch.no_grad():
        value = float(bound.outer(state))
    certificate: dict[str, Any] = {
        "steps": process.steps,
        "value": value,
        "gradient_norm": float(slope.norm()),
        "mu": smallest,
        "nu": nu,
        "rate": contraction_rate(bound.dynamics, smallest, nu, t),
        "best_rate": (nu - smallest) / (nu + smallest) if nu + smallest > 0 else 1.0,
        "step_size": None if limit is None else limit[0],
        "step_limit": None if limit is None else limit[1],
    }
    unbounded: dict[str, Any] = {"inner_distance": math.inf, "value_gap": math.inf}
    # Below this value rounding error dominates μ.
    if not smallest > 1e2 * torch.finfo(slope.dtype).eps * max(nu, 0.0):
        sentence = (
            f"No bound: the smallest curvature of the inner objective is μ = {smallest:.3g}, not positive, so it is "
            "not strongly convex at w_T and Theorem 3.2 does not apply. Add an L2 term to the inner objective, or pass "
            "mu=… if it is known."
        )
        return Certificate(**certificate, **unbounded, outcome=Outcome("failed", sentence))

    limits = near_minimiser(process, w, t, smallest, nu)
    certificate["gradient_norm"] = limits.gradient_norm
    reached = _reached(limits, w, smallest, nu)
    errors = _hypergradient_error(process, method, limits, smallest, reached) if math.isfinite(limits.radius) else {}
    mu_source = (
        "given"
        if mu is not None or spectrum is None
        else f"found by Lanczos in {spectrum.products} products" + ("" if spectrum.complete else ", not all directions")
    )
    if math.isinf(limits.radius):
        sentence = (
            f"No bound: the proximal step does not contract, because its size {certificate['step_size']:.3g} is not "
            f"below 2/ν = {2 / nu:.3g}. Use a smaller step."
        )
        return Certificate(**certificate, **unbounded, outcome=Outcome("failed", sentence))
    sentence = (
        f"The bounds hold if the curvature of L stays above μ = {smallest:.3g} ({mu_source}) between w_T and w_λ; on a "
        "quadratic it does."
    )
    if errors and not reached:
        sentence += (
            f" There is no bound on the hypergradient, because w_λ is known only to ±{limits.radius:.3g}, as happens "
            "at a kink of L. Use a proximal dynamics for a kink, such as ISTA, or take more steps."
        )
    return Certificate(
        **certificate,
        inner_distance=limits.distance(w),
        value_gap=limits.value_gap(w, value),
        outcome=Outcome("finished", sentence),
        search=limits.smallest_steps if process.previous is None else _refuse_to_count,
        **errors,
    )


def _refuse_to_count(gap: float, limit: int) -> int:
    raise BilevelError(
        "smallest_steps counts the steps of a run that begins at a w, and this certificate is about a run that "
        "continues an earlier result. Pass start=result.inner, or leave start out."
    )


def _reached(limits: NearMinimiser, w: Tree, mu: float, nu: float) -> bool:
    """Whether u is the minimiser up to a millionth of ‖w‖, or up to rounding."""
    rounding = 100 * torch.finfo(trees.leaves(w)[0].dtype).eps * max(nu / mu, 1.0)
    size = max(float(trees.norm(w)), float(trees.norm(limits.u)))
    return limits.radius <= max(SAME_POINT, rounding) * size or limits.radius * mu <= 1e-13 * limits.gradient_norm


def _hypergradient_error(
    process: Process, method: Method | None, limits: NearMinimiser, mu: float, reached: bool
) -> dict[str, Any]:
    """The distance of the method's hypergradient from the implicit one at u, which is ∇f(λ) up to ‖u − w_λ‖."""
    if method is None:
        return {}
    if not reached:
        # The method may refuse this point: `Implicit` does at a kink.
        return dict.fromkeys(("hypergradient_error", "hypergradient_relative", "hypergradient_bound"), math.inf)
    found = hypergradient(
        process.problem,
        process.lam,
        process.task,
        dynamics=process.source,
        steps=process.steps,
        method=method,
        start=process.start if process.previous is None else process.previous,
        allow_unused=True,
    )
    at_limit = Process(
        process.problem,
        process.lam,
        process.task,
        process.source,
        0,
        start=limits.u,
        allow_unused=True,
        memory=process.memory,
    )
    exact = Implicit()(at_limit)
    error = float(trees.norm(trees.subtract(found.grad, exact.grad)))
    scale = float(trees.norm(exact.grad))
    bound = None
    with torch.no_grad():
        proximal = at_limit.bound.dynamics.stationary_step(at_limit.bound.loss(1), limits.u, 1) is not None
    if not proximal and exact.adjoint is not None:
        bound = error_bound(process, limits.u, limits.radius, mu, found.grad, -exact.adjoint)
    return {
        "hypergradient_error": error,
        "hypergradient_relative": error / scale if scale > 0 else math.inf,
        "hypergradient_bound": bound,
        "residual": found.stats.residual,
    }


def _worst(certificates: list[Certificate]) -> Certificate:
    """One certificate for the mean over tasks: means of values and gaps, the worst of everything else."""
    failed = [c for c in certificates if not c.applies]
    first = (failed or certificates)[0]
    count = len(certificates)

    def search(gap: float, limit: int) -> int:
        return max(c.smallest_steps(gap, limit) for c in certificates)

    def largest(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return max(known) if known else None

    limits = [c.step_limit for c in certificates if c.step_limit is not None]
    return Certificate(
        steps=first.steps,
        value=sum(c.value for c in certificates) / count,
        gradient_norm=max(c.gradient_norm for c in certificates),
        mu=min(c.mu for c in certificates),
        nu=max(c.nu for c in certificates),
        rate=largest([c.rate for c in certificates]),
        best_rate=max(c.best_rate for c in certificates),
        step_size=largest([c.step_size for c in certificates]),
        step_limit=min(limits) if limits else None,
        inner_distance=max(c.inner_distance for c in certificates),
        value_gap=sum(c.value_gap for c in certificates) / count,
        outcome=first.outcome,
        hypergradient_error=largest([c.hypergradient_error for c in certificates]),
        hypergradient_relative=largest([c.hypergradient_relative for c in certificates]),
        hypergradient_bound=largest([c.hypergradient_bound for c in certificates]),
        residual=largest([c.residual for c in certificates]),
        search=search,
    )
