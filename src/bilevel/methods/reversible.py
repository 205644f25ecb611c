"""Momentum dynamics in exact arithmetic, run backwards (Maclaurin, Duvenaud and Adams, 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NoReturn

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.dynamics.base import largest, per_leaf
from bilevel.engine.method import Hypergradient, Method
from bilevel.engine.process import Bound, Process, State
from bilevel.errors import BilevelError, DivergenceError
from bilevel.methods.reverse import Sweep
from bilevel.trees import Tree

# The absolute values of w and v, as integers, stay below this.
LIMIT = 2**61


@dataclass(frozen=True)
class Reversible(Method):
    """Reverse mode that stores no iterates: momentum dynamics in exact arithmetic, run backwards step by step.

    w and v are integers, so a step can be undone exactly if the digits that a momentum below 1 erases are kept.
    Undoing w ← w + v is a subtraction. Undoing v ← γv needs the digits that the multiplication dropped, log₂(1/γ)
    bits per weight and step (0.15 for γ = 0.9). They are collected in an integer per weight.

    The numbers are those of float64 dynamics up to 2^−`bits` of their size. The method is for long runs of heavy ball
    for which even √T iterates do not fit into memory.

    Args:
        bits: the precision, relative to the first iterate or the first step, whichever is larger. 62 − bits remain for
            growth.
    """

    bits: int = 47

    def check(self, process: Process) -> None:
        if not isinstance(self.bits, int) or not 16 <= self.bits <= 56:
            raise BilevelError(f"Reversible(bits={self.bits!r}) is out of range; pass 16 to 56.")
        if process.steps:
            _momentum(process.bound, process.times.start)
            _momentum(process.bound, process.times.stop - 1)

    def __call__(self, process: Process) -> Hypergradient:
        bound = process.bound
        with torch.no_grad():
            w, v = bound.start()
            exact = ExactMomentum(bound, w, v, self.bits, process.times.start)
            for t in process.times:
                exact.forward(t)
            memory = exact.nbytes()
        sweep = Sweep(process, exact.state())
        for t in reversed(process.times):
            with torch.no_grad():
                exact.backward(t)
            sweep.through(exact.state(), range(t, t + 1))
        sweep.through_start()
        steps = 2 * process.steps
        return self.result(
            process, sweep.value, sweep.last, sweep.gradients, steps=steps, replayed=process.steps, peak_memory=memory
        )


class ExactMomentum:
    """(w, v) as integers, with a step of heavy ball that can be undone to the bit."""

    def __init__(self, bound: Bound, w: Tree, v: Tree, bits: int, first: int) -> None:
        self.bound = bound
        points, self.spec = trees.flatten(w)
        self.dtypes = [point.dtype for point in points]
        pushes = self._pushes(w, first)
        # If the start is zero, the size of the first step sets the scale.
        size = max(1e-300, *map(_largest, points), *(10 * _largest(push) for push in pushes))
        self.unit = 2.0 ** (math.ceil(math.log2(size)) - bits) if math.isfinite(size) else 1.0
        self.w = [self._integers(point, first) for point in points]
        self.v = [self._integers(leaf, first) for leaf in trees.leaves(v)]
        self.erased = [ErasedDigits(torch.zeros_like(x)) for x in self.v]

    def _integers(self, x: Tensor, t: int) -> Tensor:
        scaled = x.double() / self.unit
        if not bool((scaled.abs() < LIMIT).all()):
            self._raise_divergence(t)
        return scaled.round().to(torch.int64)

    def _raise_divergence(self, t: int) -> NoReturn:
        loss = float(self.bound.loss(t)(self.spec.unflatten(self._floats(self.w)))) if hasattr(self, "w") else None
        raise DivergenceError(
            f"At step {t} the inner iterates left the range of ±{LIMIT * self.unit:.3g} that Reversible works in "
            f"(inner loss {loss}): they diverge, or grow a lot. Lower the step size, or pass fewer bits, "
            "Reversible(bits=40).",
            step=t,
            loss=loss,
        )

    def _floats(self, integers: list[Tensor]) -> list[Tensor]:
        return [(x.double() * self.unit).to(dtype) for x, dtype in zip(integers, self.dtypes, strict=True)]

    def state(self) -> State:
        return self.spec.unflatten(self._floats(self.w)), self.spec.unflatten(self._floats(self.v))

    def _pushes(self, w: Tree, t: int) -> list[Tensor]:
        """lr·∇L(w), with the same bits in the forward and the backward run."""
        lr, _ = self.bound.dynamics.heavy_ball_form(t) or (0.0, 0.0)
        grads = trees.leaves(gradient(self.bound.loss(t), w))
        return [rate * g.double() for rate, g in zip(per_leaf(lr, w), grads, strict=True)]

    def _push(self, t: int) -> list[Tensor]:
        return [self._integers(push, t) for push in self._pushes(self.spec.unflatten(self._floats(self.w)), t)]

    def forward(self, t: int) -> None:
        push, momentum = self._push(t), Ratio(_momentum(self.bound, t))
        for i, erased in enumerate(self.erased):
            self.v[i] = momentum.stretch(erased.multiply(self.v[i], momentum, t)) - push[i]
            self.w[i] = self.w[i] + self.v[i]
            # A quarter of the range of int64, so that the next sum cannot overflow before it is checked.
            if max(_largest(self.w[i]), _largest(self.v[i])) >= LIMIT:
                self._raise_divergence(t)

    def backward(self, t: int) -> None:
        momentum = Ratio(_momentum(self.bound, t))
        self.w = [w - v for w, v in zip(self.w, self.v, strict=True)]
        push = self._push(t)
        for i, erased in enumerate(self.erased):
            self.v[i] = erased.divide(momentum.shrink(self.v[i] + push[i]), momentum, t)

    def nbytes(self) -> int:
        return trees.nbytes([self.w, self.v]) + sum(erased.nbytes() for erased in self.erased)


def _momentum(bound: Bound, t: int) -> float:
    """The momentum of step t, if that step can be undone."""
    name, form = type(bound.dynamics).__name__, bound.dynamics.heavy_ball_form(t)
    if form is None:
        raise BilevelError(
            f"Reversible can undo v ← momentum·v − lr·∇L, w ← w + v only, not {name}. Use HeavyBall, or "
            "Reverse('sqrt')."
        )
    if not isinstance(form[1], (int, float)) and not (isinstance(form[1], Tensor) and form[1].numel() == 1):
        raise BilevelError("Reversible needs one momentum for all weights. Use Reverse('sqrt') for a value per weight.")
    momentum = largest(form[1])
    if not 0.05 <= momentum <= 1:
        raise BilevelError(
            f"Reversible needs a momentum in [0.05, 1], but {name} has {momentum:.3g} at step {t}: without momentum a "
            "step loses the digits that are needed to undo it. Use Reverse('sqrt')."
        )
    return momentum


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


class Ratio:
    """momentum = (n/d)·(1 + k): a small fraction that is multiplied by exactly, and a remainder k ≥ 0 near zero."""

    def __init__(self, momentum: float) -> None:
        fraction = Fraction(momentum).limit_denominator(64)
        if float(fraction) > momentum:
            fraction = Fraction(int(momentum * 64), 64)
        self.n, self.d = fraction.numerator, fraction.denominator
        self.k = momentum * self.d / self.n - 1 if float(fraction) != momentum else 0.0

    def _remainder(self, x: Tensor) -> Tensor:
        return (x.double() * self.k).round().to(torch.int64)

    def stretch(self, x: Tensor) -> Tensor:
        """x + round(k·x), which is one-to-one because it is strictly increasing."""
        return x + self._remainder(x) if self.k else x

    def shrink(self, y: Tensor) -> Tensor:
        """The x with stretch(x) = y."""
        if not self.k:
            return y
        x = y
        for _ in range(16):
            x = y - self._remainder(x)
        # Rounding may leave an error of one. The function is strictly increasing, so the right neighbour is unique.
        for candidate in (x - 1, x + 1):
            x = torch.where(self.stretch(x) == y, x, candidate)
        return x


@dataclass
class ErasedDigits:
    """The digits that multiplying an integer by n/d drops, kept in a second integer that never overflows."""

    digits: Tensor
    full: list[Tensor] = field(default_factory=list)
    spilled_at: list[int] = field(default_factory=list)
    bound: int = 0

    def multiply(self, v: Tensor, ratio: Ratio, t: int) -> Tensor:
        """Approximately v·n/d, in a form that `divide` inverts exactly."""
        if (self.bound + 1) * ratio.d >= 2**62:
            self.full.append(self.digits)
            self.spilled_at.append(t)
            self.digits, self.bound = torch.zeros_like(self.digits), 0
        self.digits = self.digits * ratio.d + v.remainder(ratio.d)
        self.bound = ((self.bound + 1) * ratio.d) // ratio.n
        v = v.div(ratio.d, rounding_mode="floor") * ratio.n + self.digits.remainder(ratio.n)
        self.digits = self.digits.div(ratio.n, rounding_mode="floor")
        return v

    def divide(self, v: Tensor, ratio: Ratio, t: int) -> Tensor:
        """The inverse of `multiply`: exactly its argument at step t."""
        self.digits = self.digits * ratio.n + v.remainder(ratio.n)
        v = v.div(ratio.n, rounding_mode="floor") * ratio.d + self.digits.remainder(ratio.d)
        self.digits = self.digits.div(ratio.d, rounding_mode="floor")
        if self.spilled_at and self.spilled_at[-1] == t:
            self.spilled_at.pop()
            self.digits = self.full.pop()
        return v

    def nbytes(self) -> int:
        return trees.nbytes([self.digits, *self.full])
