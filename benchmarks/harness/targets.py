"""What the package set out to reach, held against the figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.memory import Memory
from harness.results import Results, baseline, fastest
from harness.timing import Ratio, Timing


@dataclass(frozen=True)
class Target:
    """One claim: `value` should be at most `limit` (at least, with `at_least`). `figure` is the value in words."""

    claim: str
    section: str
    value: float | None
    limit: float
    figure: str
    at_least: bool = False
    low: float | None = None

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.3g}"

    @property
    def reached(self) -> str:
        """Yes or no; a no whose spread over the rounds reaches across the limit is said to be within the noise."""
        if self.value is None:
            return "not measured"
        if self.value >= self.limit if self.at_least else self.value <= self.limit:
            return "yes"
        return "no, within noise" if not self.at_least and self.low is not None and self.low <= self.limit else "no"


def targets(results: Results) -> list[Target]:
    return [*_speed(results), *_memory(results.memory()), *_scaling(results), *_hyper(results)]


def _ratio(
    claim: str, section: str, one: Timing | None, other: Timing | None, limit: float, at_least: bool = False
) -> Target:
    if one is None or other is None or not one.rounds or not other.rounds:
        absent = next((t.unavailable for t in (one, other) if t is not None and t.unavailable), "not measured")
        return Target(claim, section, None, limit, absent, at_least)
    ratio = Ratio.of(one, other)
    return Target(claim, section, ratio.value, limit, f"{ratio} against {other.label}", at_least, ratio.low)


def _speed(results: Results) -> Iterator[Target]:
    cases = results.by_case("ridge", "network")
    peer = next((t for t in cases.get("ridge-T50", []) if t.contestant == "jaxopt"), None)
    for case, timings in cases.items():
        named = {timing.contestant: timing for timing in timings}
        if case.startswith("ridge"):
            fast = named.get("bilevel_spectral_compiled")
            yield _ratio("compiled Spectral within 3 times jaxopt at T = 50", case, fast, peer, 3.0)
        unrolled, reverse = named.get("bilevel_unrolled"), named.get("bilevel_reverse")
        yield _ratio("Unrolled no slower than the fastest torch peer", case, unrolled, baseline(timings), 1.0)
        yield _ratio("Reverse within 1.6 times Unrolled", case, reverse, unrolled, 1.6)
        if case == "ridge-T250":
            yield _ratio(
                "compiled Reverse at least 4 times faster than eager",
                case,
                reverse,
                named.get("bilevel_reverse_compiled"),
                4.0,
                at_least=True,
            )


def _memory(figures: list[Memory]) -> Iterator[Target]:
    at = {figure.method: figure for figure in figures if figure.steps == 1000}

    def share(claim: str, one: str, other: str, field: str, limit: float) -> Target:
        if one not in at or other not in at:
            return Target(claim, "memory", None, limit, "needs T = 1000, a full run")
        a, b = getattr(at[one], field), getattr(at[other], field)
        return Target(claim, "memory", a / b, limit, f"{a / 1e6:.2f} of {b / 1e6:.1f} MB: 1/{b / max(a, 1):.0f}")

    yield share("Reverse('sqrt') at most 1/8 of Unrolled's peak, T = 1000", "Reverse('sqrt')", "Unrolled", "rss", 1 / 8)
    yield share("Reversible at most 1/20 of Reverse's iterates, T = 1000", "Reversible", "Reverse", "stats", 1 / 20)
    yield share("the same, as resident memory", "Reversible", "Reverse", "rss", 1 / 20)


def _scaling(results: Results) -> Iterator[Target]:
    steps, lam = results.timings("scaling", "steps"), results.timings("scaling", "lam")
    peer = next((t for t in steps if t.contestant == "jaxopt" and t.steps == 50), None)
    spectral = [t for t in steps if t.contestant == "bilevel_spectral" and t.rounds]
    slowest = max(spectral, key=lambda t: t.minimum, default=None)
    where = f"T = {slowest.steps}" if slowest else "any T"
    yield _ratio(f"Spectral at its slowest ({where}) within 3 times jaxopt at T = 50", "scaling", slowest, peer, 3.0)
    yield _power("Spectral flat in T: exponent", steps, "bilevel_spectral", 0.1)
    yield _power("Reverse linear in T: exponent", steps, "bilevel_reverse", 1.1)
    yield _power("Reverse flat in the size of λ: exponent", lam, "bilevel_reverse", 0.1)
    yield _power("Forward at most linear in the size of λ: exponent", lam, "bilevel_forward", 1.1)


def _hyper(results: Results) -> Iterator[Target]:
    for case, timings in results.by_case("hyper").items():
        named = {timing.contestant: timing for timing in timings}
        ours, limit = named.get("hyper_bilevel"), {5: 1.15, 50: 1.35}[timings[0].steps]
        for floor, whose in (("hyper_floor", "the plain module"), ("hyper_floor_bilevel", "our own h")):
            yield _ratio(f"within {limit} times a pass of {whose}", case, ours, named.get(floor), limit)
        if case == "hyper-T5":
            peer = fastest(timings, lambda t: t.group == "torch peer")
            yield _ratio("at least 1.3 times faster than the fastest torch peer", case, peer, ours, 1.3, at_least=True)
    for alone in (figure for figure in results.ranks() if figure.ranks == 1):
        share = alone.sampling / alone.seconds
        figure = f"{alone.sampling * 1e3:.2f} of {alone.seconds * 1e3:.0f} ms"
        yield Target("sampling under 3 % of a hyperiteration", "hyper", share, 0.03, figure)


def _power(claim: str, timings: list[Timing], contestant: str, limit: float) -> Target:
    """The s of time ∝ size^s, from the smallest size to the largest or over the last interval, whichever is larger."""
    points = [(size_of(t), t.minimum) for t in timings if t.contestant == contestant and t.rounds]
    if len(points) < 2:
        return Target(claim, "scaling", None, limit, "not measured")
    sizes, seconds = np.log(np.array(sorted(points))).T
    whole, last = ((seconds[-1] - seconds[i]) / (sizes[-1] - sizes[i]) for i in (0, -2))
    return Target(claim, "scaling", float(max(whole, last)), limit, f"{whole:.2f}, at the end {last:.2f}")


def size_of(timing: Timing) -> int:
    """What is varied in a scaling case: T, or the size of λ."""
    return int(timing.case.rsplit("-", 1)[1].removeprefix("T"))
