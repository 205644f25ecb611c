"""Evolution strategies: ∇f_T from values of f_T alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Process
from bilevel.errors import BilevelError, DivergenceError


@dataclass(frozen=True)
class ZeroOrder(Method):
    """g = (1/n) Σ_i u_i (f_T(λ + σ u_i) − f_T(λ − σ u_i)) / (2 σ), with random directions u_i of length √d.

    It is for functions without a gradient: the outer objective may be an accuracy, the dynamics may round or branch,
    and f_T may be too rough to be differentiated (`bilevel.roughness`). g is an unbiased estimate of the gradient of
    f_T averaged over a ball of radius σ√d, and with a small σ approximates ∇f_T.

    With n ≥ d directions, where d is the number of values in λ, the error is that of central differences, of order σ².
    With n < d directions the expected error is √(d/n − 1) ‖∇f_T‖, which `stats.error` estimates. There is no
    certificate.

    Directions are drawn in orthogonal groups and used with both signs. They are a function of `seed` and λ: two calls
    with the same λ agree, also for several tasks, and every hyperiteration draws other directions. Batches are
    functions of t, so all runs of a call use the same ones.

    Args:
        pairs: n, the number of directions. The inner problem is run 2 n + 1 times.
        sigma: σ. The default is as small as rounding allows, which suits a smooth f_T. For an accuracy, pass a σ that
            moves λ enough to change the accuracy.
        seed: of the directions.
    """

    pairs: int = 16
    sigma: float | None = None
    seed: int = 0
    exact: ClassVar[bool] = False
    second_derivatives: ClassVar[bool] = False
    outer_derivatives: ClassVar[bool] = False
    # In float32 the differences are so wide that they cross kinks.
    single_tolerance: ClassVar[float] = 3e-2

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(pairs=24)]

    def check(self, process: Process) -> None:
        if isinstance(self.pairs, bool) or not isinstance(self.pairs, int) or self.pairs < 1:
            raise BilevelError(f"ZeroOrder(pairs={self.pairs!r}) is not a number of directions; pass an int ≥ 1.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise BilevelError(f"ZeroOrder(seed={self.seed!r}) is not a seed; pass an int from 0 to 2³² − 1.")
        if self.sigma is not None and not self.sigma > 0:
            raise BilevelError(f"ZeroOrder(sigma={self.sigma!r}) does not change λ; pass a number > 0, or None.")

    def prepare(self, process: Process) -> frozenset[int]:
        """The leaves of λ that f_T does not depend on here."""
        lam, value, paths = _LamVector(process), _value(process), trees.paths(process.lam)
        unused = frozenset(i for i in range(len(paths)) if not self._matter(lam, value, {i}))
        if unused and not process.allow_unused:
            raise BilevelError(
                f"f_T did not change when λ{paths[min(unused)]} moved by up to {100 * self._width(lam):.2g} in a "
                "random direction: it reaches neither objective, or sigma is too small to show it. Remove it from λ, "
                "pass a larger ZeroOrder(sigma=…), or allow_unused=True to have its gradient be zero."
            )
        return unused

    def _matter(self, lam: _LamVector, value: Tensor, leaves: Collection[int]) -> bool:
        """Whether f_T changes when these leaves of λ move; True if they are empty."""
        pieces = []
        for index, leaf in enumerate(lam.leaves):
            noise = torch.randn(leaf.numel(), generator=torch.Generator().manual_seed(index), device="cpu").double()
            pieces.append(noise if index in leaves else torch.zeros_like(noise))
        direction, width = torch.cat(pieces), self._width(lam)
        moves = (sign * factor * width for factor in (1, 10, 100) for sign in (1, -1))
        return not bool(direction.any()) or any(float(lam.value(move * direction)) != value for move in moves)

    def __call__(self, process: Process) -> Hypergradient:
        state = process.run()
        with torch.no_grad():
            value = process.bound.outer(state).detach()
        lam = _LamVector(process)
        count = lam.point.numel()
        per_group, groups, radius = min(self.pairs, count), max(1, self.pairs // count), self._radius(lam)
        generator = torch.Generator().manual_seed(zlib.crc32(lam.point.numpy().tobytes(), self.seed))
        total, squares = torch.zeros_like(lam.point), 0.0
        for _ in range(groups):
            drawn = torch.randn(count, per_group, generator=generator, dtype=torch.float64, device="cpu")
            for direction in torch.linalg.qr(drawn)[0].T:
                above, below = (float(lam.value(sign * radius * direction)) for sign in (1, -1))
                if not (math.isfinite(above) and math.isfinite(below)) and bool(torch.isfinite(value)):
                    raise DivergenceError(
                        f"f_T = {float(value):.6g} is finite, but it is {above:.6g} and {below:.6g} where λ moved by "
                        f"±{radius:.2g} in a random direction, as ZeroOrder does. λ left its domain there, or the "
                        "inner problem diverged. Pass a smaller ZeroOrder(sigma=…), or a λ farther from the boundary."
                    )
                slope = (above - below) / (2 * radius)
                total += slope * direction
                squares += slope**2
        unused = process.check_results.prepared or frozenset()
        # Here f_T may depend on leaves that did not matter at the first call.
        if unused and self._matter(lam, value, unused):
            unused = frozenset(i for i in unused if not self._matter(lam, value, {i}))
        parts = trees.from_vector(count / (per_group * groups) * total, lam.leaves)
        gradients = [None if i in unused else g.to(x) for i, (g, x) in enumerate(zip(parts, lam.leaves, strict=True))]
        spread = (count / per_group - 1) * count * squares / (per_group * groups) / groups
        return self.result(
            process,
            value,
            state,
            gradients,
            pulled=True,
            steps=(1 + 2 * per_group * groups) * process.steps,
            peak_memory=(2 + per_group) * lam.point.numel() * 8,
            error=math.sqrt(spread) if per_group < count else None,
        )

    def _width(self, lam: _LamVector) -> float:
        """σ."""
        return self._radius(lam) / lam.point.numel() ** 0.5

    def _radius(self, lam: _LamVector) -> float:
        """The length of a move of λ: σ √d."""
        root = lam.point.numel() ** 0.5
        return self.sigma * root if self.sigma is not None else lam.width * (1 + float(lam.point.norm()) / root)


class _LamVector:
    """λ as a vector in double precision, and f_T at points that differ from it by a move."""

    def __init__(self, process: Process) -> None:
        self.process, (self.leaves, self.spec) = process, trees.flatten(trees.detach(process.lam))
        self.point = trees.to_vector([leaf.double().cpu() for leaf in self.leaves])
        # Central differences are most accurate at the cube root of the precision.
        self.width = max(torch.finfo(leaf.dtype).eps for leaf in self.leaves) ** (1 / 3)

    def value(self, move: Tensor) -> Tensor:
        parts = trees.from_vector(self.point + move, self.leaves)
        moved = [part.to(leaf) for part, leaf in zip(parts, self.leaves, strict=True)]
        return _value(replace(self.process, lam=self.spec.unflatten(moved)))


def _value(process: Process) -> Tensor:
    with torch.no_grad():
        return process.bound.outer(process.run()).detach()
