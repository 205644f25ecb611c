"""The types that the runner and the contestants share. This module imports numpy only, because every peer's
environment loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Computes the hypergradient once, from scratch, and returns its leaves. This call is timed.
Run = Callable[[], Sequence[Any]]


class Unavailable(Exception):
    """Raised by `prepare` if the contestant cannot be timed on this case. The message is the reason."""


@dataclass(frozen=True)
class Case:
    """One bilevel problem with all its numbers.

    Attributes:
        kind: the name of the objectives.
        lr: the constant step size of gradient descent.
        steps: T.
        network: the name of the representation, if the problem has one.
        threads: the number of threads that a contestant may use.
    """

    name: str
    kind: str
    lam: list[np.ndarray]
    start: list[np.ndarray]
    train: list[np.ndarray]
    val: list[np.ndarray]
    lr: float
    steps: int
    network: str = ""
    threads: int = 1

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.name}.npz"
        groups = {"lam": self.lam, "start": self.start, "train": self.train, "val": self.val}
        arrays: dict[str, Any] = {
            f"{group}/{index}": array for group, members in groups.items() for index, array in enumerate(members)
        }
        settings = {"kind": self.kind, "lr": self.lr, "steps": self.steps}
        np.savez(path, **settings, network=self.network, threads=self.threads, **arrays)
        return path

    @staticmethod
    def load(path: Path) -> Case:
        with np.load(path) as stored:

            def group(name: str) -> list[np.ndarray]:
                return [
                    stored[f"{name}/{index}"]
                    for index in range(sum(key.startswith(f"{name}/") for key in stored.files))
                ]

            return Case(
                path.stem,
                str(stored["kind"]),
                group("lam"),
                group("start"),
                group("train"),
                group("val"),
                float(stored["lr"]),
                int(stored["steps"]),
                str(stored["network"]),
                int(stored["threads"]),
            )
