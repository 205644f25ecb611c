"""Repeated cross-validation of our models and scikit-learn's, on the same rows, columns and folds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from bilevel.errors import BilevelError
from bilevel.tabular.candidates import CONSTANT, additive_estimator, fit_quietly, kinds_for, make_estimator, rivals
from bilevel.tabular.columns import column_reader, columns_of_features, outputs, preprocessing, transformed
from bilevel.tabular.formatting import counted
from bilevel.tabular.preparing import UsedTable
from bilevel.tabular.scores import measures, row_losses, table_score
from bilevel.tabular.settings import ModelKind, TuneSettings
from bilevel.tabular.values import Floats

# Shows what is being done.
Doing = Callable[[str], None]


@dataclass
class ComparedModel:
    """One model of the comparison.

    Attributes:
        name: the estimator's class.
        kind: the kind of our model; None for scikit-learn's models.
        losses: the loss of every fold: the mean over its test rows of the squared error or of −log p(true class).
        scores: the measures. Each is computed over all test rows of a repeat, then averaged over the repeats.
        seconds: the median time of a fit, with the tuning.
        predicted: the predictions for all rows in the first repeat; NaN for rows that are in no test set.
        contributions: the contribution of each column to these predictions, rows × outputs × columns; None unless the
            model is linear and ours.
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
        """Whether it is one of our models."""
        return self.kind is not None


@dataclass(frozen=True)
class ModelComparison:
    """The result of repeated cross-validation.

    Attributes:
        models: all models, the best first.
        ratio: the number of test rows divided by that of training rows, the mean over folds.
        repeats: the number of repeats that were done.
        notes: sentences about models and repeats that were left out.
        tested: a mask of the rows that are in a test set. In splits by time, the first rows are only trained on.
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
            "All columns are constant over the training rows of a fold. Add rows, or write fewer folds (--cv)."
        ) from error


def penalty_of(settings: TuneSettings, groups: Mapping[str, str], steps: Pipeline) -> Any:
    """The argument `penalty` of our estimators, for the features of this preprocessing."""
    if not groups:
        return settings.penalty
    names = list(dict.fromkeys(groups.values()))
    return [names.index(groups[column]) for column in columns_of_features(steps)]


def our_estimators(
    settings: TuneSettings, classes: bool, penalty: Any, folds: Any, exchangeable: bool
) -> dict[ModelKind, Any]:
    """Our estimators by kind, not fitted.

    Args:
        exchangeable: whether single rows may be left out. The additive model then needs no folds.
    """
    arguments: dict[str, Any] = {
        "cv": folds,
        "max_iter": settings.max_iter,
        "seed": settings.seed,
        "l1_ratio": settings.l1_ratio,
    }
    estimators: dict[ModelKind, Any] = {}
    for kind in kinds_for(classes, settings.model, bool(settings.group)):
        if kind == "additive":
            cv = None if exchangeable else folds
            estimators[kind] = additive_estimator(classes, cv=cv, max_iter=settings.max_iter, seed=settings.seed)
        else:
            estimators[kind] = make_estimator(kind, penalty, **arguments)
    return estimators


class _Comparison:
    """The predictions, losses and times of all models so far."""

    def __init__(self, used: UsedTable, settings: TuneSettings, classes: list[str], columns: list[str]) -> None:
        self.used, self.settings, self.classes, self.columns = used, settings, classes, columns
        self.kinds: dict[str, ModelKind | None] = {}
        self.losses: dict[str, list[float]] = defaultdict(list)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.predicted: dict[str, list[Floats]] = defaultdict(list)
        self.parts: dict[str, Floats] = {}
        self.left_out: dict[str, str] = {}
        self.where = ""

    def add_fold(self, name: str, repeat: int, test: Any, predicted: Floats, seconds: float) -> None:
        used = self.used
        weights = None if used.weights is None else used.weights[test]
        losses = row_losses(used.y[test], predicted, self.classes)
        self.losses[name].append(float(np.average(losses, weights=weights)))
        self.seconds[name].append(seconds)
        if len(self.predicted[name]) == repeat:
            self.predicted[name].append(np.full((len(used.y), *predicted.shape[1:]), np.nan))
        self.predicted[name][repeat][test] = predicted

    def add_contributions(self, name: str, test: Any, Z: Floats, steps: Pipeline, estimator: Any) -> None:
        coefficients = np.atleast_2d(estimator.coef_)
        positions = [self.columns.index(column) for column in columns_of_features(steps)]
        if name not in self.parts:
            self.parts[name] = np.full((len(self.used.y), len(coefficients), len(self.columns)), np.nan)
        added = np.zeros((len(self.columns), len(test), len(coefficients)))
        np.add.at(added, positions, (Z[:, None, :] * coefficients).transpose(2, 0, 1))
        self.parts[name][test] = added.transpose(1, 2, 0)

    def leave_out_slow(self, folds: int, limit: float) -> None:
        """Leave out models that would exceed the limit in the first repeat. The fastest of our models stays."""
        last = {name: took[-1] for name, took in self.seconds.items()}
        ours = [name for name, kind in self.kinds.items() if kind]
        fastest = min(ours, key=lambda name: last[name])
        for name, took in last.items():
            if took * folds > limit and name not in (fastest, *CONSTANT.values()):
                self.left_out[name] = (
                    f"{name} is not in the comparison: it took {took:.2g} s for one of {folds} folds. --minutes "
                    f"{max(1, round(1.5 * took * folds / 60))} would include it."
                )
                for results in (self.losses, self.seconds, self.predicted, self.kinds):
                    results.pop(name, None)

    def models(self) -> list[ComparedModel]:
        used, models = self.used, []
        for name, predicted in self.predicted.items():
            scores = []
            for values in predicted:
                tested = ~np.isnan(values if values.ndim == 1 else values[:, 0])
                weights = None if used.weights is None else used.weights[tested]
                scores.append(table_score(used.y[tested], values[tested], weights, self.classes))
            mean = {key: float(np.mean([score[key] for score in scores])) for key in scores[0]}
            if "rmse" in mean:  # the root of the mean over repeats, not the mean of roots
                mean["rmse"] = float(np.mean([score["rmse"] ** 2 for score in scores]) ** 0.5)
            models.append(
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
        return sorted(models, key=lambda model: model.scores[error])


def compare(
    used: UsedTable, settings: TuneSettings, groups: Mapping[str, str], doing: Doing = lambda what: None
) -> ModelComparison:
    """Fit every model to the training rows of every fold, and test it on the other rows.

    Everything that is learned from the table (medians, categories, scales, penalties) is learned from the training
    rows. Another repeat starts only if it will probably end within `settings.minutes`.
    """
    classes = sorted(set(used.y.tolist())) if used.classes else []
    run = _Comparison(used, settings, classes, list(used.kinds))
    started, limit = time.perf_counter(), 60 * settings.minutes
    ratios, done, tested = [], 0, np.zeros(len(used.y), dtype=bool)
    planned = 1 if used.splits.in_time else settings.repeats
    for repeat, pairs in enumerate(used.splits.outer(settings.repeats)):
        spent = time.perf_counter() - started
        if repeat and spent * (repeat + 1) / repeat > limit:
            break
        for fold, (train, test) in enumerate(pairs):
            tested[test] = True
            ratios.append(len(test) / len(train))
            run.where = f"fold {repeat * len(pairs) + fold + 1} of {planned * len(pairs)}"
            _one_fold(run, repeat, train, test, groups, doing)
            if repeat == 0 and fold == 0:
                run.leave_out_slow(len(pairs), limit)
        done = repeat + 1
    notes = list(run.left_out.values())
    if done < planned:
        notes.append(
            f"The folds were drawn {counted(done, 'time')}, not {planned}, because of --minutes {settings.minutes:g}."
        )
    return ModelComparison(run.models(), float(np.mean(ratios)), done, tested, notes)


def _one_fold(run: _Comparison, repeat: int, train: Any, test: Any, groups: Mapping[str, str], doing: Doing) -> None:
    used, settings = run.used, run.settings
    steps, X = fold_features(used, train, settings.missing == "median")
    Z = transformed(steps, used.frame.iloc[test])
    folds = used.splits.inner(train)
    weights = None if used.weights is None else used.weights[train]
    penalty = penalty_of(settings, groups, steps)
    ours = our_estimators(settings, used.classes, penalty, folds, used.splits.exchangeable)
    candidates: dict[str, tuple[ModelKind | None, Any]] = {
        name: (None, estimator)
        for name, estimator in rivals(used.classes, folds, settings.seed, used.splits.exchangeable).items()
    }
    candidates |= {type(estimator).__name__: (kind, estimator) for kind, estimator in ours.items()}
    for name, (kind, estimator) in candidates.items():
        if name in run.left_out:
            continue
        doing(f"{run.where}: {name}")
        inputs = (X, Z)
        if kind == "additive":
            reader = column_reader(used.kinds, settings.missing == "median")
            inputs = tuple(reader.transform(used.frame.iloc[rows]) for rows in (train, test))
        started = time.perf_counter()
        fit_quietly(estimator, inputs[0], used.y[train], weights)
        seconds = time.perf_counter() - started
        run.kinds[name] = kind
        run.add_fold(name, repeat, test, outputs(estimator, inputs[1]), seconds)
        if kind and kind != "additive" and repeat == 0:
            run.add_contributions(name, test, Z, steps, estimator)
