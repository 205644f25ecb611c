"""The report: RESULTS.md with its pictures, and the tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
from rich.console import Console

from harness.pictures import style
from harness.results import Results
from harness.section import Section
from harness.tables import Table, target_table


def show(results: Results, sections: dict[str, Section], console: Console) -> None:
    measured = [(section, results.figures(name)) for name, section in sections.items() if name in results.sections]
    for table in [_targets(results, sections), *(t for section, figures in measured for t in section.tables(figures))]:
        console.print(table.in_terminal())
        console.print()


def write(results: Results, sections: dict[str, Section]) -> None:
    """Write RESULTS.md: the targets, then every section with its explanation, its machine and its date."""
    body = [
        "# Benchmark results",
        "Written by `python benchmarks/run.py`. Each contestant has one thread, and they take turns, round by round. "
        "All return the same hypergradient: the relative difference is at most 1e-6. For the hyper-representation it "
        "is at most 2e-2, because it is in float32, where rounding changes the sign of some inputs of ReLUs.",
        _targets(results, sections).in_markdown(level=2),
    ]
    for name, section in sections.items():
        if name in results.sections:
            body += _section(results, section)
    (results.folder / "RESULTS.md").write_text("\n\n".join(body) + "\n", encoding="utf-8")


def _targets(results: Results, sections: dict[str, Section]) -> Table:
    measured = ((section, results.figures(name)) for name, section in sections.items() if name in results.sections)
    return target_table(target for section, figures in measured for target in section.targets(figures))


def _section(results: Results, section: Section) -> Iterator[str]:
    figures = results.figures(section.name)
    yield f"## {section.title}"
    yield section.what
    yield f"Measured {figures.origin}."
    yield from (table.in_markdown() for table in section.tables(figures))
    with style():
        for picture in section.pictures(figures):
            picture.figure.savefig(results.folder / picture.name)
            plt.close(picture.figure)
            yield f"![{picture.caption}]({picture.name})"
