"""Which step size of a single-loop algorithm is too large, where its directions grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bilevel.algorithms.step_sizes import Probe
from bilevel.errors import BilevelError

# Where the directions are longer than the first ones by this factor, the step sizes are compared with their bounds.
GROWTH = 1e6


@dataclass(frozen=True)
class Bounds:
    """The bounds on the step sizes.

    Attributes:
        nu: the largest curvature of L on a batch at the start.
        here: the same at the last λ, on one batch.
        outer: the largest stable step of λ as estimated at the start; ∞ if f has no curvature there.
    """

    nu: float
    here: float
    outer: float

    @classmethod
    def of(cls, probe: Probe, nu: float, lam: Tensor, outer_step: Callable[[], float]) -> Bounds:
        """The bounds at the start, where the probe is, and at λ. `outer_step` is half of the largest stable one."""
        try:
            outer = 2 * outer_step()
        except BilevelError:
            outer = math.inf
        return cls(nu, probe.steepness(lam), outer)

    def broken(self, inner: float, outer: float, last: float) -> str | None:
        """What lies above which bound, with advice; None if nothing does. `last` is the last step size of w."""
        if inner * self.nu >= 2:
            return (
                f"inner_lr = {inner:.3g} lies above 2/ν = {2 / self.nu:.3g}, where ν = {self.nu:.3g} is the largest "
                "curvature of the inner objective on a batch at the start. Pass a smaller inner_lr, or leave it out."
            )
        if outer > self.outer:
            return f"outer_lr = {outer:.3g} lies above {self._stable} {self._advice}"
        if last * self.here >= 2:
            return (
                f"inner_lr = {last:.3g} lies above 2/ν = {2 / self.here:.3g}, where ν = {self.here:.3g} is the largest "
                f"curvature of the inner objective at the last λ; at the start it was {self.nu:.3g}. Pass a smaller "
                "outer_lr, or a constraint that keeps λ from there; or leave both step sizes out, and they follow λ."
            )
        return None

    def kept(self, outer: float) -> str:
        """The sentence for step sizes that lie below their bounds."""
        if math.isinf(self.outer):
            return f"outer_lr = {outer:.3g} has no known bound, because f has no curvature at the start; {self._advice}"
        return f"outer_lr = {outer:.3g} does not lie above {self._stable} {self._advice}"

    @property
    def _stable(self) -> str:
        return f"{self.outer:.3g}, the largest stable step of λ as estimated at the start;"

    @property
    def _advice(self) -> str:
        return (
            "inner_lr lies below its limit 2/ν there. Pass a smaller outer_lr, a constraint that keeps λ where the "
            "curvature is like that, or a smaller inner_lr."
        )
