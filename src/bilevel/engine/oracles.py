"""The derivatives of both objectives on given batches, for algorithms that move w, v and λ together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.distributed import current_world
from bilevel.engine.kernels import Kernel, compile_function, form_of
from bilevel.engine.process import Process
from bilevel.tasks.shards import Shards, number_of_parts, part
from bilevel.trees import Spec, Tree

# What each function of `Derivatives` returns: a number (1), and vectors like w or λ.
OUTPUTS = {
    "gradient": "w",
    "products": "wwλ",
    "hessian": "w",
    "cross": "λ",
    "outer": "1wλ",
    "inner_slopes": "1wλ",
    "directions": "1wwλ",
}


@dataclass(frozen=True)
class Triple:
    """A vector for each of w, v and λ: a point, or the directions in which the three move."""

    w: Tensor
    v: Tensor
    lam: Tensor

    def __add__(self, other: Triple) -> Triple:
        return Triple(self.w + other.w, self.v + other.v, self.lam + other.lam)

    def __sub__(self, other: Triple) -> Triple:
        return Triple(self.w - other.w, self.v - other.v, self.lam - other.lam)

    def norm(self) -> float:
        return math.hypot(*(float(torch.linalg.vector_norm(x)) for x in (self.w, self.v, self.lam)))

    def moved(self, direction: Triple, inner: float, outer: float) -> Triple:
        """w and v after a step of size `inner` against a direction, and λ after one of size `outer`."""
        return Triple(
            torch.sub(self.w, direction.w, alpha=inner),
            torch.sub(self.v, direction.v, alpha=inner),
            torch.sub(self.lam, direction.lam, alpha=outer),
        )


def plain(value: Any) -> Any:
    """A `Triple` as a dict, for a checkpoint, and a tensor as a copy."""
    return (
        {"w": value.w.clone(), "v": value.v.clone(), "lam": value.lam.clone()}
        if isinstance(value, Triple)
        else (value.clone() if isinstance(value, Tensor) else value)
    )


def restored(value: Any) -> Any:
    """The inverse of `plain`."""
    return (
        Triple(**{name: part.clone() for name, part in value.items()})
        if isinstance(value, dict)
        else (value.clone() if isinstance(value, Tensor) else value)
    )


@dataclass(frozen=True)
class FlatTree:
    """How the leaves of a tree are laid out in one vector."""

    like: list[Tensor]
    spec: Spec
    plain: bool

    @classmethod
    def of(cls, tree: Tree) -> FlatTree:
        leaves, spec = trees.flatten(tree)
        return cls([leaf.detach() for leaf in leaves], spec, isinstance(tree, Tensor) and tree.ndim == 1)

    def vector(self, tree: Tree) -> Tensor:
        return trees.to_vector([leaf.detach() for leaf in trees.leaves(tree)])

    def tree(self, vector: Tensor) -> Tree:
        if self.plain:
            return vector
        if len(self.like) == 1:
            return self.spec.unflatten([vector.view(self.like[0].shape)])
        parts = trees.from_vector(vector, self.like)
        return self.spec.unflatten(part.to(leaf.dtype) for part, leaf in zip(parts, self.like, strict=True))


@dataclass
class Derivatives:
    """∇L, products with ∇²_w L and ∇²_{λw} L, and ∇E, each on a batch; w, v and λ are vectors.

    v stands for −(∇²_w L)⁻¹ ∇_w E, so that ∇_λ E + ∇²_{λw} L v is the hypergradient at the inner minimiser.

    Args:
        process: an example of the problem, which has passed the checks.
        compiled: compile each function for each shape of a batch, when it is first called.
    """

    process: Process
    compiled: bool = False
    kernels: dict[Any, Kernel] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.bound = self.process.bound
        with torch.no_grad():
            self.w = FlatTree.of(self.bound.start()[0])
        self.lam = FlatTree.of(self.process.lam)

    def gradient(self, w: Tensor, lam: Tensor, batch: Tree) -> Tensor:
        """∇_w L."""
        return self._call(self._gradient, [w, lam], batch)[0]

    def products(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        """∇_w L, ∇²_w L v and ∇²_{λw} L v."""
        return self._call(self._products, [w, lam, v], batch)

    def hessian(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> Tensor:
        """∇²_w L v."""
        return self._call(self._hessian, [w, lam, v], batch)[0]

    def cross(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> Tensor:
        """∇²_{λw} L v."""
        return self._call(self._cross, [w, lam, v], batch)[0]

    def outer(self, w: Tensor, lam: Tensor, batch: Tree) -> list[Tensor]:
        """E, ∇_w E and ∇_λ E."""
        return self._call(self._outer, [w, lam], batch)

    def inner(self, w: Tensor, lam: Tensor, batch: Tree) -> list[Tensor]:
        """L, ∇_w L and ∇_λ L."""
        return self._call(self._inner_slopes, [w, lam], batch)

    def directions(self, at: Triple, train: Tree, val: Tree) -> tuple[Tensor, Triple]:
        """E, and (∇_w L, ∇²_w L v + ∇_w E, ∇²_{λw} L v + ∇_λ E), which vanish together where λ is stationary."""
        count = number_of_parts(train)
        if count != number_of_parts(val):
            slope, hessian, cross = self.products(at.w, at.lam, at.v, train)
            value, outer_w, outer_lam = self.outer(at.w, at.lam, val)
            return value, Triple(slope, hessian + outer_w, cross + outer_lam)
        both = Shards(count, lambda i: (part(train, i), part(val, i))) if count > 1 else (part(train, 0), part(val, 0))
        value, w, v, lam = self._call(self._directions, [at.w, at.lam, at.v], both)
        return value, Triple(w, v, lam)

    def _gradient(self, w: Tensor, lam: Tensor, batch: Tree) -> list[Tensor]:
        w = _live(w)
        return _grad(self._inner(w, lam, batch), [w])

    def _products(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        w, lam = _live(w), _live(lam)
        slope = self._slope(w, lam, batch)
        return [slope.detach(), *_grad(slope, [w, lam], v)]

    def _hessian(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        w = _live(w)
        return _grad(self._slope(w, lam, batch), [w], v)

    def _cross(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        w, lam = _live(w), _live(lam)
        return _grad(self._slope(w, lam, batch), [lam], v)

    def _outer(self, w: Tensor, lam: Tensor, batch: Tree) -> list[Tensor]:
        w, lam = _live(w), _live(lam)
        with torch.enable_grad(), self.bound.user_context():
            value = self.process.problem.outer(self.w.tree(w), self.lam.tree(lam), batch)
        return [value.detach(), *_grad(value, [w, lam])]

    def _inner_slopes(self, w: Tensor, lam: Tensor, batch: Tree) -> list[Tensor]:
        w, lam = _live(w), _live(lam)
        value = self._inner(w, lam, batch)
        return [value.detach(), *_grad(value, [w, lam])]

    def _directions(self, w: Tensor, lam: Tensor, v: Tensor, batches: tuple[Tree, Tree]) -> list[Tensor]:
        train, val = batches
        slope, hessian, cross = self._products(w, lam, v, train)
        value, outer_w, outer_lam = self._outer(w, lam, val)
        return [value, slope, hessian + outer_w, cross + outer_lam]

    def _inner(self, w: Tensor, lam: Tensor, batch: Tree) -> Tensor:
        with torch.enable_grad(), self.bound.user_context():
            return self.bound.inner(self.w.tree(w), self.lam.tree(lam), batch)

    def _slope(self, w: Tensor, lam: Tensor, batch: Tree) -> Tensor:
        value = self._inner(w, lam, batch)
        (slope,) = torch.autograd.grad(value, [w], create_graph=True)
        return slope

    def _call(self, function: Callable[..., list[Tensor]], vectors: Sequence[Tensor], batch: Tree) -> list[Tensor]:
        if isinstance(batch, Shards):
            return self._mean(function, vectors, batch)
        if not self.compiled:
            return function(*vectors, batch)
        leaves, spec = trees.flatten(batch)
        data = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = function.__name__, spec, rest, *map(form_of, data)
        if key not in self.kernels:
            count = len(vectors)

            def flat(*tensors: Tensor) -> list[Tensor]:
                given = iter(tensors[count:])
                filled = spec.unflatten(next(given) if constant is None else constant for constant in rest)
                # A function compiled from its graph must return new tensors, never its inputs.
                return [part.clone() for part in function(*tensors[:count], filled)]

            self.kernels[key] = compile_function(flat, [*vectors, *data])
        return self.kernels[key](*vectors, *data)

    def _mean(self, function: Callable[..., list[Tensor]], vectors: Sequence[Tensor], parts: Shards) -> list[Tensor]:
        """The mean over the parts of a batch, which are divided among the processes.

        It is the same, bit for bit, for any number of processes.
        """
        kinds = OUTPUTS[function.__name__.lstrip("_")]
        like = {"w": vectors[0], "λ": vectors[1], "1": vectors[0][:1]}

        def work(i: int) -> Tensor:
            return torch.cat([x.reshape(-1) for x in self._call(function, vectors, parts[i])])

        total = current_world().total(work, parts.count, torch.cat([like[kind] for kind in kinds]))
        split = torch.split(total / parts.count, [len(like[kind]) for kind in kinds])
        return [x.reshape(()) if kind == "1" else x.to(like[kind].dtype) for kind, x in zip(kinds, split, strict=True)]


class FirstDerivatives(Derivatives):
    """The same with ∇²L v ≈ (∇L(w + h v) − ∇L(w − h v)) / (2 h): L is differentiated once only."""

    def _products(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        length = float(torch.linalg.vector_norm(v))
        if not length > 0:
            return [self._gradient(w, lam, batch)[0], torch.zeros_like(w), torch.zeros_like(lam)]
        h = torch.finfo(w.dtype).eps ** (1 / 3) * (1 + float(torch.linalg.vector_norm(w))) / length
        above, below = (self._inner_slopes(w + sign * h * v, lam, batch)[1:] for sign in (1, -1))
        # The slope at w itself, to an error of order h².
        slope = (above[0] + below[0]) / 2
        return [slope, *((a - b) / (2 * h) for a, b in zip(above, below, strict=True))]

    def _hessian(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        return [self._products(w, lam, v, batch)[1]]

    def _cross(self, w: Tensor, lam: Tensor, v: Tensor, batch: Tree) -> list[Tensor]:
        return [self._products(w, lam, v, batch)[2]]


def _live(vector: Tensor) -> Tensor:
    return vector.detach().requires_grad_()


def _grad(output: Tensor, inputs: list[Tensor], cotangent: Tensor | None = None) -> list[Tensor]:
    """Gradients, or zeros where the output does not depend on an input."""
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    parts = torch.autograd.grad(output, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if part is None else part for part, x in zip(parts, inputs, strict=True)]
