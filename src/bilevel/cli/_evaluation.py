"""What `bilevel evaluate` does; apart, because it needs torch."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from bilevel.meta import library
from bilevel.meta.evaluation import Score, choose_and_test
from bilevel.meta.settings import Settings
from bilevel.meta.training import episodes as stream
from bilevel.meta.training import open_data
from bilevel.models.batch_norm import MEANING
from bilevel.origin import commit
from bilevel.progress import bar


def evaluate(
    spec: str,
    count: int,
    first: int,
    last: int,
    changes: dict[str, int],
    batch_norm: str | None,
    seed: int | None,
    data_root: Path | None,
    threads: int | None,
    save: Path | None,
) -> dict[str, Any]:
    """The numbers, in JSON's types."""
    if threads is not None:
        torch.set_num_threads(threads)
    found = library.find(spec, batch_norm)
    data = open_data(found.settings, data_root)
    found.check_data(data)
    settings = replace(found.settings, **changes)  # type: ignore[arg-type]
    tried = range(first, last + 1)
    val, test = (stream(settings, data, split, seed) for split in ("val", "test"))
    with bar("episodes", 2 * count) if sys.stderr.isatty() else nullcontext(lambda done: None) as report:
        final = choose_and_test(found.learner, val, test, count, tried, report)
    result = {
        "model": spec,
        "data": settings.dataset,
        "ways": settings.ways,
        "shots": settings.shots,
        "queries": settings.queries,
        "episodes": count,
        "batch_norm": settings.batch_norm,
        "inner_lr": found.learner.inner_lr,
        "validation": [_line(t, final.validation) for t in tried],
        "steps": final.steps,
        "test": _line(final.steps, final.test),
    }
    if save is not None:
        found.learner.steps = final.steps
        found.learner.save(
            save,
            {**_card(found, settings, data.fingerprint), "score": {k: v for k, v in result.items() if k != "model"}},
        )
    return result


def _card(found: library.Trained, judged: Settings, fingerprint: str) -> dict[str, Any]:
    """What the weights are and how they came to be; the settings are those they were judged with."""
    known = ("command", "preset", "initial", "training", "weights", "curve")
    return {
        # Where the training began is told under "initial"; a path would mean nothing elsewhere.
        "settings": replace(judged, initial="").plain(),
        "trained_with": {name: getattr(found.settings, name) for name in ("ways", "shots", "queries")},
        "data": {"name": found.settings.dataset, "fingerprint": fingerprint},
        **{key: found.card[key] for key in known if key in found.card},
        "trained_at_commit": found.card.get("commit"),
        "commit": commit(),
    }


def _line(steps: int, score: Score) -> dict[str, Any]:
    return {"steps": steps, "accuracy": score.means[steps - 1], "interval": score.intervals[steps - 1]}


def show(result: dict[str, Any]) -> None:
    """The same for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("T", "meta-validation", "± 95 %"):
        table.add_column(column, justify="right")
    for line in result["validation"]:
        mark = " ← best" if line["steps"] == result["steps"] else ""
        table.add_row(f"{line['steps']}", f"{line['accuracy']:.2%}", f"{line['interval']:.2%}{mark}")
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    test = result["test"]
    typer.echo(
        f"Meta-test accuracy {test['accuracy']:.2%} ± {test['interval']:.2%} with T = {test['steps']}, chosen on "
        f"meta-validation.\n{result['data']}, {result['ways']}-way {result['shots']}-shot, {result['queries']} queries "
        f"a class disjoint from the support set, {result['episodes']} episodes each.\n"
        f"Batch norm: {result['batch_norm']}, {MEANING[result['batch_norm']]}."
    )
