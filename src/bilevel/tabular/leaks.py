"""Hints about possible leaks: columns that predict the target almost perfectly by themselves.

Such a column is often known only after the target.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from bilevel.tabular.columns import column_transformer
from bilevel.tabular.formatting import option
from bilevel.tabular.preparing import UsedTable
from bilevel.tabular.scores import table_score

# At most this number of columns are tried, those that correlate most with the target, on at most this number of rows.
MAX_COLUMNS, MAX_ROWS = 40, 3000
PERFECT = 0.99  # R² or balanced accuracy


def leaks(used: UsedTable, fill: bool) -> list[str]:
    """A sentence for every column that predicts held-out rows by itself with R² or a balanced accuracy above 0.99."""
    rows = np.unique(np.linspace(0, len(used.y) - 1, min(len(used.y), MAX_ROWS)).round().astype(int))
    frame, y = used.frame.iloc[rows], used.y[rows]
    hints = []
    for name in _candidates(used, frame, y, fill):
        score = _score_alone(used, name, frame[[name]], y, rows, fill)
        if score > PERFECT:
            measure = "balanced accuracy" if used.classes else "R²"
            hints.append(
                f"Column {name!r} alone predicts the target almost perfectly ({measure} {score:.4f} on held-out rows). "
                f"If it is known only after the target, it is a leak: {option('--drop', name)}."
            )
    return hints


def _features(used: UsedTable, name: str, frame: Any, fill: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return column_transformer({name: used.kinds[name]}, fill).fit_transform(frame)


def _candidates(used: UsedTable, frame: Any, y: Any, fill: bool) -> list[str]:
    if len(used.kinds) <= MAX_COLUMNS:
        return list(used.kinds)
    codes = np.unique(y, return_inverse=True)[1] if used.classes else y.argsort().argsort()
    targets = np.eye(codes.max() + 1)[codes] if used.classes else codes[:, None].astype(float)
    targets = targets - targets.mean(0)
    correlations = {}
    for name in used.kinds:
        X = _features(used, name, frame[[name]], fill)
        ranks = X.argsort(0).argsort(0) - (len(X) - 1) / 2
        norm = np.linalg.norm(ranks, axis=0)[:, None] * np.linalg.norm(targets, axis=0) + 1e-300
        correlations[name] = float(np.abs(ranks.T @ targets / norm).max())
    return sorted(correlations, key=lambda name: -correlations[name])[:MAX_COLUMNS]


def _score_alone(used: UsedTable, name: str, frame: Any, y: Any, rows: Any, fill: bool) -> float:
    """The score of one column: that of a tree, or the better of a tree and a linear model for numbers."""
    X = _features(used, name, frame, fill)
    folds = used.splits.of(rows, seed=0)
    folds = [pair for pair in folds if len(pair[0]) and len(pair[1])]
    if used.splits.in_time:  # cross_val_predict needs every row in exactly one test set
        folds = [(np.setdiff1d(np.arange(len(rows)), part), part) for part in np.array_split(np.arange(len(rows)), 5)]
    if used.classes:
        labels = sorted(set(y.tolist()))
        tree = DecisionTreeClassifier(max_leaf_nodes=max(8, 2 * len(labels)), random_state=0)
        labels_predicted = cross_val_predict(tree, X, y, cv=folds)
        probabilities = (labels_predicted[:, None] == np.array(labels, dtype=object)).astype(float)
        return table_score(y, probabilities, None, labels)["balanced_accuracy"]
    models: list[Any] = [DecisionTreeRegressor(max_leaf_nodes=64, random_state=0), LinearRegression()]
    return max(
        table_score(y, cross_val_predict(Pipeline([("model", model)]), X, y, cv=folds))["r2"] for model in models
    )
