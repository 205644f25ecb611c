"""`bilevel report`: one HTML page about results and trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bilevel.cli.train import DATA_ROOT


def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|RESULT …]",
            help="Results of `bilevel run`, runs of `bilevel train`, folders of either at any depth, or zoo:NAME. "
            "If not given: everything in results/ and runs/, and in docs/results/ if there is no results/.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file of the page.")] = Path("report.html"),
    episodes: Annotated[int, typer.Option(min=0, help="Meta-test episodes to show of every model.")] = 3,
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "",
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser when it is written.")] = False,
    data_root: DATA_ROOT = None,
) -> None:
    """Write one self-contained HTML page about results and trainings.

    It has the tables with the paper's numbers, curves, test episodes with predictions, filters, certificates and
    configurations. No network is needed to view it. A file that cannot be read is left out, with a note on the page.
    """
    from bilevel.report.page import write

    report = write(what or (), out, episodes=episodes, data_root=data_root, title=title)
    left_out = f", {len(report.warnings)} left out" if report.warnings else ""
    typer.echo(f"{report.results} result(s), {report.runs} run(s) or model(s){left_out}; {report.bytes / 1e6:.1f} MB")
    typer.echo(f"report: {report.path}")
    if show:
        import webbrowser

        webbrowser.open(report.path.absolute().as_uri())
