"""The tables: once for the terminal, once as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from harness.cases import EPISODES, QUERIES, SHOTS, WAYS
from harness.results import Results, baseline
from harness.targets import size_of, targets
from harness.timing import Ratio, Timing

PICTURES = {
    "ratios.png": "Time of each contestant against the fastest torch peer",
    "memory.png": "Peak memory against T",
    "time.png": "Time against T and against the size of λ",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column is left-aligned, the others right."""

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

    def in_markdown(self) -> str:
        head = [" | ".join(self.columns), " | ".join(["---", *["---:"] * (len(self.columns) - 1)])]
        lines = [f"| {line} |" for line in [*head, *(" | ".join(row) for row in self.rows)]]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.note] if self.note else [])])


def tables(results: Results) -> Iterator[Table]:
    yield _targets(results)
    for case, timings in results.by_case("ridge", "network", "hyper").items():
        yield _speed(case, timings)
    if results.ranks():
        yield _ranks(results)
    if results.memory():
        yield _memory(results)
    for key, title, name in (
        ("steps", "Time against T (ridge)", "T ="),
        ("lam", "Time against the size of λ (w has 4,096 numbers, T = 10)", "λ:"),
    ):
        if timings := results.timings("scaling", key):
            yield _scaling(title, name, timings)


def _targets(results: Results) -> Table:
    rows = [[t.claim, t.section, t.figure, t.wanted, t.reached] for t in targets(results)]
    return Table("Targets", ["claim", "case", "measured", "target", "reached"], rows)


def _speed(case: str, timings: list[Timing]) -> Table:
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
        f"Ratio: against {base.label}, median over rounds (10 % to 90 %). First call: preparation and compilation."
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


def _memory(results: Results) -> Table:
    figures = results.memory()
    times = sorted({figure.steps for figure in figures})
    rows = []
    for method in dict.fromkeys(figure.method for figure in figures):
        mine = {figure.steps: figure for figure in figures if figure.method == method}
        cells = [f"{mine[t].rss / 1e6:.1f} / {mine[t].stats / 1e6:.2f}" if t in mine else "–" for t in times]
        rows.append([method, *cells, f"{mine[times[-1]].seconds:.2f} s" if times[-1] in mine else "–"])
    note = (
        "MB: growth of the resident memory over a run with T = 3 / what the method says it kept (`stats.peak_memory`). "
        "Heavy ball, one λ for each layer."
    )
    return Table(
        "Peak memory against T (network)",
        ["method", *(f"T = {t}" for t in times), f"time at T = {times[-1]}"],
        rows,
        note,
    )


def _ranks(results: Results) -> Table:
    figures = results.ranks()
    images = EPISODES * WAYS * (SHOTS + QUERIES)
    rows = [
        [str(f.ranks), milliseconds(f.seconds), f"{images / f.seconds:,.0f}", f"{figures[0].seconds / f.seconds:.2f}"]
        for f in figures
    ]
    note = (
        f"{EPISODES} episodes of {results.sections['hyper']['dataset']} in all, T = 5, one thread for each process "
        "(torchrun, gloo); the update of λ and the sampling are included."
    )
    columns = ["processes", "hyperiteration, ms", "images per second", "speed-up"]
    return Table("Training by several processes", columns, rows, note)


def _scaling(title: str, name: str, timings: list[Timing]) -> Table:
    sizes = sorted({size_of(timing) for timing in timings})
    rows = []
    for label in dict.fromkeys(timing.label for timing in timings):
        mine = {size_of(timing): timing for timing in timings if timing.label == label}
        rows.append([label, *(milliseconds(mine[s].minimum) if s in mine and mine[s].rounds else "–" for s in sizes)])
    return Table(title, ["ms, minimum", *(f"{name} {size:,}" for size in sizes)], rows)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def show(results: Results, console: Console) -> None:
    for table in tables(results):
        console.print(table.in_terminal())
        console.print()


def write_markdown(results: Results) -> None:
    """RESULTS.md: the tables, the pictures, and where and when each section was measured."""
    origin = []
    for name, section in results.sections.items():
        m = section["machine"]
        kind = "quick run, figures are rough" if section["quick"] else "full run"
        place = f"{m['cpu']}, {m['cores']} cores, Python {m['python']}, torch {m['torch']}"
        origin.append(f"- {name}: {m['date']}, {place}; {kind}, commit {m.get('commit', 'unknown')}, load {m['load']}")
    pictures = [f"![{caption}]({name})" for name, caption in PICTURES.items() if (results.folder / name).exists()]
    body = [
        "# Benchmark results",
        "Made by `python benchmarks/run.py`. One thread each; contestants take turns, round by round; all return the "
        "same hypergradient (relative 1e-6; the hyper-representation is in float32, where ReLUs leave 2e-2).",
        "\n".join(origin),
        *(table.in_markdown() for table in tables(results)),
        *pictures,
    ]
    (results.folder / "RESULTS.md").write_text("\n\n".join(body) + "\n", encoding="utf-8")
