"""jaxopt: its gradient descent solver, unrolled and compiled as a whole."""

from collections.abc import Sequence

import jax
import jaxopt

from harness.contract import Case, Run
from problems.in_jax import in_jax

LABEL = "jaxopt"
GROUP = "jax"
ENVIRONMENT = "jaxopt"
REQUIREMENTS = ("jax", "jaxlib", "jaxopt==0.8.5", "numpy")


def prepare(case: Case) -> Run:
    p = in_jax(case)
    # tol=0 makes it take exactly T steps, like all other contestants.
    solver = jaxopt.GradientDescent(
        p.inner, stepsize=p.lr, maxiter=p.steps, tol=0.0, acceleration=False, implicit_diff=False, unroll=True, jit=True
    )

    def value(lam: list[jax.Array]) -> jax.Array:
        return p.outer(solver.run(p.start, lam, p.train).params, lam, p.val)

    compiled = jax.jit(jax.grad(value))

    def run() -> Sequence[jax.Array]:
        return jax.block_until_ready(compiled(p.lam))

    return run
