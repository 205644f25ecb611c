"""L-BFGS-B: a quasi-Newton method with bounds, by scipy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import extras, trees
from bilevel.algorithms.base import Algorithm, OuterProblem, check_settings
from bilevel.constraints.base import Constraint
from bilevel.constraints.box import Box
from bilevel.constraints.non_negative import NonNegative
from bilevel.constraints.per_leaf import PerLeaf
from bilevel.errors import BilevelError, Outcome
from bilevel.trees import Tree

# Bounds the scale of f_T from above where its first value is almost zero.
SMALLEST = 1e-10


@dataclass(frozen=True)
class LBFGSB(Algorithm):
    """Minimise f_T by L-BFGS-B (Byrd, Lu, Nocedal and Zhu, 1995), on λ as one vector of float64 numbers.

    Every evaluation of f_T with its hypergradient is a hyperiteration, those of line searches too: `iterations` of
    `solve` is the most evaluations, and the history has an entry for each. The best λ is returned.

    Args:
        max_iter: iterations of L-BFGS-B, each of one or more evaluations.
        tol: stop when an iteration improves f_T by less than this, relative to f_T (or to its first value, once f_T is
            far below that). `tol` of `solve` is another condition, on the norm of the gradient.
        first_step: about how far each entry of λ moves in the first step, as a root mean square. L-BFGS-B learns later
            step sizes by itself.
        memory: how many pairs of steps and gradient differences approximate the Hessian.

    The constraint may be None, a `Box`, `NonNegative`, or a dict of these. scipy must be installed.

    >>> import bilevel as bl
    >>> problem = bl.Problem(
    ...     inner=lambda w, lam, x: ((w - lam) ** 2).sum(),
    ...     outer=lambda w, lam, x: ((w - torch.tensor([1.0, 5.0])) ** 2).sum(),
    ...     init=lambda lam: torch.zeros(2),
    ... )
    >>> sol = bl.solve(
    ...     problem, torch.zeros(2), bl.Task(None, None), dynamics=bl.GradientDescent(0.5), steps=1,
    ...     algorithm=bl.LBFGSB(), constraint=bl.Box(-3, 3),
    ... )
    >>> [round(x, 4) for x in sol.outer.tolist()], sol.outcome.kind
    ([1.0, 3.0], 'converged')
    """

    compares_values: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    max_iter: int = 100
    tol: float = 1e-9
    first_step: float = 1.0
    memory: int = 10

    def __post_init__(self) -> None:
        check_settings(self.tol, self.first_step, max_iter=self.max_iter, memory=self.memory)

    def minimise(self, outer: OuterProblem) -> Outcome:
        scipy_optimize = extras.load("scipy.optimize", extra="table", purpose="LBFGSB")
        leaves, spec = trees.flatten(outer.lam)
        plain = outer.lam is leaves[0] and _is_vector(leaves[0])
        scale, calls = 0.0, 0
        # scipy's state cannot be saved. A resumed run replays the saved values, for which scipy visits the same points.
        values, grads = ([], []) if outer.saved is None else (list(outer.saved["values"]), list(outer.saved["grads"]))
        outer.keep(lambda: {"values": values, "grads": grads})

        def objective(x: Any) -> tuple[float, Any]:
            nonlocal scale, calls
            if calls == len(values):
                vector = torch.from_numpy(x.copy())
                result = outer.hyperiteration(vector if plain else _tree(vector, leaves, spec))
                values.append(float(result.value))
                grads.append(torch.from_numpy(_vector(result.grad)))
            value, grad = values[calls], grads[calls].numpy()
            calls += 1
            scale = scale or self._scale(value, grad)
            return scale * value, scale * grad

        found = scipy_optimize.minimize(
            objective,
            _vector(outer.lam),
            jac=True,
            method="L-BFGS-B",
            bounds=_bounds(outer.constraint, outer.lam),
            # The loop of `solve` has its own tolerance for gradients and its own limit of evaluations.
            options={"maxiter": self.max_iter, "maxcor": self.memory, "ftol": self.tol, "gtol": 0.0, "maxfun": 10**9},
        )
        return self._outcome(found)

    def _scale(self, value: float, grad: Any) -> float:
        """The unit of f_T for scipy: its first step is −scale·∇f_T, and its `ftol` is relative to values above 1."""
        norm = float(np.linalg.norm(grad))
        scale = self.first_step * math.sqrt(len(grad)) / norm if norm > 0 else 1.0
        return max(scale, min(1 / abs(value), scale / SMALLEST)) if value else scale

    def _outcome(self, found: Any) -> Outcome:
        if found.nit >= self.max_iter:
            return Outcome("finished", f"Ran all {self.max_iter} iterations of L-BFGS-B; raise max_iter to go on.")
        count = f"{found.nit} iteration{'s' if found.nit != 1 else ''} of L-BFGS-B"
        if not found.success:
            return Outcome("finished", f"Stopped after {count}: no step along the hypergradient improves f_T.")
        return Outcome("converged", f"Converged after {count}: f_T improves by less than {self.tol:g}, relatively.")

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(), cls(first_step=0.01, memory=3)]


def _is_vector(tree: Tree) -> bool:
    """Whether λ is what scipy works on, one vector of float64 numbers on the CPU."""
    return isinstance(tree, Tensor) and tree.ndim == 1 and tree.dtype == torch.float64 and tree.device.type == "cpu"


def _tree(vector: Tensor, leaves: list[Tensor], spec: Any) -> Tree:
    """The inverse of `_vector`."""
    parts = trees.from_vector(vector, leaves)
    return spec.unflatten(part.to(leaf) for part, leaf in zip(parts, leaves, strict=True))


def _vector(tree: Tree) -> Any:
    """The leaves as one float64 array."""
    if _is_vector(tree):
        return tree.detach().numpy()
    return trees.to_vector([leaf.detach() for leaf in trees.leaves(tree)]).to("cpu", torch.float64).numpy()


def _bounds(constraint: Constraint | None, lam: Tree) -> Any:
    """The lower and upper bound of every entry of λ, or None where there are none."""
    if constraint is None:
        return None
    parts = trees.leaves(constraint.parts) if isinstance(constraint, PerLeaf) else [constraint]
    other = [part for part in parts if not isinstance(part, (Box, NonNegative))]
    if other:
        raise BilevelError(
            f"LBFGSB takes bounds on the entries of λ, but {other[0]!r} is another kind of constraint. Pass a Box, or "
            "leave algorithm= out: Descent projects onto any constraint."
        )
    # A box projects a point at infinity onto its bounds.
    low, high = (
        _vector(constraint.project(trees.map(lambda leaf, far=far: torch.full_like(leaf, far), lam)))
        for far in (-math.inf, math.inf)
    )
    return np.stack([low, high], axis=1)
