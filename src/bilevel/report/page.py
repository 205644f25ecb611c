"""Write the page: results and runs, rendered by the templates into one HTML file."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import bilevel
from bilevel.data.pictures import data_url
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.files import write_bytes
from bilevel.learners.library import stages_of
from bilevel.learners.settings import TrainingSettings
from bilevel.models.batch_norm import MEANING
from bilevel.progress import counter
from bilevel.report.curves import RunCurves, curves, figures
from bilevel.report.formatting import labels, minutes, slug, task_name
from bilevel.report.models import Model, Reader
from bilevel.report.read import FoundResult, FoundRun, ReportSources, gather
from bilevel.report.templating import inlined, template

KNOWN = ("accuracy", "interval")  # of a card's score on meta-test
HELP = {f.name: f.metadata["help"] for f in fields(TrainingSettings)}
NUMBER = re.compile(r"^[≤≥<>~]?\s*[+−-]?\d[\d.,]*(e[+-]?\d+)?\s*%?(\s*(±|\[|\().*)?$")


@dataclass(frozen=True)
class Report:
    """What was written."""

    path: Path
    bytes: int
    results: int
    runs: int
    warnings: list[str]


def write(
    specs: Sequence[str | Path] = (),
    out: Path | str = "report.html",
    *,
    episodes: int = 3,
    data_root: Path | None = None,
    title: str = "",
    progress: bool | None = None,
) -> Report:
    """Write the page about results and runs to one file that needs no other.

    Args:
        specs: results, runs, folders of them, `zoo:NAME`; everything in `results/` and `runs/` if there are none.
        out: the file; replaced as a whole if it exists.
        episodes: meta-test episodes of each model; with 0 no data set is opened.
        data_root: where the data are; by default the environment variable BILEVEL_DATA, else a user folder.
        title: the page's heading.
        progress: show a bar; None shows one on a terminal, and a line a minute elsewhere.

    Warns:
        BilevelWarning: for every file that cannot be read; the page is written without it and says so too.
    """
    if episodes < 0:
        raise BilevelError(f"episodes={episodes} is negative; pass 0 to leave them out.")
    path = Path(out)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BilevelError(f"{path} cannot be written: pass a file in a folder that exists, with --out FILE.")
    found = gather(specs)
    models = _models(found, Reader(episodes, data_root), progress)
    content = render(found, models, title or "Results and trainings").encode(errors="replace")
    write_bytes(path, content)
    for sentence in found.warnings:
        warnings.warn(sentence, BilevelWarning, stacklevel=2)
    return Report(path, len(content), len(found.results), len(found.runs), found.warnings)


def _models(found: ReportSources, reader: Reader, progress: bool | None) -> list[Model | None]:
    models: list[Model | None] = []
    with counter("models", len(found.runs), progress if found.runs else False) as begin:
        for run in found.runs:
            begin(run.spec)
            try:
                models.append(reader.read(run) if run.config else None)
            except Exception as error:  # a folder may hold anything; the page is written without it
                models.append(None)
                kind = "" if isinstance(error, BilevelError) else f"{type(error).__name__}: "
                found.warnings.append(f"{run.spec}: no episodes, filters and certificates. {kind}{error}")
    return models


def render(found: ReportSources, models: Sequence[Model | None], title: str) -> str:
    """The page as text."""
    from markupsafe import Markup

    offline: Any = import_module("plotly.offline")
    names = labels([run.spec for run in found.runs], [run.owner is not None for run in found.runs])
    drawn = [curves(run) for run in found.runs]
    ids = _ids(found.results)
    runs = [
        _run(run, number, names[number], drawn[number], models[number], ids) for number, run in enumerate(found.runs)
    ]
    shown = [i for i, curve in enumerate(drawn) if not curve.empty]
    charts = figures([(names[i], drawn[i]) for i in shown])
    for order, i in enumerate(shown):
        runs[i]["trace"] = order
    page = template(
        "page.html.j2",
        percent=lambda x: f"{100 * x:.1f}\N{NO-BREAK SPACE}%",
        percent2=lambda x: f"{100 * x:.2f}\N{NO-BREAK SPACE}%",
        minutes=minutes,
    )
    return page.render(
        title=title,
        version=bilevel.__version__,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        style=inlined("style.css"),
        script=inlined("theme.js", "page.js"),
        # Only where there is something to draw: it is by far the largest part of the page.
        plotly=Markup(offline.get_plotlyjs()) if shown else "",
        landing=_landing(found, shown, models),
        results=[_result(result, ids[result.file]) for result in found.results],
        runs=runs,
        charts=charts,
        warnings=found.warnings,
        help=HELP,
        meaning=MEANING,
    )


def _landing(found: ReportSources, curves: Sequence[int], models: Sequence[Model | None]) -> str:
    """The part of the page that is shown first: the first one that holds something."""
    if found.results:
        return "results"
    if curves:
        return "training"
    known = [model for model in models if model is not None]
    if known:
        return "episodes" if any(model.episodes for model in known) else "filters"
    return "configuration"


def _result(result: FoundResult, anchor: str) -> dict[str, Any]:
    return {
        **result.fields,
        "id": anchor,
        "folder": str(result.file.parent),
        "tables": [{**table, "kinds": _kinds(table)} for table in result.fields["tables"]],
        "shown": {name: data_url(content) for name, content in result.pictures.items()},
    }


def _kinds(table: dict[str, Any]) -> list[str]:
    """The kind of every column, for its alignment: sentences, numbers or words."""
    columns = zip(*table["rows"], strict=True) if table["rows"] else [()] * len(table["columns"])
    return [
        "prose" if name in table["prose"] else "number" if _numeric(cells) else "words"
        for name, cells in zip(table["columns"], columns, strict=True)
    ]


def _numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell.strip(" –-")]
    return bool(filled) and 2 * sum(bool(NUMBER.match(cell)) for cell in filled) > len(filled)


def _run(
    run: FoundRun, number: int, name: str, curve: RunCurves, model: Model | None, ids: dict[Path, str]
) -> dict[str, Any]:
    config, validations = run.config, [line for line in run.metrics if "score" in line]
    best = max(validations, key=lambda line: (line["score"], -line["iteration"]), default=None)
    speeds = [line["images_per_second"] for line in run.metrics if "images_per_second" in line]
    card = config.get("score")
    test = card.get("test") if isinstance(card, dict) else None
    return {
        "name": name,
        "spec": run.spec,
        "id": f"run-{number + 1}-{slug(name)}",
        "config": config,
        "settings": run.settings,
        "task": task_name(run.settings),
        "owner": None if run.owner is None else {"id": ids[run.owner.file], **run.owner.fields},
        "trace": None if curve.empty else 0,
        "done": max((line["iteration"] for line in run.metrics), default=None),
        "best": best,
        "minutes": max((line["minutes"] for line in validations if "minutes" in line), default=None),
        "speed": sorted(speeds)[len(speeds) // 2] if speeds else None,
        "test": test if isinstance(test, dict) and all(type(test.get(key)) in (int, float) for key in KNOWN) else None,
        "model": model,
        "verdict": "" if model is None else model.verdict(),
        "command": command(run),
        # The commands of the trainings that the first weights came from, the last one first.
        "before": [stage["command"] for stage in stages_of(config)[-2::-1] if isinstance(stage["command"], str)],
        "facts": _facts(run, model),
    }


def _facts(run: FoundRun, model: Model | None) -> dict[str, Any]:
    """Where a run comes from, without its settings; what is not known is left out."""
    config = run.config
    data: Any = config.get("data") if isinstance(config.get("data"), dict) else {}
    training = model.trained.card.get("training") if model is not None else None
    facts = {
        "folder or model": run.spec,
        "preset": config.get("preset"),
        "commit": config.get("trained_at_commit") or config.get("commit"),
        "bilevel": config.get("bilevel"),
        "threads": config.get("threads"),
        "data": data.get("name"),
        "data fingerprint": data.get("fingerprint"),
        "weights from hyperiteration": training.get("hyperiterations") if isinstance(training, dict) else None,
        "time to get there": minutes(training.get("minutes")) if isinstance(training, dict) else None,
    }
    if model is not None:
        learner = model.trained.learner
        facts["numbers in λ"] = sum(leaf.numel() for leaf in learner.lam.values())
        facts["inner steps T in use"] = learner.steps if learner.has_steps else None
    return {name: value for name, value in facts.items() if value is not None}


def command(run: FoundRun) -> str:
    """The command that repeats a run: that of the result it belongs to, or its own."""
    if run.owner is not None:
        return run.owner.fields["command"]
    own = run.config.get("command")
    return own if isinstance(own, str) else ""


def _ids(results: Sequence[FoundResult]) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for result in results:
        name = f"result-{slug(result.experiment)}"
        found[result.file] = name if name not in found.values() else f"{name}-{len(found) + 1}"
    return found
