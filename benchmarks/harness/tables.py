"""Tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table as RichTable

from harness.figures import baseline, size_of
from harness.targets import Target
from harness.timing import Ratio, Timing


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading. The first column is left-aligned, the others are right-aligned."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def in_terminal(self) -> RichTable:
        table = RichTable(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            style = {"yes": "green", "no": "red", "no, within noise": "yellow"}.get(row[-1])
            table.add_row(*row[:-1], f"[{style}]{row[-1]}[/]" if style else row[-1])
        return table

    def in_markdown(self, level: int = 3) -> str:
        head = [" | ".join(self.columns), " | ".join(["---", *["---:"] * (len(self.columns) - 1)])]
        lines = [f"| {line} |" for line in [*head, *(" | ".join(row) for row in self.rows)]]
        return "\n".join([f"{'#' * level} {self.title}", "", *lines, *(["", self.note] if self.note else [])])


def target_table(targets: Iterable[Target]) -> Table:
    """The table of all targets. Under it are the notes of the targets that this machine cannot reach."""
    targets = list(targets)
    rows = [[t.claim, t.case, t.figure, t.wanted, t.reached] for t in targets]
    notes = [f"{t.claim} ({t.case}): {t.limit_note}" for t in targets if t.limit_note]
    return Table("Targets", ["claim", "case", "measured", "target", "reached"], rows, "\n\n".join(notes))


def case_table(case: str, timings: list[Timing]) -> Table:
    """The times of all contestants on one case, the fastest first."""
    base = baseline(timings)
    rows = []
    for timing in sorted(timings, key=lambda t: t.minimum if t.rounds else float("inf")):
        if not timing.rounds:
            rows.append([timing.label, "–", "–", "–", timing.unavailable or "–"])
            continue
        ratio = str(Ratio.of(timing, base)) if base else "–"
        rows.append(
            [timing.label, milliseconds(timing.minimum), milliseconds(timing.median), ratio, f"{timing.first:.2f} s"]
        )
    note = (
        f"Ratio: time relative to {base.label}, median over rounds (10 % to 90 % quantile). First call: includes "
        "preparation and compilation."
        if base
        else ""
    )
    versions = {name: version for timing in timings for name, version in timing.versions.items() if name != "numpy"}
    note += (
        " Peers: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + "."
        if versions
        else ""
    )
    return Table(case, ["contestant", "minimum, ms", "median, ms", "ratio", "first call"], rows, note)


def scaling_table(title: str, name: str, timings: list[Timing]) -> Table:
    """The best times by size. The size is at the end of the name of a case."""
    sizes = sorted({size_of(timing) for timing in timings})
    rows = []
    for label in dict.fromkeys(timing.label for timing in timings):
        mine = {size_of(timing): timing for timing in timings if timing.label == label}
        rows.append([label, *(milliseconds(mine[s].minimum) if s in mine and mine[s].rounds else "–" for s in sizes)])
    return Table(title, ["ms, minimum", *(f"{name} {size:,}" for size in sizes)], rows)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
