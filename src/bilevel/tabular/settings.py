"""What `tune` is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from bilevel.errors import BilevelError
from bilevel.tabular.target import MODELS, Model

PENALTIES = ("shared", "per-feature", "groups")
MISSING = ("error", "median", "drop")


@dataclass(frozen=True)
class TuneSettings:
    """Settings of one tuning.

    Args:
        target: the column to predict.
        model: ridge, elastic-net or logistic; None chooses from the target.
        penalty: one for all features, one for each, or one for each group of them.
        groups: for penalty="groups": a file, "prefix" or "columns"; see `bilevel.tabular.groups`.
        cv: folds of the cross-validation that the penalties are tuned on, inside the training rows.
        test: the share of rows that no fit sees.
        seed: of the split and of the folds.
        drop: columns to leave out.
        categorical: columns to turn into indicators, whatever they hold.
        one_hot: turn every text column into indicators.
        missing: what to do with empty fields: refuse them, fill them in, or leave their rows out.
        weights: a column of sample weights.
        l1_ratio: of the elastic net.
        max_iter: hyperiterations at most.
        refit: fit the saved model to all rows, with the tuned penalties.

    >>> TuneSettings("price", cv=1)
    Traceback (most recent call last):
    bilevel.errors.BilevelError: --cv 1 leaves nothing to validate on; write 2 or more folds.
    """

    target: str
    model: Model | None = None
    penalty: Literal["shared", "per-feature", "groups"] = "per-feature"
    groups: str | None = None
    cv: int = 5
    test: float = 0.25
    seed: int = 0
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    one_hot: bool = False
    missing: Literal["error", "median", "drop"] = "error"
    weights: str | None = None
    l1_ratio: float = 0.5
    max_iter: int = 100
    refit: bool = True

    def __post_init__(self) -> None:
        for name, value, legal in (
            ("model", self.model, (None, *MODELS)),
            ("penalty", self.penalty, PENALTIES),
            ("missing", self.missing, MISSING),
        ):
            if value not in legal:
                known = ", ".join(str(one) for one in legal if one)
                raise BilevelError(f"--{name} {value} is not known; write one of {known}.")
        if self.cv < 2:
            raise BilevelError(f"--cv {self.cv} leaves nothing to validate on; write 2 or more folds.")
        if not 0 < self.test < 1:
            raise BilevelError(
                f"--test {self.test:g} is not a share of the rows; write one between 0 and 1, like 0.25."
            )
        if not 0 < self.l1_ratio <= 1:
            raise BilevelError(f"--l1-ratio {self.l1_ratio:g} is not in (0, 1]; for 0 write --model ridge.")
        if (self.penalty == "groups") != (self.groups is not None):
            asked = (
                "--penalty groups needs --groups"
                if self.groups is None
                else f"--groups needs --penalty groups, not {self.penalty}"
            )
            raise BilevelError(f"{asked}: write --penalty groups --groups FILE.csv, FILE.json, prefix or columns.")
        if self.target in (*self.drop, self.weights):
            raise BilevelError(f"The target {self.target!r} cannot be dropped or be the weights as well.")

    def plain(self) -> dict[str, Any]:
        return asdict(self)
