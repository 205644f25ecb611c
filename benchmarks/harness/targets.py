"""The targets of the package, and whether the figures reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.figures import size_of
from harness.timing import Ratio, Timing


@dataclass(frozen=True)
class Target:
    """One claim: `value` is at most `limit`, or at least `limit` if `at_least` is true.

    Args:
        case: the section or the case that the claim is about.
        value: the measured number. None if it was not measured.
        figure: the value as text.
        low, high: the spread of the value, if it is known.
        limit_note: a sentence under the table, for a limit that this machine cannot reach.
    """

    claim: str
    case: str
    value: float | None
    limit: float
    figure: str
    at_least: bool = False
    low: float | None = None
    high: float | None = None
    limit_note: str = ""

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.3g}"

    @property
    def reached(self) -> str:
        """Yes or no. A no is "within noise" if the limit lies within the spread over the rounds."""
        if self.value is None:
            return "not measured"
        if self.value >= self.limit if self.at_least else self.value <= self.limit:
            return "yes"
        best = self.high if self.at_least else self.low
        near = best is not None and (best >= self.limit if self.at_least else best <= self.limit)
        return "no, within noise" if near else "no"


def ratio(
    claim: str,
    case: str,
    one: Timing | None,
    other: Timing | None,
    limit: float,
    at_least: bool = False,
    limit_note: str = "",
) -> Target:
    """A target for the ratio of two contestants' times, `one` over `other`."""
    if one is None or other is None or not one.rounds or not other.rounds:
        absent = next((t.unavailable for t in (one, other) if t is not None and t.unavailable), "not measured")
        return Target(claim, case, None, limit, absent, at_least, limit_note=limit_note)
    found = Ratio.of(one, other)
    words = f"{found} against {other.label}"
    return Target(claim, case, found.value, limit, words, at_least, found.low, found.high, limit_note)


def exponent(claim: str, case: str, points: Sequence[tuple[int, float]], limit: float) -> Target:
    """A target for the exponent s in time ∝ size^s.

    s is computed from the smallest size to the largest and over the last interval. The larger of the two counts.
    """
    if len(points) < 2:
        return Target(claim, case, None, limit, "not measured")
    sizes, seconds = np.log(np.array(sorted(points))).T
    whole, last = ((seconds[-1] - seconds[i]) / (sizes[-1] - sizes[i]) for i in (0, -2))
    return Target(claim, case, float(max(whole, last)), limit, f"{whole:.2f}, at the end {last:.2f}")


def points_of(timings: Sequence[Timing], contestant: str) -> list[tuple[int, float]]:
    """The sizes and best times of one contestant, for `exponent`."""
    return [(size_of(t), t.minimum) for t in timings if t.contestant == contestant and t.rounds]
