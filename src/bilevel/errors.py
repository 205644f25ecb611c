"""The exceptions and warnings of the package, and `Outcome`, a sentence that says how a run ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

Kind = Literal["finished", "converged", "stopped early", "interrupted", "diverged", "failed"]


class BilevelError(ValueError):
    """The request cannot work. The message says what was passed, why it fails and what to write instead."""


class DivergenceError(BilevelError):
    """A number is no longer finite. No argument was changed.

    Attributes:
        step: the inner step t at which it happened, or None when it happened outside the inner loop.
        loss: the inner loss at the last finite iterate, or None.
    """

    def __init__(self, message: str, *, step: int | None = None, loss: float | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.loss = loss


class BilevelWarning(UserWarning):
    """The numbers are right for what was asked, but probably not what was wanted."""


class Outcome(str):
    """How a run ended: a sentence to read, and its `kind` for programs.

    >>> outcome = Outcome("finished", "Ran all 10 hyperiterations.")
    >>> print(outcome, outcome.kind, outcome.ok)
    Ran all 10 hyperiterations. finished True
    """

    kind: Kind

    def __new__(cls, kind: Kind, sentence: str) -> Outcome:
        outcome = super().__new__(cls, sentence)
        outcome.kind = kind
        return outcome

    def __reduce__(self) -> tuple[Any, ...]:
        return (Outcome, (self.kind, str(self)))

    @property
    def ok(self) -> bool:
        return self.kind not in ("diverged", "failed")


def differences(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """The differences between two configurations, one phrase each; settings in `free` may differ.

    >>> differences({"ways": 5, "seed": 0}, {"ways": 20, "seed": 0})
    ['ways: 5 there, 20 here']
    """
    keys = [*before, *(key for key in now if key not in before)]
    return [
        f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} here"
        for key in keys
        if key not in free and before.get(key) != now.get(key)
    ]
