"""The stored figures of one section. All tables and pictures are computed from these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from harness.timing import Timing

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a section's `measure` returned, in this run or in an earlier one, with the machine and the date."""

    stored: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.stored[key]

    def rows(self, kind: type[Row], key: str) -> list[Row]:
        """A list of dataclasses, each stored as a dict. Keys that are no fields of the class are ignored."""
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        return [kind(**{k: v for k, v in row.items() if k in known}) for row in self.stored.get(key, [])]

    def timings(self, key: str = "timings") -> list[Timing]:
        return self.rows(Timing, key)

    def by_case(self, key: str = "timings") -> dict[str, list[Timing]]:
        """The timings by case."""
        found: dict[str, list[Timing]] = {}
        for timing in self.timings(key):
            found.setdefault(timing.case, []).append(timing)
        return found

    def named(self, case: str, key: str = "timings") -> dict[str, Timing]:
        """The timings of one case by the name of the contestant."""
        return {timing.contestant: timing for timing in self.by_case(key).get(case, [])}

    @property
    def origin(self) -> str:
        """The date, the machine and the commit of the measurement."""
        m = self["machine"]
        kind = "quick run, figures are rough" if self["quick"] else "full run"
        place = f"{m['cpu']}, {m['cores']} cores, Python {m['python']}, torch {m['torch']}"
        return f"{m['date']}, {place}; {kind}, commit {m.get('commit', 'unknown')}, load {m['load']}"


def fastest(timings: list[Timing], belongs: Callable[[Timing], bool]) -> Timing | None:
    """The fastest contestant that was timed and for which `belongs` is true."""
    return min((t for t in timings if t.rounds and belongs(t)), key=lambda t: t.minimum, default=None)


def baseline(timings: list[Timing]) -> Timing | None:
    """The denominator of ratios: the fastest torch peer, or the loop by hand if no peer could be installed."""
    return fastest(timings, lambda t: t.group == "torch peer") or fastest(timings, lambda t: t.group == "by hand")


def size_of(timing: Timing) -> int:
    """The number at the end of the name of a scaling case: T, the size of λ or the number of episodes."""
    return int(timing.case.rsplit("-", 1)[1].lstrip("T"))
