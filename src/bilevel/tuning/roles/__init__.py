"""Roles of hyperparameters: one file each."""

from __future__ import annotations

import sys

from bilevel import discovery
from bilevel.tuning.roles.base import Hyperparameter


def find() -> dict[str, type[Hyperparameter]]:
    """Every role in this folder, by name."""
    return discovery.classes(sys.modules[__name__], Hyperparameter)


__all__ = ["Hyperparameter", "find"]
