"""The sections of `sections/`, and the object with which they measure."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import sections
from harness.contract import Case
from harness.figures import Figures
from harness.pictures import Picture
from harness.pool import Pool, Tick
from harness.tables import Table
from harness.targets import Target
from harness.timing import measure

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """The argument of a section's `measure`.

    Args:
        quick: measure rough figures in seconds instead of good figures in minutes.
        folder: a folder for the files of workers and probes.
        tick: called with what was done and its share of the section, for the progress bar. The shares add up to 1.
    """

    pool: Pool
    quick: bool
    folder: Path
    tick: Tick

    def pick(self, *, quick: T, full: T) -> T:
        """The first value in a quick run, the second in a full run."""
        return quick if self.quick else full

    def share(self, part: float) -> Bench:
        """The same object for a part of the section. Its progress is multiplied by `part`."""
        return replace(self, tick=lambda what, amount: self.tick(what, amount * part))

    def timed(
        self, cases: Sequence[Case], contestants: Iterable[str] | None = None, most_rounds: int = 25
    ) -> list[dict[str, Any]]:
        """The times of all contestants that enter the cases, or of the named ones only. They take turns."""
        names = None if contestants is None else set(contestants)
        workers = self.pool.of(cases, names, self.tick)
        rounds, budget = self.pick(quick=(5, 0.03), full=(25, 0.1))
        timings = measure(workers, cases, self.folder, min(rounds, most_rounds), budget, self.tick)
        return [timing.as_json() for timing in [*timings, *self.pool.missing(cases, names)]]


@dataclass(frozen=True)
class Section:
    """A file of `sections/`."""

    name: str
    order: int
    title: str
    what: str
    measure: Callable[[Bench], dict[str, Any]]
    targets: Callable[[Figures], Iterable[Target]]
    tables: Callable[[Figures], Iterable[Table]]
    pictures: Callable[[Figures], Iterable[Picture]]

    @staticmethod
    def of(module: ModuleType) -> Section:
        def optional(function: str) -> Callable[[Figures], Iterable[Any]]:
            return getattr(module, function, lambda figures: ())

        return Section(
            module.__name__.rsplit(".", 1)[1],
            module.ORDER,
            module.TITLE,
            " ".join(module.WHAT.split()),
            module.measure,
            optional("targets"),
            optional("tables"),
            optional("pictures"),
        )


def find() -> dict[str, Section]:
    """The sections by name, in the order in which they are measured and shown."""
    names = [module.name for module in pkgutil.iter_modules(sections.__path__) if not module.name.startswith("_")]
    found = [Section.of(importlib.import_module(f"sections.{name}")) for name in names]
    return {section.name: section for section in sorted(found, key=lambda section: (section.order, section.name))}
