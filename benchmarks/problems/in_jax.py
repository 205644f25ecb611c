"""The objectives in jax, as pure functions of (w, λ, batch). They return the same numbers as those of `in_torch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from harness.contract import Case

Arrays = Sequence[Array]
Objective = Callable[[Arrays, Arrays, Arrays], Array]


def ridge_inner(w: Arrays, lam: Arrays, batch: Arrays) -> Array:
    return ((batch[0] @ w[0] - batch[1]) ** 2).sum() + (jnp.exp(lam[0]) * w[0] ** 2).sum()


def ridge_outer(w: Arrays, lam: Arrays, batch: Arrays) -> Array:
    return ((batch[0] @ w[0] - batch[1]) ** 2).mean()


def network_inner(w: Arrays, lam: Arrays, batch: Arrays) -> Array:
    penalty = (jnp.exp(lam[0]) * w[0] ** 2).sum() + (jnp.exp(lam[1]) * w[2] ** 2).sum()
    return network_outer(w, lam, batch) + penalty


def network_outer(w: Arrays, lam: Arrays, batch: Arrays) -> Array:
    hidden = jnp.tanh(batch[0] @ w[0].T + w[1])
    scores = jax.nn.log_softmax(hidden @ w[2].T + w[3])
    return -jnp.take_along_axis(scores, batch[1][:, None], axis=1).mean()


OBJECTIVES: dict[str, tuple[Objective, Objective]] = {
    "ridge": (ridge_inner, ridge_outer),
    "network": (network_inner, network_outer),
}


@dataclass(frozen=True)
class JaxCase:
    """A case as jax arrays."""

    inner: Objective
    outer: Objective
    lam: list[Array]
    start: list[Array]
    train: list[Array]
    val: list[Array]
    lr: float
    steps: int


def in_jax(case: Case) -> JaxCase:
    jax.config.update("jax_enable_x64", True)
    lam, start, train, val = (
        [jnp.asarray(array) for array in group] for group in (case.lam, case.start, case.train, case.val)
    )
    inner, outer = OBJECTIVES[case.kind]
    return JaxCase(inner, outer, lam, start, train, val, case.lr, case.steps)
