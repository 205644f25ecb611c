"""From the columns of a table to standardised features: a scikit-learn pipeline, fitted to the training rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from sklearn.compose import ColumnTransformer
from sklearn.feature_selection import VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from bilevel.errors import BilevelError
from bilevel.tabular.dates import PARTS, DateOrder, as_days, calendar, calendar_names
from bilevel.tabular.formatting import counted
from bilevel.tabular.values import Floats, Mask, comma_advice, first_of, first_row, labels_of, numbers_of

FeatureKind = Literal["numbers", "truth values", "categories"] | DateOrder


def _truths(column: Any) -> Floats:
    numbers = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
    return np.array([numbers.get(str(label).strip().lower(), np.nan) for label in labels_of(column)])


# For every kind: how a column is read, what its values must be, and which values are legal.
READERS: dict[FeatureKind, tuple[Callable[[Any], Any], str, Callable[[Any], Mask]]] = {
    "numbers": (numbers_of, "a finite number", np.isfinite),
    "truth values": (_truths, "True or False", lambda values: np.isin(values, (0, 1))),
    "categories": (labels_of, "text", lambda values: np.ones(len(values), dtype=bool)),
    **{order: (partial(as_days, order=order), "a date", np.isfinite) for order in get_args(DateOrder)},
}


def as_values(frame: Any, kind: FeatureKind, gaps: bool) -> NDArray[Any]:
    """Columns of one kind as an array: numbers, 0 and 1 for truth values, text, or days since 1970.

    With `gaps`, empty fields are allowed and become NaN.
    """
    read, needed, legal = READERS[kind]
    parts = []
    for name, column in frame.items():
        empty = column.isna().to_numpy(dtype=bool)
        if empty.any() and not gaps:
            raise BilevelError(
                f"Column {name!r} has no value in {counted(int(empty.sum()), 'row')}, first in row "
                f"{first_row(column, empty)}, and the model was trained without empty fields. Fill "
                "them in, or train the model with --missing median."
            )
        values = read(column)
        if (bad := ~legal(values) & ~empty).any():
            advice = comma_advice(column) or "Correct it"
            raise BilevelError(
                f"Column {name!r}: {first_of(column, bad)} is not {needed}, which the model needs there. {advice}."
            )
        parts.append(values)
    return np.stack(parts, axis=1)


def indicator_name(column: str, value: Any) -> str:
    return f"{column}={value}"


def column_transformer(kinds: Mapping[str, FeatureKind], fill: bool) -> ColumnTransformer:
    """The transformer from columns to features.

    Numbers and truth values are not changed. Categories become one indicator per value, or one indicator in all for two
    values. Dates become days since 1970, month, weekday and hour. With `fill`, empty fields are replaced by the median
    or the most common value of the training rows. Without it, they are refused.
    """

    encoder = OneHotEncoder(
        drop="if_binary", handle_unknown="ignore", sparse_output=False, feature_name_combiner=indicator_name
    )
    expand = FunctionTransformer(calendar, feature_names_out=calendar_names)

    def steps(kind: FeatureKind) -> Pipeline:
        reader = FunctionTransformer(as_values, kw_args={"kind": kind, "gaps": fill}, feature_names_out="one-to-one")
        found: dict[str, Any] = {"read": reader}
        if fill:
            strategy = "most_frequent" if kind in ("truth values", "categories") else "median"
            found["fill"] = SimpleImputer(strategy=strategy, keep_empty_features=True)
        if kind == "categories":
            found["encode"] = encoder
        elif kind in get_args(DateOrder):
            found["expand"] = expand
        return Pipeline([*found.items()])

    names = {kind: [name for name, its_kind in kinds.items() if its_kind == kind] for kind in READERS}
    return ColumnTransformer(
        [(kind, steps(kind), names[kind]) for kind in READERS if names[kind]], verbose_feature_names_out=False
    )


def readable_columns(frame: Any, kinds: Mapping[str, FeatureKind], gaps: bool) -> Any:
    """The columns for a model that accepts categories and empty fields: numbers, text, and the parts of dates."""
    columns: dict[str, Any] = {}
    for name, kind in kinds.items():
        values, empty = as_values(frame[[name]], kind, gaps), frame[name].isna().to_numpy(dtype=bool)
        if kind in get_args(DateOrder):
            parts = calendar(np.nan_to_num(values))
            parts[empty] = np.nan
            columns |= dict(zip(calendar_names(None, [name]), parts.T, strict=True))
        elif kind == "truth values":
            columns[name] = np.where(values[:, 0] == 1, "True", "False").astype(object)
            columns[name][empty] = None
        else:
            columns[name] = values[:, 0]
    return type(frame)(columns, index=frame.index)


def column_reader(kinds: Mapping[str, FeatureKind], gaps: bool) -> FunctionTransformer:
    """The first step of the additive model's pipeline: `readable_columns`."""
    return FunctionTransformer(readable_columns, kw_args={"kinds": dict(kinds), "gaps": gaps})


def preprocessing(kinds: Mapping[str, FeatureKind], fill: bool) -> Pipeline:
    """The steps from columns to features. Features that are constant over the training rows are removed, the others
    standardised."""
    return Pipeline(
        [
            ("columns", column_transformer(kinds, fill)),
            ("varying", VarianceThreshold()),
            ("scale", StandardScaler()),
        ]
    )


@contextmanager
def quiet_categories() -> Iterator[None]:
    """Ignore scikit-learn's warning about unknown categories, because a note reports them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found unknown categories")
        yield


def transformed(steps: Pipeline, frame: Any) -> Floats:
    """The features of a table. For an unknown category, all indicators are 0."""
    with quiet_categories():
        return np.asarray(steps.transform(frame))


def outputs(estimator: Any, X: Any) -> Floats:
    """The probabilities of a classifier, or the predictions of a regressor."""
    return np.asarray(estimator.predict_proba(X) if hasattr(estimator, "predict_proba") else estimator.predict(X))


def described(transformer: ColumnTransformer) -> list[dict[str, Any]]:
    """What a fitted ColumnTransformer learned about every column, as JSON data.

    The keys are name, kind, fill (the value for empty fields), categories, and without_indicator (the category that has
    none).
    """
    columns = []
    for kind, _, names in transformer.transformers:
        steps = transformer.named_transformers_[kind].named_steps
        for place, name in enumerate(names):
            fill = steps["fill"].statistics_[place] if "fill" in steps else None
            column = {"name": name, "kind": kind, "fill": fill if kind == "categories" or fill is None else float(fill)}
            if kind == "categories":
                values = steps["encode"].categories_[place].tolist()
                column |= {"categories": values, "without_indicator": values[0] if len(values) == 2 else None}
            columns.append(column)
    return columns


def columns_of_features(steps: Pipeline) -> list[str]:
    """The column that every feature comes from."""
    names = []
    for column in described(steps["columns"]):
        count = len(PARTS) if column["kind"] in get_args(DateOrder) else 1
        if "categories" in column:
            count = len(column["categories"]) - (column["without_indicator"] is not None)
        names += [column["name"]] * count
    return np.array(names, dtype=object)[steps["varying"].get_support()].tolist()
