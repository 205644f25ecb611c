"""Repeated cross-validation of our models and scikit-learn's, on the same rows, features and folds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from bilevel.errors import BilevelError
from bilevel.tabular.columns import column_reader, columns_of_features, outputs, preprocessing, transformed
from bilevel.tabular.fitting import additive_estimator, kinds_for, make_estimator
from bilevel.tabular.preparing import UsedTable
from bilevel.tabular.rivals import CONSTANT, fit_quietly, rivals
from bilevel.tabular.scores import measures, row_losses, table_score
from bilevel.tabular.settings import ModelKind, TuneSettings
from bilevel.tabular.values import Floats
from bilevel.tabular.words import counted

Doing = Callable[[str], None]


@dataclass
class ComparedModel:
    """A line of the comparison.

    Attributes:
        name: the estimator's class.
        kind: which of our models it is; None for scikit-learn's.
        losses: of every fold: the mean over its test rows of the squared error or of −log p(true class).
        scores: the measures, means over repeats; each is taken over all test rows of a repeat.
        seconds: the median time of a fit, tuning included.
        predicted: of the test rows in the first repeat, by row; NaN where a row is not tested.
        contributions: what each column adds to these predictions, rows × outputs × columns; linear models only.
    """

    name: str
    kind: ModelKind | None
    losses: Floats
    scores: dict[str, float]
    seconds: float
    predicted: Floats
    contributions: Floats | None = None

    @property
    def own(self) -> bool:
        """Whether it is ours."""
        return self.kind is not None


@dataclass(frozen=True)
class ModelComparison:
    """What repeated cross-validation found.

    Attributes:
        models: the best first.
        ratio: test rows over training rows, the mean over folds.
        repeats: how many were done.
        notes: models that were left out, and repeats that were.
        tested: the rows that are tested; in time, the first rows only train.
    """

    models: list[ComparedModel]
    ratio: float
    repeats: int
    tested: Any
    notes: list[str] = field(default_factory=list)


def fold_features(used: UsedTable, rows: Any, fill: bool) -> tuple[Pipeline, Floats]:
    """The preprocessing fitted to these rows, and their features."""
    steps = preprocessing(used.kinds, fill)
    try:
        return steps, np.asarray(steps.fit_transform(used.frame.iloc[rows]))
    except ValueError as error:
        if isinstance(error, BilevelError) or "variance" not in str(error):
            raise
        raise BilevelError(
            "No column varies over the training rows of a fold; bring more rows, or write fewer folds (--cv)."
        ) from error


def penalty_of(settings: TuneSettings, groups: Mapping[str, str], steps: Pipeline) -> Any:
    """The argument `penalty` of our estimators, for the features of this preprocessing."""
    if not groups:
        return settings.penalty
    names = list(dict.fromkeys(groups.values()))
    return [names.index(groups[column]) for column in columns_of_features(steps)]


def our_estimators(settings: TuneSettings, classes: bool, penalty: Any, folds: Any) -> dict[ModelKind, Any]:
    """Our estimators by kind, not fitted."""
    chosen: dict[str, Any] = {
        "cv": folds,
        "max_iter": settings.max_iter,
        "seed": settings.seed,
        "l1_ratio": settings.l1_ratio,
    }
    found: dict[ModelKind, Any] = {}
    for kind in kinds_for(classes, settings.model, bool(settings.group)):
        if kind == "additive":
            found[kind] = additive_estimator(classes, max_iter=settings.max_iter, seed=settings.seed)
        else:
            found[kind] = make_estimator(kind, penalty, **chosen)
    return found


class _Run:
    """What is known of the models so far."""

    def __init__(self, used: UsedTable, settings: TuneSettings, classes: list[str], columns: list[str]) -> None:
        self.used, self.settings, self.classes, self.columns = used, settings, classes, columns
        self.kinds: dict[str, ModelKind | None] = {}
        self.losses: dict[str, list[float]] = defaultdict(list)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.predicted: dict[str, list[Floats]] = defaultdict(list)
        self.parts: dict[str, Floats] = {}
        self.left_out: dict[str, str] = {}

    def put(self, name: str, repeat: int, test: Any, found: Floats, seconds: float) -> None:
        used = self.used
        weights = None if used.weights is None else used.weights[test]
        losses = row_losses(used.y[test], found, self.classes)
        self.losses[name].append(float(np.average(losses, weights=weights)))
        self.seconds[name].append(seconds)
        if len(self.predicted[name]) == repeat:
            self.predicted[name].append(np.full((len(used.y), *found.shape[1:]), np.nan))
        self.predicted[name][repeat][test] = found

    def put_contributions(self, name: str, test: Any, Z: Floats, steps: Pipeline, estimator: Any) -> None:
        coefficients = np.atleast_2d(estimator.coef_)
        places = [self.columns.index(column) for column in columns_of_features(steps)]
        if name not in self.parts:
            self.parts[name] = np.full((len(self.used.y), len(coefficients), len(self.columns)), np.nan)
        added = np.zeros((len(self.columns), len(test), len(coefficients)))
        np.add.at(added, places, (Z[:, None, :] * coefficients).transpose(2, 0, 1))
        self.parts[name][test] = added.transpose(1, 2, 0)

    def leave_out_slow(self, folds: int, limit: float) -> None:
        """Models whose first round of folds would take more time than there is; of ours the fastest stays."""
        last = {name: took[-1] for name, took in self.seconds.items()}
        ours = [name for name, kind in self.kinds.items() if kind]
        kept = min(ours, key=lambda name: last[name])
        for name, took in last.items():
            if took * folds > limit and name not in (kept, *CONSTANT.values()):
                self.left_out[name] = (
                    f"{name} is not in the comparison: it took {took:.2g} s for one of {folds} folds. --minutes "
                    f"{max(1, round(1.5 * took * folds / 60))} would include it."
                )
                for known in (self.losses, self.seconds, self.predicted, self.kinds):
                    known.pop(name, None)

    def models(self) -> list[ComparedModel]:
        used, found = self.used, []
        for name, predicted in self.predicted.items():
            scores = []
            for one in predicted:
                there = ~np.isnan(one if one.ndim == 1 else one[:, 0])
                weights = None if used.weights is None else used.weights[there]
                scores.append(table_score(used.y[there], one[there], weights, self.classes))
            mean = {key: float(np.mean([score[key] for score in scores])) for key in scores[0]}
            if "rmse" in mean:  # of the mean squared error
                mean["rmse"] = float(np.mean([score["rmse"] ** 2 for score in scores]) ** 0.5)
            found.append(
                ComparedModel(
                    name,
                    self.kinds[name],
                    np.array(self.losses[name]),
                    mean,
                    float(np.median(self.seconds[name])),
                    predicted[0],
                    self.parts.get(name),
                )
            )
        error = list(measures(self.classes))[-1]
        return sorted(found, key=lambda one: one.scores[error])


def compare(
    used: UsedTable, settings: TuneSettings, groups: Mapping[str, str], doing: Doing = lambda what: None
) -> ModelComparison:
    """Fit every model on the training rows of every fold, with everything that is learned from the table, and test it
    on the others. After the first repeat, another begins only if there is time for all of it."""
    classes = sorted(set(used.y.tolist())) if used.classes else []
    run = _Run(used, settings, classes, list(used.kinds))
    began, limit = time.perf_counter(), 60 * settings.minutes
    ratios, done, tested = [], 0, np.zeros(len(used.y), dtype=bool)
    planned = 1 if used.splits.in_time else settings.repeats
    for repeat, pairs in enumerate(used.splits.outer(settings.repeats)):
        spent = time.perf_counter() - began
        if repeat and spent * (repeat + 1) / repeat > limit:
            break
        for fold, (train, test) in enumerate(pairs):
            tested[test] = True
            ratios.append(len(test) / len(train))
            where = f"fold {repeat * len(pairs) + fold + 1} of {planned * len(pairs)}"
            _one_fold(run, repeat, train, test, groups, partial(_say, doing, where))
            if repeat == 0 and fold == 0:
                run.leave_out_slow(len(pairs), limit)
        done = repeat + 1
    notes = list(run.left_out.values())
    if done < planned:
        notes.append(
            f"The folds were drawn {counted(done, 'time')}, not {planned}, because of --minutes {settings.minutes:g}."
        )
    return ModelComparison(run.models(), float(np.mean(ratios)), done, tested, notes)


def _say(doing: Doing, where: str, name: str) -> None:
    doing(f"{where}: {name}")


def _one_fold(
    run: _Run, repeat: int, train: Any, test: Any, groups: Mapping[str, str], doing: Callable[[str], None]
) -> None:
    used, settings = run.used, run.settings
    steps, X = fold_features(used, train, settings.missing == "median")
    Z = transformed(steps, used.frame.iloc[test])
    folds = used.splits.inner(train)
    weights = None if used.weights is None else used.weights[train]
    ours = our_estimators(settings, used.classes, penalty_of(settings, groups, steps), folds)
    candidates: dict[str, tuple[ModelKind | None, Any]] = {
        name: (None, estimator)
        for name, estimator in rivals(used.classes, folds, settings.seed, used.splits.exchangeable).items()
    }
    candidates |= {type(estimator).__name__: (kind, estimator) for kind, estimator in ours.items()}
    for name, (kind, estimator) in candidates.items():
        if name in run.left_out:
            continue
        doing(name)
        inputs = (X, Z)
        if kind == "additive":
            reader = column_reader(used.kinds, settings.missing == "median")
            inputs = tuple(reader.transform(used.frame.iloc[rows]) for rows in (train, test))
        began = time.perf_counter()
        fit_quietly(estimator, inputs[0], used.y[train], weights)
        seconds = time.perf_counter() - began
        run.kinds[name] = kind
        run.put(name, repeat, test, outputs(estimator, inputs[1]), seconds)
        if kind and kind != "additive" and repeat == 0:
            run.put_contributions(name, test, Z, steps, estimator)
