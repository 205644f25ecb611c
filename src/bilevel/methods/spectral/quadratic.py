"""A quadratic inner objective as a matrix and a vector, computed from its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.engine.process import Bound, Process
from bilevel.engine.products import batched_grad
from bilevel.errors import BilevelError
from bilevel.linear_solvers.base import random_directions
from bilevel.trees import Tree


@dataclass(frozen=True)
class Quadratic:
    """L(w) = L(w_0) + ⟨g, w − w_0⟩ + ½⟨w − w_0, A (w − w_0)⟩, with w as a matrix: one column per independent
    problem."""

    matrix: Tensor
    slope: Tensor
    start: Tensor

    @staticmethod
    def of(loss: Callable[[Tree], Tensor], spec: trees.Spec, layout: Layout) -> Quadratic:
        """A and g as differentiable functions of the variables of the loss."""
        # Computed at w_0, so that a comparison at w_T covers both ends of the run.
        points = [leaf.detach().requires_grad_() for leaf in layout.leaves]
        with torch.enable_grad():
            slope = trees.leaves(gradient(loss, spec.unflatten(points)))
            # Different unit vectors go into different columns, so ⌈rows/width⌉ products give all of A.
            count = layout.products
            units = torch.eye(layout.rows, count * layout.width, dtype=points[0].dtype, device=points[0].device)
            directions = layout.unpack(units.reshape(layout.rows, count, layout.width).transpose(0, 1).contiguous())
            image = layout.pack(hessian_products(slope, points, directions), batched=True)
            matrix = image.transpose(0, 1).reshape(layout.rows, -1)[:, : layout.rows]
            return Quadratic(matrix, layout.pack(slope), layout.pack([leaf.detach() for leaf in layout.leaves]))

    def target(self) -> Tensor:
        """b of L(w) = ½⟨w, A w⟩ − ⟨b, w⟩ + const."""
        with torch.enable_grad():
            return self.matrix @ self.start - self.slope

    def misfit(self, loss: Callable[[Tree], Tensor], spec: trees.Spec, layout: Layout, w: Tensor) -> Tensor:
        """The distance of the gradient of the inner objective at w from g + A (w − w_0), relative to its terms."""
        matrix, slope, shift = self.matrix.detach(), self.slope.detach(), w - self.start
        with torch.no_grad():
            found = layout.pack(trees.leaves(gradient(loss, spec.unflatten(layout.unpack(w)))))
            error = found - (matrix @ shift + slope)
            scale = (matrix.abs() @ shift.abs() + slope.abs()).amax()
            return error.abs().amax() / scale.clamp_min(torch.finfo(w.dtype).tiny)


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

    @property
    def products(self) -> int:
        """How many Hessian products give all of A."""
        return math.ceil(self.rows / self.width)

    def pack(self, parts: Sequence[Tensor], batched: bool = False) -> Tensor:
        """The parts, shaped like the leaves, as a matrix; with `batched`, each has a leading batch axis."""
        blocks = []
        for part in parts:
            moved = part if self.axis in (None, -1) else part.movedim(1 if batched else 0, -1)
            blocks.append(moved.reshape(*part.shape[:batched], -1, self.width))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)

    def unpack(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `pack`; a leading batch axis is kept."""
        pieces = torch.split(matrix, [leaf.numel() // self.width for leaf in self.leaves], dim=-2)
        batch = matrix.shape[:-2]
        if self.axis in (None, -1):
            return [piece.reshape(batch + leaf.shape) for piece, leaf in zip(pieces, self.leaves, strict=True)]
        return [
            piece.reshape(*batch, *leaf.shape[1:], self.width).movedim(-1, len(batch))
            for piece, leaf in zip(pieces, self.leaves, strict=True)
        ]


def hessian_products(slope: list[Tensor], points: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Hessian products with a batch of directions, differentiable in the variables of the slope."""
    heads = [(s, d) for s, d in zip(slope, directions, strict=True) if s.requires_grad]
    outputs, cotangents = zip(*heads, strict=True)
    count = len(directions[0])
    if count == 1:
        parts = torch.autograd.grad(outputs, points, [c[0] for c in cotangents], create_graph=True, allow_unused=True)
        parts = tuple(None if g is None else g.unsqueeze(0) for g in parts)
    else:
        parts = batched_grad(outputs, points, cotangents, create_graph=True)
    return [p.new_zeros((count, *p.shape)) if g is None else g for p, g in zip(points, parts, strict=True)]


def find_axis(process: Process) -> int | None:
    """The axis along which w splits into independent columns with one and the same matrix, or None.

    The search uses a λ that is moved slightly in a random direction. Otherwise columns could have equal matrices only
    because λ has equal entries.
    """
    bound = process.bind(_perturbed(process.variables))
    loss = bound.loss(1)
    with torch.no_grad():
        leaves, spec = trees.flatten(bound.start()[0])
    points = [torch.zeros_like(leaf).requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        slope = trees.leaves(gradient(loss, spec.unflatten(points)))
    if not any(part.requires_grad for part in slope):
        raise BilevelError(
            "Spectral needs a quadratic inner objective, but the gradient of this one does not depend on w. Use "
            "Reverse()."
        )
    probe = trees.from_vector(random_directions(1, trees.to_vector(leaves), seed=2)[0], leaves)
    product = [part[0].detach() for part in hessian_products(slope, points, [part.unsqueeze(0) for part in probe])]
    for axis in (-1, 0):
        sizes = {leaf.shape[axis] for leaf in leaves if leaf.ndim}
        if all(leaf.ndim for leaf in leaves) and any(leaf.ndim > 1 for leaf in leaves) and len(sizes) == 1:
            layout = Layout(leaves, axis)
            expected = Quadratic.of(loss, spec, layout).matrix.detach() @ layout.pack(probe)
            error = (expected - layout.pack(product)).abs().amax() / expected.abs().amax()
            if bool(error <= tolerance_of(error)):
                return axis
    return None


def columns_share_matrix(bound: Bound, axis: int) -> bool:
    """Whether the columns along an axis that was found for other data share one matrix for these data too.

    If they do, H(P M) = H(P) M for all P and M. This is tested with random P and M.
    """
    with torch.no_grad():
        leaves, spec = trees.flatten(bound.start()[0])
    layout, points = Layout(leaves, axis), [torch.zeros_like(leaf).requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        slope = trees.leaves(gradient(bound.loss(1), spec.unflatten(points)))
    like = trees.to_vector(leaves)
    probe = random_directions(1, like, seed=2).view(layout.rows, layout.width)
    mixture = random_directions(layout.width, like[: layout.width], seed=5)
    plain, mixed = (
        layout.pack([part[0].detach() for part in hessian_products(slope, points, layout.unpack(direction[None]))])
        for direction in (probe, probe @ mixture)
    )
    error = (plain @ mixture - mixed).abs().amax() / mixed.abs().amax().clamp_min(torch.finfo(like.dtype).tiny)
    return bool(error <= tolerance_of(error))


def _perturbed(variables: list[Tensor]) -> list[Tensor]:
    noise = random_directions(1, trees.to_vector([v.detach() for v in variables]), seed=4)[0]
    moved = zip(variables, trees.from_vector(noise, variables), strict=True)
    return [(v.detach() + 0.01 * (1 + v.detach().abs()) * step).requires_grad_() for v, step in moved]


def tolerance_of(number: Tensor) -> float:
    """The rounding error of a gradient of a few thousand terms."""
    return float(torch.finfo(number.dtype).eps ** 0.6)
