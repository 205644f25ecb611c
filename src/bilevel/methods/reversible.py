"""Momentum dynamics in exact arithmetic, run backwards (Maclaurin, Duvenaud and Adams, 2015)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from bilevel import trees
from bilevel.dynamics import gradient
from bilevel.errors import BilevelError, DivergenceError
from bilevel.methods.base import Hypergradient, Method
from bilevel.methods.process import Bound, Process, State
from bilevel.methods.reverse import Sweep


@dataclass(frozen=True)
class Reversible(Method):
    """Reverse mode that stores no iterates: w and v are integers, a step is undone exactly, and only what momentum < 1
    erases is kept.

    Undoing w ← w + v is a subtraction; undoing v ← γv needs the digits that the multiplication pushed out, log₂(1/γ)
    bits per weight (0.15 for γ = 0.9). They are collected in an integer per weight.

    The numbers are those of float64 dynamics up to 2^−fraction_bits; it is for long runs of heavy ball where even √T
    iterates do not fit.

    Args:
        fraction_bits: w and v are multiples of 2^−fraction_bits, below 2^(62 − fraction_bits) in size.
    """

    fraction_bits: int = 48

    def check(self, process: Process) -> None:
        if not 16 <= self.fraction_bits <= 56:
            raise BilevelError(f"Reversible(fraction_bits={self.fraction_bits}) leaves no room; pass 16 to 56.")
        for t in {process.times.start, process.times.stop - 1} if process.steps else ():
            form = process.bound.dynamics.heavy_ball_form(t)
            name = type(process.bound.dynamics).__name__
            if form is None:
                raise BilevelError(
                    f"Reversible can undo v ← momentum·v − lr·∇L, w ← w + v only, not {name}. Use HeavyBall, or "
                    "Reverse('sqrt')."
                )
            if trees.size(form[1]) > 1:
                raise BilevelError(
                    "Reversible needs one momentum for all weights. Use Reverse('sqrt') for a value per weight."
                )
            if not 0.05 <= float(form[1]) <= 1:
                raise BilevelError(
                    f"Reversible needs a momentum in [0.05, 1], but {name} has {float(form[1]):.3g} at step {t}: "
                    "without momentum a step erases what it would take to undo it. Use Reverse('sqrt')."
                )

    def __call__(self, process: Process) -> Hypergradient:
        bound = process.bound
        with torch.no_grad():
            w, v = bound.start()
            exact = ExactMomentum(bound, w, v, self.fraction_bits)
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

    def __init__(self, bound: Bound, w: State, v: State, fraction_bits: int) -> None:
        self.bound = bound
        self.unit = 2.0**-fraction_bits
        points, self.spec = trees.flatten(w)
        self.dtypes = [point.dtype for point in points]
        self.w = [self._integers(point) for point in points]
        self.v = [self._integers(leaf) for leaf in trees.leaves(v)]
        self.erased = [ErasedDigits(torch.zeros_like(x)) for x in self.v]

    def _integers(self, x: Tensor) -> Tensor:
        scaled = x.double() / self.unit
        if not bool((scaled.abs() < 2.0**62).all()):
            raise DivergenceError(
                f"Reversible holds numbers below {2.0**62 * self.unit:.3g}, and the inner iterates left that range: "
                "they diverge, or fraction_bits is too large for them. Lower the step size, or pass fewer "
                "fraction_bits."
            )
        return scaled.round().to(torch.int64)

    def _floats(self, integers: list[Tensor]) -> list[Tensor]:
        return [(x.double() * self.unit).to(dtype) for x, dtype in zip(integers, self.dtypes, strict=True)]

    def state(self) -> State:
        return self.spec.unflatten(self._floats(self.w)), self.spec.unflatten(self._floats(self.v))

    def _push(self, t: int) -> list[Tensor]:
        """lr·∇L(w) as integers; the same for the same w, whichever way the run goes."""
        w = self.spec.unflatten(self._floats(self.w))
        form = self.bound.dynamics.heavy_ball_form(t)
        assert form is not None
        grads = trees.leaves(gradient(self.bound.loss(t), w))
        rates = [form[0]] * len(grads) if isinstance(form[0], (int, float, Tensor)) else trees.leaves(form[0])
        return [self._integers(rate * g.double()) for rate, g in zip(rates, grads, strict=True)]

    def _momentum(self, t: int) -> float:
        form = self.bound.dynamics.heavy_ball_form(t)
        assert form is not None
        return float(form[1])

    def forward(self, t: int) -> None:
        push, momentum = self._push(t), Ratio(self._momentum(t))
        for i, erased in enumerate(self.erased):
            self.v[i] = momentum.stretch(erased.multiply(self.v[i], momentum, t)) - push[i]
            self.w[i] = self.w[i] + self.v[i]

    def backward(self, t: int) -> None:
        momentum = Ratio(self._momentum(t))
        self.w = [w - v for w, v in zip(self.w, self.v, strict=True)]
        push = self._push(t)
        for i, erased in enumerate(self.erased):
            self.v[i] = erased.divide(momentum.shrink(self.v[i] + push[i]), momentum, t)

    def nbytes(self) -> int:
        return trees.nbytes([self.w, self.v]) + sum(erased.nbytes() for erased in self.erased)


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
        """x + round(k·x), which is one-to-one because it never decreases."""
        return x + self._remainder(x) if self.k else x

    def shrink(self, y: Tensor) -> Tensor:
        """The x with stretch(x) = y."""
        if not self.k:
            return y
        x = y
        for _ in range(16):
            x = y - self._remainder(x)
        # Rounding may leave the iteration one off; strict monotonicity makes the right neighbour unique.
        for candidate in (x - 1, x + 1):
            x = torch.where(self.stretch(x) == y, x, candidate)
        return x


@dataclass
class ErasedDigits:
    """The digits that multiplying by n/d pushes out of an integer, kept in a second integer that never overflows."""

    digits: Tensor
    full: list[Tensor] = field(default_factory=list)
    spilled_at: list[int] = field(default_factory=list)
    bound: int = 0

    def multiply(self, v: Tensor, ratio: Ratio, t: int) -> Tensor:
        """About v·n/d."""
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
        """Exactly what `multiply` was given at step t."""
        self.digits = self.digits * ratio.n + v.remainder(ratio.n)
        v = v.div(ratio.n, rounding_mode="floor") * ratio.d + self.digits.remainder(ratio.d)
        self.digits = self.digits.div(ratio.d, rounding_mode="floor")
        if self.spilled_at and self.spilled_at[-1] == t:
            self.spilled_at.pop()
            self.digits = self.full.pop()
        return v

    def nbytes(self) -> int:
        return trees.nbytes([self.digits, *self.full])
