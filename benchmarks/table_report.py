"""The report of `benchmarks/tables.py`: ranks, the best rival of every table, and the sparse models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDS = 5
# A rival is ranked if it was measured on at least this fraction of the tables. A table is left out of the ranks if a
# ranked rival was not measured on it.
RANKED_FRACTION = 0.75
DEFAULT, CONSTANT = "BilevelAdditive", "constant"
CLOSE = 1.02  # "within 2 % of the best rival's error"
NOISE = 2.0  # a difference beyond this many standard errors is "beyond noise"
SLOW = ("EBM", "pyGAM")  # measured on the first fold only
SPARSE = (
    ("BilevelLasso", "LassoCV"),
    ("BilevelLasso, shared", "LassoCV"),
    ("BilevelElasticNet", "ElasticNetCV"),
    ("BilevelLasso", "ElasticNetCV"),
)

Row = dict[str, Any]
# By table and model: the mean error, the median seconds, the reason of a failure, the task and the size of the table.
Measured = dict[str, dict[str, dict[str, Any]]]


def of_first_folds(rows: list[Row], folds: int) -> list[Row]:
    """The results on the first folds of every repeat. Results on fewer folds are left out."""
    found = []
    for row in rows:
        if "failed" in row and row.get("folds", FOLDS) >= folds:
            found.append(row)
        elif len(row.get("errors", [])) >= folds:
            found.append({**row, "errors": row["errors"][:folds], "seconds": row["seconds"][:folds]})
    return found


def by_table(rows: list[Row]) -> Measured:
    """The mean error and the median seconds of every model, by table. A failed model has the error of the constant."""
    gathered: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        gathered[row["table"]][row["model"]].append(row)
    found: Measured = {}
    for table, models in gathered.items():
        found[table] = {}
        for model, entries in models.items():
            done = [entry for entry in entries if "errors" in entry]
            found[table][model] = {
                "error": float(np.mean([e for entry in done for e in entry["errors"]])) if done else 1.0,
                "seconds": float(np.median([s for entry in done for s in entry["seconds"]])) if done else None,
                "failed": "" if done else entries[0]["failed"],
                "task": entries[0]["task"],
                "size": f"{done[0]['rows']:,} × {done[0]['columns']:,}" if done else "",
            }
    return found


def ranked(rows: list[Row], task: str) -> tuple[list[Row], list[str]]:
    """The results of a task from which ranks are computed, and the ranked rivals.

    A table is used if our default model and all ranked rivals were measured on it, with the repeats that all of these
    have in common.
    """
    rows = [row for row in rows if row["task"] == task]
    found = by_table(rows)
    counts = Counter(model for one in found.values() if DEFAULT in one for model in one)
    least = RANKED_FRACTION * counts[DEFAULT]
    rivals = [m for m, n in counts.items() if n >= least and not m.startswith("Bilevel") and m != CONSTANT]
    draws: dict[str, set[int]] = {}
    for table in found:
        each = [
            {row["repeat"] for row in rows if row["table"] == table and row["model"] == model}
            for model in (DEFAULT, *rivals)
        ]
        draws[table] = set.intersection(*each)
    return [row for row in rows if row["repeat"] in draws[row["table"]]], rivals


def ranks(found: Measured, models: list[str]) -> dict[str, float]:
    """The mean rank of every model over the tables; 1 is the best. Equal errors share a rank."""
    from scipy.stats import rankdata

    every = [rankdata([entries[model]["error"] for model in models]) for entries in found.values()]
    return dict(zip(models, np.mean(every, axis=0).tolist(), strict=True))


def markdown(rows: list[Row], which: str) -> str:
    return "\n".join(_lines(rows, which)) + "\n"


def _lines(rows: list[Row], which: str) -> Iterator[str]:
    yield "# Models of tables\n"
    command = f"python benchmarks/tables.py{'' if which == 'claim' else ' --set development'}"
    yield (
        f"{FOLDS}-fold cross-validation on the tables of the {which} set (`table_sets.py`), by `{command}`.\n"
        "The error is relative to a constant prediction, which has the error 1. For regression it is the mean squared\n"
        "error over that of the training rows' mean, and for classification the log loss over that of the training\n"
        "rows' class frequencies. Rivals have default settings; pyGAM searches its grid. A model that fails or takes\n"
        "too long is counted as the constant prediction. Seconds are the processor time of a fit with one thread, as\n"
        "medians over tables. The rivals that take minutes were measured on a machine of about half the speed, the\n"
        "others on one that did other work too. Models that were measured on too few tables are left out of the\n"
        "ranks."
    )
    if which == "claim":
        from table_sets import DEVELOPMENT

        names = ", ".join(table.source for table in DEVELOPMENT)
        yield f"\nNo setting was chosen on these tables. Settings were chosen on: {names}."
        yield "\n![On how many tables each model is within a factor of the best](tables.png)"
    for task in ("regression", "classification"):
        full, rivals = ranked(of_first_folds(rows, FOLDS), task)
        tables = by_table(full)
        if tables and rivals:
            yield from _section(f"{task.capitalize()}, {len(tables)} tables", _draws(full), full, rivals)
            yield from _left_out(by_table([row for row in rows if row["task"] == task]), tables)
        yield from _with_slow_rivals(of_first_folds([row for row in rows if row["repeat"] == 0], 1), task, rivals)
        yield from _sparse(of_first_folds(rows, FOLDS), task)


def _with_slow_rivals(rows: list[Row], task: str, rivals: list[str]) -> Iterator[str]:
    """All models on the first fold, on the tables where no slow rival exceeded its time limit."""
    rows = [row for row in rows if row["task"] == task]
    slow = list(dict.fromkeys(row["model"] for row in rows if row["model"] in SLOW and row["model"] not in rivals))
    late = {row["table"]: row["model"] for row in rows if row["model"] in slow and "failed" in row}
    tables = {row["table"] for row in rows}
    for model in slow:
        tables &= {row["table"] for row in rows if row["model"] == model and "errors" in row}
    some, more = ranked([row for row in rows if row["table"] in tables], task)
    if not some or not slow:
        return
    note = (
        f"{' and '.join(slow)} take minutes for a table, so all models are compared here on the first fold of the\n"
        "first repeat only. With one fold the noise is large, so the best rival of a table is largely a matter of\n"
        "chance. The smallest tables were measured first."
    )
    if late:
        names = ", ".join(f"{table} ({model})" for table, model in late.items())
        note += f" Tables where one of them exceeded\nits time limit are left out: {names}."
    yield from _section(f"{task.capitalize()} with {' and '.join(slow)}, {len(tables)} tables", note, some, more)


def _draws(rows: list[Row]) -> str:
    """A sentence that states how many times the rows of the tables were split into folds."""
    often = Counter(len({row["repeat"] for row in rows if row["table"] == t}) for t in {row["table"] for row in rows})
    words = [f"{n} time{'s' * (n > 1)} on {tables} table{'s' * (tables > 1)}" for n, tables in sorted(often.items())]
    return f"The rows were split into folds {', '.join(words)}."


def _section(title: str, note: str, rows: list[Row], rivals: list[str]) -> Iterator[str]:
    tables = by_table(rows)
    mean = ranks(tables, [DEFAULT, *rivals])
    yield f"\n## {title}\n\n{note}\n"
    yield "| model | mean rank | mean error | seconds | failed |\n|---|---:|---:|---:|---:|"
    for model in sorted(mean, key=lambda name: mean[name]):
        took = [one[model]["seconds"] for one in tables.values() if one[model]["seconds"] is not None]
        errors = [min(one[model]["error"], 2.0) for one in tables.values()]
        failed = sum(bool(one[model]["failed"]) for one in tables.values())
        mark = "**" if model == DEFAULT else ""
        yield (
            f"| {mark}{model}{mark} | {mean[model]:.2f} | {np.mean(errors):.3f} | "
            f"{np.median(took) if took else float('nan'):.2f} | {failed or ''} |"
        )
    yield from _against_each(tables)
    best = {name: min(rivals, key=lambda model, one=one: one[model]["error"]) for name, one in tables.items()}
    ratio = {name: one[DEFAULT]["error"] / one[best[name]]["error"] for name, one in tables.items()}
    close = sum(value <= CLOSE for value in ratio.values())
    yield (
        f"\nWithin 2 % of the best rival of each table: {close} of {len(tables)}. "
        "In the mean error, an error above 2 counts as 2.\n"
    )
    yield "| table | rows × columns | our error | best rival | its error | ours / its |\n|---|---|---:|---|---:|---:|"
    for name, one in tables.items():
        yield (
            f"| {name} | {one[DEFAULT]['size']} | {one[DEFAULT]['error']:.4f} | {best[name]} | "
            f"{one[best[name]]['error']:.4f} | {ratio[name]:.3f} |"
        )


def _left_out(found: Measured, tables: Measured) -> Iterator[str]:
    """The tables that are not ranked because a ranked rival was not measured on them, with their results."""
    for name, one in found.items():
        others = [model for model in one if not model.startswith("Bilevel") and model != CONSTANT]
        if name in tables or DEFAULT not in one or not others:
            continue
        best = min(others, key=lambda model, one=one: one[model]["error"])
        yield (
            f"\nNot ranked, because some rivals were not measured on it: {name}, "
            f"our error {one[DEFAULT]['error']:.4f}, {best} {one[best]['error']:.4f}."
        )


def _against_each(tables: Measured) -> Iterator[str]:
    """Our default model against every rival, on the tables on which both were measured."""
    yield "\n| our default against | tables | better by 2 % | worse by 2 % | error / its, mean | time / its, median |"
    yield "|---|---:|---:|---:|---:|---:|"
    others = dict.fromkeys(model for one in tables.values() for model in one)
    for model in (name for name in others if not name.startswith("Bilevel") and name != CONSTANT):
        both = [one for one in tables.values() if model in one]
        ratio = np.array([one[DEFAULT]["error"] / one[model]["error"] for one in both])
        times = [
            one[DEFAULT]["seconds"] / one[model]["seconds"]
            for one in both
            if one[DEFAULT]["seconds"] and one[model]["seconds"]
        ]
        yield (
            f"| {model} | {len(both)} | {(ratio < 1 / CLOSE).sum()} | {(ratio > CLOSE).sum()} | "
            f"{np.exp(np.log(ratio).mean()):.3f} | {np.median(times) if times else float('nan'):.2f} |"
        )


def picture(rows: list[Row], path: Path) -> None:
    """For every model, on how many tables its error is within a factor of the least error."""
    from bilevel.plotting import BLUE, titled
    from bilevel.plotting import picture as drawn

    with drawn(path, width=11, height=4.6) as figure:
        for place, task in enumerate(("regression", "classification")):
            axes = figure.add_subplot(1, 2, place + 1)
            full, rivals = ranked(of_first_folds(rows, FOLDS), task)
            tables, models = by_table(full), [*rivals, DEFAULT]
            for model in models:
                least = [min(one[name]["error"] for name in models) for one in tables.values()]
                ratio = np.sort([one[model]["error"] / low for one, low in zip(tables.values(), least, strict=True)])
                style = {"color": BLUE, "linewidth": 3} if model == DEFAULT else {"linewidth": 1.3}
                reached = np.arange(1, len(ratio) + 1)
                axes.step([1, *ratio, 99], [0, *reached, len(ratio)], where="post", label=model, **style)
            axes.set_xlim(1, 2)
            titled(
                axes, f"{task.capitalize()}, {len(tables)} tables", "error / least error of the table", "tables within"
            )
            axes.legend(fontsize=7)


def differences(rows: list[Row], mine: str, theirs: str) -> dict[str, tuple[float, float, float]]:
    """By table: the mean difference of two models' errors, its standard error, and the ratio of their mean errors.

    The standard error is that of Nadeau and Bengio. Because the training sets of folds overlap, it takes the variance
    of a mean over n folds to be s² (1/n + test rows / training rows).
    """
    each: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "errors" in row:
            each[row["table"]][row["model"]][row["repeat"]] = row["errors"]
    found = {}
    for table, models in each.items():
        draws = sorted(models[mine].keys() & models[theirs].keys())
        if draws:
            ours, its = (np.concatenate([models[name][draw] for draw in draws]) for name in (mine, theirs))
            error = (ours - its).std(ddof=1) * np.sqrt(1 / len(ours) + 1 / (FOLDS - 1))
            found[table] = (float((ours - its).mean()), float(error), float(ours.mean() / its.mean()))
    return found


def _sparse(rows: list[Row], task: str) -> Iterator[str]:
    """Our sparse models against scikit-learn's, with standard errors over folds."""
    lines = []
    for mine, theirs in SPARSE if task == "regression" else ():
        found = differences(rows, mine, theirs)
        if not found:
            continue
        beyond = [np.sign(mean) * (abs(mean) > NOISE * error) for mean, error, _ in found.values()]
        worst = max(found, key=lambda table: found[table][2])
        mean, error, ratio = found[worst]
        lines.append(
            f"| {mine} | {theirs} | {len(found)} | {np.exp(np.mean(np.log([one[2] for one in found.values()]))):.3f} | "
            f"{beyond.count(-1)} | {beyond.count(1)} | {worst}: {ratio:.3f} (difference {mean:.4f} ± {error:.4f}) |"
        )
    if lines:
        yield "\n## Sparse models\n"
        yield (
            "The geometric mean over tables of our error / its error, and on how many tables the difference is more\n"
            f"than {NOISE:g} standard errors (*beyond noise*). The standard errors are those of the differences over\n"
            "folds, corrected for training sets that overlap (Nadeau and Bengio). All models have the same\n"
            "standardised features. `BilevelLasso` and `BilevelElasticNet` use one penalty per feature if that is\n"
            "better than one common penalty by 1.5 standard errors, and otherwise one common penalty.\n"
        )
        yield "| ours | against | tables | our error / its | better beyond noise | worse beyond noise | largest ratio |"
        yield "|---|---|---:|---:|---:|---:|---|"
        yield from lines
