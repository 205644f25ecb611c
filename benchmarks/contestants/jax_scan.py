"""The unrolled loop, written by hand in jax as a compiled scan."""

from collections.abc import Sequence

import jax

from harness.contract import Case, Run
from problems.in_jax import in_jax

LABEL = "jax scan"
GROUP = "jax"
ENVIRONMENT = "jaxopt"
REQUIREMENTS = ("jax", "jaxlib", "jaxopt==0.8.5", "numpy")


def prepare(case: Case) -> Run:
    p = in_jax(case)

    def value(lam: list[jax.Array]) -> jax.Array:
        def step(w: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
            slope = jax.grad(p.inner)(w, lam, p.train)
            return [leaf - p.lr * g for leaf, g in zip(w, slope, strict=True)], None

        w, _ = jax.lax.scan(step, p.start, None, length=p.steps)
        return p.outer(w, lam, p.val)

    compiled = jax.jit(jax.grad(value))

    def run() -> Sequence[jax.Array]:
        return jax.block_until_ready(compiled(p.lam))

    return run
