"""A hint where one column alone predicts the target almost perfectly: often it is known only after the target."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import Pipeline
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from bilevel.tabular.columns import column_transformer
from bilevel.tabular.preparing import UsedTable
from bilevel.tabular.scores import table_score
from bilevel.tabular.words import option

MOST_COLUMNS = 40  # of a wide table, those that correlate most with the target
MOST_ROWS = 3000
PERFECT = 0.99  # R² or balanced accuracy


def leaks(used: UsedTable, fill: bool) -> list[str]:
    """A sentence for every column that predicts held-out rows by itself with R² or a balanced accuracy above 0.99."""
    rows = np.unique(np.linspace(0, len(used.y) - 1, min(len(used.y), MOST_ROWS)).round().astype(int))
    frame, y = used.frame.iloc[rows], used.y[rows]
    found = []
    for name in _promising(used, frame, y, fill):
        score = _alone(used, name, frame[[name]], y, rows, fill)
        if score > PERFECT:
            measure = "balanced accuracy" if used.classes else "R²"
            found.append(
                f"Column {name!r} alone predicts the target almost perfectly ({measure} {score:.4f} on held-out rows). "
                f"If it is known only after the target, it is a leak: {option('--drop', name)}."
            )
    return found


def _features(used: UsedTable, name: str, frame: Any, fill: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return column_transformer({name: used.kinds[name]}, fill).fit_transform(frame)


def _promising(used: UsedTable, frame: Any, y: Any, fill: bool) -> list[str]:
    if len(used.kinds) <= MOST_COLUMNS:
        return list(used.kinds)
    codes = np.unique(y, return_inverse=True)[1] if used.classes else y.argsort().argsort()
    goals = np.eye(codes.max() + 1)[codes] if used.classes else codes[:, None].astype(float)
    goals = goals - goals.mean(0)
    sizes = {}
    for name in used.kinds:
        X = _features(used, name, frame[[name]], fill)
        ranks = X.argsort(0).argsort(0) - (len(X) - 1) / 2
        norm = np.linalg.norm(ranks, axis=0)[:, None] * np.linalg.norm(goals, axis=0) + 1e-300
        sizes[name] = float(np.abs(ranks.T @ goals / norm).max())
    return sorted(sizes, key=lambda name: -sizes[name])[:MOST_COLUMNS]


def _alone(used: UsedTable, name: str, frame: Any, y: Any, rows: Any, fill: bool) -> float:
    """The better of a tree and, for numbers, a line."""
    X = _features(used, name, frame, fill)
    folds = used.splits.of(rows, seed=0)
    folds = [pair for pair in folds if len(pair[0]) and len(pair[1])]
    if used.splits.in_time:  # every row is predicted once, which the splits in time do not do
        folds = [(np.setdiff1d(np.arange(len(rows)), part), part) for part in np.array_split(np.arange(len(rows)), 5)]
    if used.classes:
        labels = sorted(set(y.tolist()))
        tree = DecisionTreeClassifier(max_leaf_nodes=max(8, 2 * len(labels)), random_state=0)
        found = cross_val_predict(tree, X, y, cv=folds)
        chances = (found[:, None] == np.array(labels, dtype=object)).astype(float)
        return table_score(y, chances, None, labels)["balanced_accuracy"]
    trees: list[Any] = [DecisionTreeRegressor(max_leaf_nodes=64, random_state=0), LinearRegression()]
    return max(table_score(y, cross_val_predict(Pipeline([("m", one)]), X, y, cv=folds))["r2"] for one in trees)
