"""Settings of `bilevel tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bilevel.errors import BilevelError

ModelKind = Literal["additive", "ridge", "elastic-net", "logistic"]
PenaltySharing = Literal["shared", "per-feature", "groups"]
MissingRule = Literal["median", "drop", "error"]


@dataclass(frozen=True)
class TuneSettings:
    """Settings of one tuning.

    Args:
        target: the column to predict.
        model: the kind of model. None tries all of ours that can predict the target, and keeps the best.
        classes: whether numbers in the target are names of classes.
        penalty: one for all features, one per feature (the default), or one per group (the default with `group`).
        group: the features that share a penalty; see `bilevel.tabular.groups`.
        groups: a column of labels. Rows with the same label are never on both sides of a split.
        time: a column of dates or numbers. Models are fitted to earlier rows and tested on later ones.
        cv: the number of folds, both of the comparison of models and of the tuning inside it.
        repeats: the number of repeats of the comparison, with other folds, if time allows.
        minutes: the time limit of the comparison.
        seed: the seed of the folds.
        drop: columns to leave out.
        categorical: columns whose values are categories, whatever they hold. Columns of text need not be named.
        missing: what to do with empty fields: "median" fills them in, "drop" leaves the rows out, "error" refuses them.
        weights: a column of sample weights.
        l1_ratio: the ratio of the elastic net. None means 0.5.
        max_iter: the largest number of hyperiterations.

    >>> TuneSettings("price", cv=1)
    Traceback (most recent call last):
    bilevel.errors.BilevelError: --cv 1 leaves no rows to validate on. Write 2 or more folds.
    """

    target: str
    model: ModelKind | None = None
    classes: bool = False
    penalty: PenaltySharing | None = None
    group: tuple[str, ...] = ()
    groups: str | None = None
    time: str | None = None
    cv: int = 5
    repeats: int = 4
    minutes: float = 2.0
    seed: int = 0
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    missing: MissingRule = "median"
    weights: str | None = None
    l1_ratio: float | None = None
    max_iter: int = 100

    def __post_init__(self) -> None:
        if self.model == "additive" and (self.penalty or self.group):
            given = "--group" if self.group else f"--penalty {self.penalty}"
            raise BilevelError(
                f"{given} is for linear models: the additive model has penalties for the slope and the curve of every "
                "column. Leave it out, or write --model ridge, elastic-net or logistic."
            )
        if self.penalty is None:
            object.__setattr__(self, "penalty", "groups" if self.group else "per-feature")
        legal = {"model": get_args(ModelKind), "penalty": get_args(PenaltySharing), "missing": get_args(MissingRule)}
        for name, values in legal.items():
            value = getattr(self, name)
            if value not in values and not (name == "model" and value is None):
                raise BilevelError(f"--{name} {value} is not known. Write one of {', '.join(values)}.")
        if self.cv < 2:
            raise BilevelError(f"--cv {self.cv} leaves no rows to validate on. Write 2 or more folds.")
        if self.repeats < 1:
            raise BilevelError(f"--repeats {self.repeats} is not a number of repeats. Write 1 or more.")
        if not self.minutes > 0:
            raise BilevelError(f"--minutes {self.minutes:g} is not a time limit. Write a number above 0.")
        if self.l1_ratio is not None and self.model != "elastic-net":
            raise BilevelError(f"--l1-ratio {self.l1_ratio:g} is for the elastic net. Write --model elastic-net too.")
        if self.l1_ratio is not None and not 0 < self.l1_ratio <= 1:
            raise BilevelError(f"--l1-ratio {self.l1_ratio:g} is not in (0, 1]. For 0, write --model ridge.")
        if self.penalty == "groups" and not self.group:
            raise BilevelError("--penalty groups needs --group PATTERN=NAME, FILE.csv, FILE.json, prefix or columns.")
        if self.penalty != "groups" and self.group:
            raise BilevelError(f"--group needs --penalty groups, not {self.penalty}.")
        if self.time is not None and self.groups is not None:
            raise BilevelError("--time and --groups are two ways to split the rows. Write one of them.")
        if self.target in (*self.drop, self.weights, self.groups, self.time):
            raise BilevelError(f"The target {self.target!r} cannot be dropped, or be the weights, groups or time too.")
