"""Base classes of the methods for linear models, which differentiate ∇L(w_λ, λ) = 0 at the minimiser w_λ itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from bilevel.engine.method import Hypergradient, Method, Part
from bilevel.engine.process import Gradients, Process, accumulate
from bilevel.errors import BilevelError
from bilevel.methods.linear_models._shared_work import Solver, fold_parts
from bilevel.structures.data_checks import computes_as
from bilevel.structures.least_squares import LeastSquares
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.outer_objectives import DeclaredOuter, HeldOut, LeaveOneOut, LeaveOneOutSlopes
from bilevel.structures.penalties import FunctionOfLam

NO_MINIMUM = (
    "The inner objective has no minimum: the matrix of its quadratic has a negative eigenvalue. Use penalties ≥ 0, and "
    "sums G over rows with weights ≥ 0."
)


@dataclass(frozen=True, eq=False)
class Minimum:
    """w_λ, and products with the inverse of the Hessian there.

    Attributes:
        w: the minimisers, folds × outputs × features.
        solve: H_k⁻¹ b_k for every fold (on the support of w_k, where there is an L1 penalty), for one b of the shape of
            w or for many: folds × right sides × outputs × features.
        block_diagonal: whether H_k is, with one block per output.
        others: pairs of a function of λ, other than the penalties, and the derivative of ∇L in its values.
        bytes: the memory that the Hessians or their factors take.
        in_weights: q ↦ ⟨q, ∂∇L/∂ω⟩ for the weights ω of the rows; None if they do not depend on λ.
    """

    w: Tensor
    solve: Callable[[Tensor], Tensor]
    block_diagonal: bool = True
    others: tuple[tuple[FunctionOfLam, Tensor], ...] = ()
    bytes: int = 0
    in_weights: Callable[[Tensor], Tensor] | None = None

    def solved_rows(self, rows: Tensor) -> Tensor:
        """x_i H_k⁻¹ for the rows x_i of every fold, folds × rows × features.

        The result has the shape folds × rows × outputs × outputs × features: how the score of one output depends on
        the slope in the coefficients of another. If the Hessian is block-diagonal, the second output axis has size 1.
        """
        folds, outputs, size = self.w.shape
        if self.block_diagonal:
            return self.solve(rows[:, :, None].expand(-1, -1, outputs, -1))[:, :, :, None]
        units = torch.eye(outputs, dtype=rows.dtype, device=rows.device)[:, :, None]
        found = self.solve((rows[:, :, None, None] * units).reshape(folds, -1, outputs, size))
        return found.reshape(folds, -1, outputs, outputs, size)


@dataclass(frozen=True)
class MinimiserMethod(Method):
    """∇f = ∇_λ E − ⟨q, ∂_λ ∇L⟩ with ∇²L q = ∇_w E at w_λ, for an inner objective whose structure is known.

    The minimiser is computed from the data. The T steps are not run, so value and gradient are those of the limit f, as
    with `Implicit(newton=…)`. Iterative methods start from the w_0 of the run.
    """

    exact: ClassVar[bool] = False
    sees_dynamics: ClassVar[bool] = False
    # Whether the weights of rows may depend on λ.
    weighs_rows: ClassVar[bool] = False

    def __call__(self, process: Process) -> Hypergradient:
        problem, task = process.problem, process.bound.task
        if isinstance(problem.inner, (LeastSquares, LinearModels)):
            problem.inner.check(task.train)
        if isinstance(problem.outer, DeclaredOuter):
            problem.outer.check(task.val)
        with torch.no_grad():
            return self.at_minimiser(process)

    @abstractmethod
    def at_minimiser(self, process: Process) -> Hypergradient:
        """The hypergradient of a process that has passed the checks; called under `torch.no_grad`."""

    def sees(self, process: Process) -> frozenset[Part]:
        return frozenset({"the inner objective", "the outer objective"})

    def check(self, process: Process) -> None:
        name, wanted, bound = type(self).__name__, self.structure, process.bound
        assert wanted is not None
        if not computes_as(process.problem.inner, wanted):
            raise BilevelError(
                f"{name} is for problems whose `inner` is a bilevel.structures.{wanted.__name__}; this one is another "
                f"function. Use Implicit(), or write inner={wanted.__name__}(…)."
            )
        if callable(bound.task.train):
            raise BilevelError(f"{name} needs one batch for all steps; task.train is a function. Use Reverse().")
        if getattr(process.problem.inner, "weight", None) is not None and not self.weighs_rows:
            raise BilevelError(
                f"{name} takes the weights of rows from the data, but {wanted.__name__}(weight=…) computes them from "
                "λ. Use NewtonLinear()."
            )
        self.check_dynamics(process)

    def check_key(self) -> Hashable:
        # The checks do not depend on the tolerance, which changes during a search.
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.name != "tol")

    def kind_of_data(self, process: Process) -> Hashable:
        """Functions that this package differentiates by hand are the same for all sizes of the data."""
        inner: Any = process.problem.inner
        outer = process.problem.outer
        by_hand = isinstance(outer, DeclaredOuter) and isinstance(outer.extra, FunctionOfLam)
        functions = [getattr(inner, "penalty", None)]
        if getattr(inner, "weight", None) is not None:
            functions.append(inner.weight)
        if process.encoded or not by_hand or not all(isinstance(f, FunctionOfLam) for f in functions):
            return super().kind_of_data(process)
        task = process.bound.task
        data = (process.start, *process.variables, *task.train, *task.val)
        return tuple((type(x), getattr(x, "ndim", None), getattr(x, "dtype", None)) for x in data)

    def check_dynamics(self, process: Process) -> None:
        """Refuse a dynamics whose limit is not known to be the minimiser of the inner objective."""
        t = max(process.times.stop - 1, 1)
        if process.bound.dynamics.heavy_ball_form(t) is None:
            raise BilevelError(
                f"{type(self).__name__} differentiates at the minimiser of the inner objective, which is the limit of "
                f"gradient descent and of heavy ball, but perhaps not of {process.bound.dynamics}. Use Implicit(), or "
                "pass dynamics=GradientDescent(lr)."
            )

    def outer_slope(self, process: Process, w: Tensor) -> tuple[Tensor, Tensor, Gradients | None]:
        """E, ∇_w E and ∇_λ E at w. ∇_λ E is None for a declared outer objective; `from_adjoint` then adds it."""
        outer = process.problem.outer
        if isinstance(outer, HeldOut) and type(outer).__call__ is HeldOut.__call__ and not process.encoded:
            return *outer.loss_and_slope(w, process.bound.task.val), None
        value, (slope,), direct, _ = process.outer_gradients((w, ()))
        return value, torch.zeros_like(w) if slope is None else slope, direct

    def from_adjoint(
        self,
        process: Process,
        w: Tensor,
        q: Tensor,
        value: Tensor,
        direct: Gradients | None,
        extra_slope: Tensor | None = None,
        kept: Any = None,
        penalty_slope: Tensor | None = None,
        others: Sequence[tuple[Callable[..., Tensor], Tensor]] = (),
        **stats: Any,
    ) -> Hypergradient:
        """The hypergradient from the adjoint q.

        Args:
            value: E, from `outer_slope`.
            direct: ∇_λ E, from `outer_slope`.
            extra_slope: what is added to ∇L in the condition at w_λ, such as the subgradient of an L1 penalty.
            kept: the `adjoint` of the result, with which the next hypergradient may start; q by default.
            penalty_slope: the derivative of f in the penalties α through w; −⟨q, ∂α w⟩ by default.
            others: pairs of a function of λ, other than the penalties, and the derivative of f in its values.
        """
        inner: Any = process.problem.inner
        outer, bound = process.problem.outer, process.bound
        gradients: Gradients = [None] * len(process.variables) if direct is None else list(direct)
        # Functions of λ, the cotangents of their values, and their data.
        parts: list[tuple[Any, Any, tuple[Any, ...]]] = [(function, v, ()) for function, v in others]
        terms: list[Tensor] = []
        if direct is None:
            assert isinstance(outer, DeclaredOuter)
            parts.append((outer.extra, 1.0, (bound.task.val[-1],)))
        if not process.encoded and hasattr(inner, "penalty"):
            # Only the penalties depend on λ, unless `encode` computes the data from it. Intercepts are not penalised.
            if penalty_slope is None:
                product = (q * w).sum((0, 1)).neg_()
                penalty_slope = product[:-1] if inner.intercept else product
            parts.append((inner.penalty, penalty_slope, ()))
        for function, v, data in parts:
            if isinstance(function, FunctionOfLam):
                found, pullback = function.linearised(bound.lam, *data)
                gradients[0] = accumulate(gradients[0], pullback(v))
            else:
                with torch.enable_grad():
                    found = function(bound.lam, *data)
                    terms.append((v * found).sum())
            if data:
                value = value + found.detach()
        with torch.enable_grad():
            if process.encoded:
                terms.append(-(q * inner.slope(w, bound.lam, bound.task.train)).sum())
            if extra_slope is not None:
                terms.append(-(q * extra_slope).sum())
            total = sum(terms) if terms else None
        if isinstance(total, Tensor) and total.requires_grad:
            through = torch.autograd.grad(total, process.variables, allow_unused=True, retain_graph=True)
            gradients = [accumulate(one, two) for one, two in zip(gradients, through, strict=True)]
        known = {"adjoint": q if kept is None else kept}
        return self.result(process, value, (w, ()), gradients, continues=False, extra=known, **stats)

    def left_out(self, process: Process, found: LeaveOneOutSlopes, alpha: Tensor, **stats: Any) -> Hypergradient:
        """The hypergradient of an outer objective that is a `LeaveOneOut`."""
        w, q = found.w[None], found.adjoint[None]
        return self.from_adjoint(process, w, q, found.value, None, penalty_slope=found.in_penalty(alpha), **stats)


class LinearModelMethod(MinimiserMethod):
    """A method that finds w_λ together with products with the inverse of the Hessian there."""

    @abstractmethod
    def minimum(self, process: Process) -> Minimum:
        """w_λ of a process that has passed the checks; called under `torch.no_grad`."""

    def at_minimiser(self, process: Process) -> Hypergradient:
        found = self.minimum(process)
        value, slope, direct = self.outer_slope(process, found.w)
        q = found.solve(slope)
        others: list[Any] = [(function, -(q * bend).sum((0, 1))) for function, bend in found.others]
        if found.in_weights is not None and not process.encoded:
            inner: Any = process.problem.inner
            others.append((inner.weight, -found.in_weights(q)))
        memory = found.bytes + 4 * found.w.nbytes
        return self.from_adjoint(process, found.w, q, value, direct, others=others, peak_memory=memory)

    def positive_penalties(self, process: Process) -> Tensor:
        """α for every feature of a `LinearModels`, for a method that divides by it."""
        inner: Any = process.problem.inner
        alpha: Tensor = inner.feature_penalties(process.bound.lam, process.bound.task.train[0].shape[1])
        if not bool((alpha > 0).all()):
            raise BilevelError(
                f"{type(self).__name__} divides by the penalties, and some are not positive. Use NewtonLinear()."
            )
        return alpha


def declared_leave_one_out(process: Process) -> LeaveOneOut | None:
    """The outer objective if it is a `LeaveOneOut` with the penalties of the inner objective; otherwise None."""
    inner, outer = process.problem.inner, process.problem.outer
    if not computes_as(outer, LeaveOneOut) or outer.penalty is not getattr(inner, "penalty", None) or process.encoded:
        return None
    return outer


def start_of(process: Process) -> Tensor:
    """The w_0 of the run, from which an iterative method starts."""
    return process.bound.start()[0].detach()


def storage_key(tensor: Any) -> tuple[Any, ...]:
    """A key that changes if a tensor is replaced or changed in place."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()


def same_storage(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    """Whether two tuples hold the same tensors, which have not changed in between."""
    return len(one) == len(other) and all(storage_key(a) == storage_key(b) for a, b in zip(one, other, strict=True))


def flattened(solve: Solver) -> Solver:
    """`solve` for right sides of any shape folds × … × size."""
    return lambda right: solve(right.reshape(len(right), -1, right.shape[-1])).reshape(right.shape)


def cholesky_solver(matrices: Tensor) -> Solver:
    """A function that solves A_k x_k = b_k for every k, with b and x of the shape folds × right sides × size.

    If a matrix is numerically singular, because its penalties are tiny, the least-norm solution is returned.
    """
    return regular_solver(matrices) or least_norm_solver(matrices)


def regular_solver(matrices: Tensor, least: float = 0.0) -> Solver | None:
    """The function of `cholesky_solver` if all matrices are positive definite, otherwise None.

    Args:
        least: a matrix is singular also if the square of a pivot is at most this fraction of its diagonal entry.
    """
    factors, failed = torch.linalg.cholesky_ex(matrices)
    if bool(failed.any()):
        return None
    if least and bool((_diagonal(factors).square() <= least * _diagonal(matrices)).any()):
        return None
    return lambda right: torch.cholesky_solve(right.mT, factors).mT


def least_norm_solver(matrices: Tensor) -> Solver:
    """The function of `cholesky_solver` for matrices that may be singular. Indefinite ones are refused."""
    if not bool(torch.isfinite(matrices).all()):
        raise BilevelError(
            "The equations of the minimiser hold NaN or Inf. Use smaller penalties, or scale the features."
        )
    if not semidefinite(matrices):
        raise BilevelError(NO_MINIMUM)
    inverses = torch.linalg.pinv(matrices, hermitian=True)
    return lambda right: right @ inverses


def semidefinite(matrices: Tensor) -> bool:
    """Whether no eigenvalue is negative by more than rounding: √ε times the largest one of its matrix."""
    allowed = torch.finfo(matrices.dtype).eps ** 0.5
    shifted = matrices.clone()
    # The largest eigenvalue is at least the largest diagonal entry, so success is a proof, and it is fast.
    _diagonal(shifted).add_(allowed * _diagonal(matrices).amax(-1, keepdim=True).clamp(min=0))
    if not bool(torch.linalg.cholesky_ex(shifted)[1].any()):
        return True
    values = torch.linalg.eigvalsh(matrices)
    return bool((values[..., 0] >= -allowed * values[..., -1].clamp(min=0)).all())


def _diagonal(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1)


def solver_by_fold(folds: int, size: int, matrices: Callable[[slice], Tensor]) -> Solver:
    """The function of `cholesky_solver`, for matrices that are computed and factorised when they are first needed.

    Large systems are divided among the processes that share the work, fold by fold.

    Args:
        matrices: the matrices of some folds, of shape folds × size × size.
    """
    return fold_parts(folds, folds * size**3 / 3).solver(lambda here: cholesky_solver(matrices(here)))
