"""The derivative of f_T for a quadratic inner objective: forward to w_T, and back to A, b, w_0 and the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bilevel import trees
from bilevel.engine.process import Bound, Gradients, accumulate, outer_gradients
from bilevel.methods.spectral.functions import SpectralIterate, iterate
from bilevel.methods.spectral.krylov import KrylovIterate, iterate_all
from bilevel.methods.spectral.quadratic import Layout, Quadratic

# Up to this many iterates, counted for each column, computing all of them is cheaper than decomposing A.
LONGEST = 512


@dataclass(frozen=True)
class Start:
    """w_0, the step size and the momentum, as tensors that may depend on λ. The momentum is None if it is 0."""

    leaves: list[Tensor]
    spec: trees.Spec
    settings: list[Tensor]

    @staticmethod
    def of(bound: Bound) -> Start:
        with torch.enable_grad():
            leaves, spec = trees.flatten(bound.start()[0])
            form = cast(tuple[Any, Any], bound.dynamics.heavy_ball_form(1))
            plain = isinstance(form[1], (int, float)) and form[1] == 0
            like = {"dtype": leaves[0].dtype, "device": leaves[0].device}
            settings = [
                x.to(**like).reshape(()) if isinstance(x, Tensor) else torch.tensor(x, **like)
                for x in (form[:1] if plain else form)
            ]
        return Start(leaves, spec, settings)

    @property
    def depends_on_lam(self) -> bool:
        """Whether w_0 is a function of λ."""
        return any(leaf.requires_grad for leaf in self.leaves)

    @property
    def learned(self) -> bool:
        """Whether λ enters through the settings."""
        return any(setting.requires_grad for setting in self.settings)

    def pull_back(self, found: QuadraticDerivative, variables: list[Tensor]) -> Gradients:
        """The gradient of f_T in the variables, with the contributions through w_0 and the settings added."""
        cotangents = zip([*self.leaves, *self.settings], found.cotangents, strict=False)
        recorded = [(head, g) for head, g in cotangents if head.requires_grad and g is not None]
        return add_pulled(found.gradients, recorded, variables)


@dataclass(frozen=True)
class QuadraticDerivative:
    """f_T, the leaves of w_T, how far ∇L is from A w − b there, the gradient of f_T in the variables, and the
    cotangents of w_0 and, where they are learned, of the settings."""

    value: Tensor
    leaves: list[Tensor]
    misfit: Tensor
    gradients: Gradients
    cotangents: list[Tensor | None]


def differentiate(
    bound: Bound, variables: list[Tensor], start: Start, steps: int, axis: int | None
) -> QuadraticDerivative:
    """f_T and its derivatives for one quadratic. `Start.pull_back` adds those through w_0 and the settings."""
    layout, loss, spec = Layout(start.leaves, axis), bound.loss(1), start.spec
    quadratic = Quadratic.of(loss, spec, layout)
    result, vector = _run(quadratic, [x.detach() for x in start.settings], steps)
    points = layout.unpack(result.w)
    misfit = quadratic.misfit(loss, spec, layout, result.w)
    value, alpha, direct, _ = outer_gradients(bound, variables, (spec.unflatten(points), ()))

    cotangent = layout.pack([torch.zeros_like(p) if a is None else a for p, a in zip(points, alpha, strict=True)])
    pulled = result.pull_back(cotangent, start.learned)
    heads = zip([quadratic.matrix, vector], pulled, strict=False)
    gradients = add_pulled(direct, [(h, g) for h, g in heads if h.requires_grad], variables)
    w0, *settings = pulled[2:]
    return QuadraticDerivative(value, points, misfit, gradients, [*layout.unpack(w0), *settings[: len(start.settings)]])


def add_pulled(gradients: Gradients, heads: Sequence[tuple[Tensor, Tensor]], variables: list[Tensor]) -> Gradients:
    """The gradients, with the contributions from the cotangents of some tensors added."""
    if not heads:
        return gradients
    outputs, cotangents = zip(*heads, strict=True)
    parts = torch.autograd.grad(outputs, variables, cotangents, allow_unused=True, retain_graph=True)
    return [accumulate(g, part) for g, part in zip(gradients, parts, strict=True)]


def _run(quadratic: Quadratic, settings: list[Tensor], steps: int) -> tuple[SpectralIterate | KrylovIterate, Tensor]:
    """w_T, and the vector that it is a function of besides A: g in a short run, b in a long one."""
    matrix, w0 = quadratic.matrix.detach(), quadratic.start
    if _is_short(w0.shape[1], settings, steps):
        return iterate_all(matrix, quadratic.slope.detach(), w0, settings[0], steps), quadratic.slope
    plain, target = len(settings) == 1, quadratic.target()
    momentum = torch.zeros_like(settings[0]) if plain else settings[1]
    return iterate(matrix, target.detach(), w0, settings[0], momentum, steps, plain), target


def _is_short(width: int, settings: list[Tensor], steps: int) -> bool:
    return len(settings) == 1 and 0 < steps * width <= LONGEST


def kept_bytes(layout: Layout, start: Start, steps: int) -> int:
    """A few matrices of the size of A; in a short run also all iterates and their adjoints."""
    numbers = 4 * layout.rows**2
    if _is_short(layout.width, start.settings, steps):
        numbers = (2 + steps.bit_length()) * layout.rows**2 + 2 * steps * layout.width * layout.rows
    return numbers * start.leaves[0].element_size()
