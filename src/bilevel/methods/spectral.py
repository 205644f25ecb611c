"""Exact ∇f_T for a quadratic inner objective, at a cost that does not depend on T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import random_directions
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.kernels import Kernel, build_once, compile_function
from bilevel.methods.process import Bound, Gradients, Process, accumulate, outer_gradients
from bilevel.methods.spectral_functions import SpectralIterate, iterate
from bilevel.methods.spectral_krylov import KrylovIterate, iterate_all

# Up to this many iterates, columns counted one by one, it is cheaper to compute them all than to decompose A.
LONGEST = 512


@dataclass(frozen=True)
class Spectral(Method):
    """w_T = p_T(A) w_0 + q_T(A) b for a quadratic inner objective ½⟨w, A w⟩ − ⟨b, w⟩: the cost is independent of T.

    For gradient descent and heavy ball with constant settings. p_T and q_T are polynomials of the eigenvalues of A, for
    gradient descent p_T(s) = (1 − ηs)^T and q_T = (1 − p_T)/s. The derivative in A is Q (p[sᵢ, sⱼ] ∘ …) Qᵀ with divided
    differences p[sᵢ, sⱼ], which are computed without a quotient, so that repeated or clustered eigenvalues and singular
    A are harmless.

    The w of C independent columns that share one matrix A (multi-output ridge) are recognised, and cost one
    eigendecomposition of A.

    Args:
        largest: refuse a matrix A with more rows than this.
        compiled: compile the whole computation with `torch.compile`. The first call takes up to a minute, later ones a
            fraction of the eager time where w is small.
    """

    largest: int = 4096
    compiled: bool = False

    def check(self, process: Process) -> None:
        if process.previous is not None:
            raise BilevelError(
                "Spectral computes a run from its start and cannot continue an earlier one; use Reverse() or Forward() "
                "online."
            )
        if callable(process.bound.task.train):
            raise BilevelError(
                "Spectral needs one quadratic for all steps, but task.train is a function of t. Pass the whole "
                "training set as a batch, or use Reverse()."
            )
        if self.compiled and process.start is not None:
            raise BilevelError("Spectral(compiled=True) begins at init(λ); pass no start, or use Spectral().")
        _check_settings(process)

    def look(self, process: Process) -> None:
        if "spectral axis" not in process.findings:
            axis = _find_layout(process)
            with torch.no_grad():
                rows = Layout(trees.leaves(process.bound.start()[0]), axis).rows
            if rows > self.largest:
                raise BilevelError(
                    f"Spectral would decompose a {rows} × {rows} matrix, and its limit is {self.largest}. Use "
                    "Implicit(CG()) or Reverse(), or raise the limit with Spectral(largest=…)."
                )
            process.findings["spectral axis"] = axis

    def __call__(self, process: Process) -> Hypergradient:
        axis = process.findings["spectral axis"]
        if self.compiled:
            found = _compiled(process, axis)
        else:
            found = _gradients(process.bound, process.variables, process.steps, axis)
        _refuse_unless_exact(found)
        w = trees.flatten(process.bound.start()[0])[1].unflatten(found.leaves)
        layout = Layout(found.leaves, axis)
        result = self.result(
            process,
            found.value,
            (w, ()),
            found.gradients,
            peak_memory=4 * layout.rows**2 * found.leaves[0].element_size(),
            products=math.ceil(layout.rows / layout.width),
        )
        # There is no velocity to go on from.
        return replace(result, state=None)


@dataclass(frozen=True)
class Found:
    """f_T, the leaves of w_T, the gradient of f_T in the variables, and how far ∇L is from A w − b at w_T."""

    value: Tensor
    leaves: list[Tensor]
    gradients: Gradients
    misfit: Tensor


def _gradients(bound: Bound, variables: list[Tensor], steps: int, axis: int | None) -> Found:
    with torch.enable_grad():
        quadratic = Quadratic.of(bound, axis)
        layout = quadratic.layout
        w0 = layout.pack(layout.leaves)
    form = cast(tuple[Any, Any], bound.dynamics.heavy_ball_form(1))
    settings = [torch.as_tensor(x, dtype=w0.dtype, device=w0.device).reshape(()) for x in form]
    lr, momentum = (setting.detach() for setting in settings)
    plain = isinstance(form[1], (int, float)) and form[1] == 0
    with torch.no_grad():
        if plain and 0 < steps * layout.width <= LONGEST:
            result: SpectralIterate | KrylovIterate = iterate_all(quadratic.matrix, quadratic.target, w0, lr, steps)
        else:
            result = iterate(quadratic.matrix, quadratic.target, w0, lr, momentum, steps, plain)
        points = layout.unpack(result.w)
        misfit = _misfit(bound, quadratic, result.w)
    value, alpha, direct, _ = outer_gradients(bound, variables, (quadratic.spec.unflatten(points), ()))

    learned = any(setting.requires_grad for setting in settings)
    cotangent = layout.pack([torch.zeros_like(p) if a is None else a for p, a in zip(points, alpha, strict=True)])
    pulled = result.pull_back(cotangent, learned)
    heads = [quadratic.matrix, quadratic.target, w0, *(settings if learned else ())]
    recorded = [(h, g) for h, g in zip(heads, pulled, strict=True) if h.requires_grad]
    if not recorded:
        return Found(value, points, direct, misfit)
    outputs, cotangents = zip(*recorded, strict=True)
    parts = torch.autograd.grad(outputs, variables, cotangents, allow_unused=True, retain_graph=True)
    return Found(value, points, [accumulate(d, p) for d, p in zip(direct, parts, strict=True)], misfit)


def _misfit(bound: Bound, quadratic: Quadratic, w: Tensor) -> Tensor:
    """How far the gradient of the inner objective at w is from A w − b, relative to the terms that make it up."""
    matrix, target, layout = quadratic.matrix.detach(), quadratic.target.detach(), quadratic.layout
    slope = gradient(bound.loss(1), quadratic.spec.unflatten(layout.unpack(w)))
    error = layout.pack(trees.leaves(slope)) - (matrix @ w - target)
    scale = (matrix.abs() @ w.abs() + target.abs()).amax()
    return error.abs().amax() / scale.clamp_min(torch.finfo(w.dtype).tiny)


def _refuse_unless_exact(found: Found) -> None:
    """The one check that is made at every call: at the end of the run L is the quadratic that it had at the start."""
    if not found.misfit <= tolerance_of(found.misfit) and bool(torch.isfinite(found.value)):
        raise BilevelError(
            "Spectral needs an inner objective that is quadratic in w, but at w_T the gradient of this one is "
            f"{float(found.misfit):.2g} (relative) away from that of its quadratic at w_0. Use Reverse(), or "
            "Implicit() once the inner problem converges."
        )


def _compiled(process: Process, axis: int | None) -> Found:
    """The same in one compiled function of the variables and the data."""
    count = len(process.variables)
    inputs = [*(variable.detach() for variable in process.variables), *process.data()]

    def build() -> tuple[Kernel, list[bool]]:
        reached = [False] * count

        def function(*flat: Tensor) -> list[Tensor]:
            variables = [x.detach().requires_grad_() for x in flat[:count]]
            found = _gradients(process.bind(variables, list(flat[count:])), variables, process.steps, axis)
            reached[:] = [g is not None for g in found.gradients]
            return [found.value, found.misfit, *found.leaves, *(g for g in found.gradients if g is not None)]

        return compile_function(function, inputs, "Spectral() without `compiled`"), reached

    kernel, reached = build_once(process, ("spectral", process.steps, axis), inputs, build)
    with torch.no_grad():
        value, misfit, *rest = kernel(*inputs)
    gradients = iter(rest[len(rest) - sum(reached) :])
    return Found(value, rest[: len(rest) - sum(reached)], [next(gradients) if r else None for r in reached], misfit)


@dataclass(frozen=True)
class Quadratic:
    """L(w) = ½⟨w, A w⟩ − ⟨b, w⟩ + const, read off its derivatives, with w as a matrix: one column per independent
    problem."""

    matrix: Tensor
    target: Tensor
    spec: trees.Spec
    layout: Layout
    products: int

    @staticmethod
    def of(bound: Bound, axis: int | None) -> Quadratic:
        """A and b as differentiable functions of the variables."""
        leaves, spec = trees.flatten(bound.start()[0])
        layout = Layout(leaves, axis)
        # Taken at w_0, so that comparing gradients at w_T alone covers both ends of the run.
        points = [leaf.detach().requires_grad_() for leaf in leaves]
        slope = trees.leaves(gradient(bound.loss(1), spec.unflatten(points)))
        # Different unit vectors go into different columns, so ⌈rows/width⌉ products give all of A.
        count = math.ceil(layout.rows / layout.width)
        units = torch.eye(layout.rows, count * layout.width, dtype=points[0].dtype, device=points[0].device)
        directions = layout.unpack(units.reshape(layout.rows, count, layout.width).transpose(0, 1))
        image = layout.pack(_products(slope, points, directions), batched=True)
        matrix = image.transpose(0, 1).reshape(layout.rows, -1)[:, : layout.rows]
        target = matrix @ layout.pack([point.detach() for point in points]) - layout.pack(slope)
        return Quadratic(matrix, target, spec, layout, count)


@dataclass(frozen=True)
class Layout:
    """The leaves of w as one matrix; `axis` is the axis of every leaf that counts independent columns, None for a
    single column."""

    leaves: list[Tensor]
    axis: int | None

    @property
    def width(self) -> int:
        return 1 if self.axis is None else self.leaves[0].shape[self.axis]

    @property
    def rows(self) -> int:
        return sum(leaf.numel() for leaf in self.leaves) // self.width

    def pack(self, parts: Sequence[Tensor], batched: bool = False) -> Tensor:
        """The parts, shaped like the leaves, as a matrix; with `batched`, each has one more axis in front."""
        blocks = []
        for part in parts:
            moved = part if self.axis in (None, -1) else part.movedim(1 if batched else 0, -1)
            blocks.append(moved.reshape(*part.shape[:batched], -1, self.width))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)

    def unpack(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `pack`, a batch axis in front kept."""
        pieces = torch.split(matrix, [leaf.numel() // self.width for leaf in self.leaves], dim=-2)
        batch = matrix.shape[:-2]
        if self.axis in (None, -1):
            return [piece.reshape(batch + leaf.shape) for piece, leaf in zip(pieces, self.leaves, strict=True)]
        return [
            piece.reshape(*batch, *leaf.shape[1:], self.width).movedim(-1, len(batch))
            for piece, leaf in zip(pieces, self.leaves, strict=True)
        ]


def _products(slope: list[Tensor], points: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Hessian products with a batch of directions, differentiable in whatever the slope depends on."""
    heads = [(s, d) for s, d in zip(slope, directions, strict=True) if s.requires_grad]
    outputs, cotangents = zip(*heads, strict=True)
    count = len(directions[0])
    if count == 1:
        parts = torch.autograd.grad(outputs, points, [c[0] for c in cotangents], create_graph=True, allow_unused=True)
        parts = tuple(None if g is None else g.unsqueeze(0) for g in parts)
    else:
        parts = torch.autograd.grad(
            outputs, points, cotangents, create_graph=True, allow_unused=True, is_grads_batched=True
        )
    return [p.new_zeros((count, *p.shape)) if g is None else g for p, g in zip(points, parts, strict=True)]


def _find_layout(process: Process) -> int | None:
    """The axis along which w splits into independent columns with one and the same matrix, or None.

    It is looked for at λ moved a little in a random direction: columns whose matrices are equal only because λ starts
    out with equal entries are not independent of which column λ belongs to.
    """
    bound = process.bind(_nudged(process.variables))
    with torch.no_grad():
        leaves, spec = trees.flatten(bound.start()[0])
    points = [torch.zeros_like(leaf).requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        slope = trees.leaves(gradient(bound.loss(1), spec.unflatten(points)))
    if not any(part.requires_grad for part in slope):
        raise BilevelError(
            "Spectral needs a quadratic inner objective, but the gradient of this one does not depend on w. Use "
            "Reverse()."
        )
    probe = trees.from_vector(random_directions(1, trees.to_vector(leaves), seed=2)[0], leaves)
    product = [part[0].detach() for part in _products(slope, points, [part.unsqueeze(0) for part in probe])]
    for axis in (-1, 0):
        sizes = {leaf.shape[axis] for leaf in leaves if leaf.ndim}
        if all(leaf.ndim for leaf in leaves) and any(leaf.ndim > 1 for leaf in leaves) and len(sizes) == 1:
            with torch.enable_grad():
                quadratic = Quadratic.of(bound, axis)
            expected = quadratic.matrix.detach() @ quadratic.layout.pack(probe)
            error = (expected - quadratic.layout.pack(product)).abs().amax() / expected.abs().amax()
            if bool(error <= tolerance_of(error)):
                return axis
    return None


def _nudged(variables: list[Tensor]) -> list[Tensor]:
    noise = random_directions(1, trees.to_vector([v.detach() for v in variables]), seed=4)[0]
    moved = zip(variables, trees.from_vector(noise, variables), strict=True)
    return [(v.detach() + 0.01 * (1 + v.detach().abs()) * step).requires_grad_() for v, step in moved]


def tolerance_of(number: Tensor) -> float:
    """What rounding may do to a gradient, with room for a few thousand terms."""
    return float(torch.finfo(number.dtype).eps ** 0.6)


def _check_settings(process: Process) -> None:
    """The step size and momentum must be single numbers that do not change with t."""
    dynamics = process.bound.dynamics
    form = dynamics.heavy_ball_form(1)
    if form is None:
        raise BilevelError(
            f"Spectral knows gradient descent and heavy ball, not {type(dynamics).__name__}. Use Reverse() with this "
            "dynamics."
        )
    for name, value in zip(("lr", "momentum"), form, strict=True):
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise BilevelError(
                f"Spectral needs one {name} for all weights, but it was given {trees.describe(value)}. Use Reverse() "
                "for a value per weight."
            )
    if not any(callable(getattr(dynamics, f.name)) for f in fields(dynamics)):
        return
    if any(isinstance(value, Tensor) and value.requires_grad for value in form):
        raise BilevelError(
            "Spectral needs settings that do not change with t, but here they are functions of t and learned, so each "
            "step may have its own. Pass the learned value itself instead of a function, or use Reverse()."
        )
    numbers = [float(value) for value in form]
    for t in process.times:
        if [float(value) for value in dynamics.heavy_ball_form(t) or ()] != numbers:
            raise BilevelError(
                f"Spectral needs settings that do not change with t, but they are {numbers} at step 1 and others at "
                f"step {t}. Use Reverse()."
            )
