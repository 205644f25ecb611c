"""A random search that takes as long as a tuning, for comparison."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from bilevel import trees
from bilevel.errors import DivergenceError
from bilevel.trees import Tree
from bilevel.tuning.batches import whole_batch
from bilevel.tuning.holdout import HeldOutEstimate
from bilevel.tuning.space import Space
from bilevel.tuning.training_problem import Lam, TrainingProblem
from bilevel.tuning.transforms import SimplexTransform

# Weights on a simplex are drawn if there are at most this many; otherwise they keep their start.
MAX_SIMPLEX = 10
# If a range has an infinite end, values are drawn within this many units of the start.
UNITS_AROUND_START = 3.0


@dataclass(frozen=True)
class RandomSearch:
    """The best of several random draws.

    Attributes:
        trials: the number of trainings, with those that diverged. The first has the start values.
        seconds: the time of the search, about that of the tuning.
        value: the smallest validation loss of the search.
        tuned: the validation loss of the tuning, for comparison.
        values: the hyperparameters of the smallest validation loss.
        held_out: the loss of these hyperparameters on the held-out examples, with `tune(..., holdout=…)`.
        tuned_held_out: the loss of the tuned model on the held-out examples.
    """

    trials: int
    seconds: float
    value: float
    tuned: float
    values: dict[str, Any] = field(repr=False)
    held_out: float | None = None
    tuned_held_out: float | None = None

    def __str__(self) -> str:
        comparison = ""
        if self.held_out is not None and self.tuned_held_out is not None:
            comparison = f" On the held-out examples: {self.held_out:.6g} by search, {self.tuned_held_out:.6g} tuned."
        return (
            f"A random search of {self.trials} training{'s' * (self.trials != 1)} in the same time, with one value for "
            f"each hyperparameter, reaches a validation loss of {self.value:.6g}; the tuned one is {self.tuned:.6g}."
            f"{comparison}"
        )


def random_search(job: TrainingProblem, seconds: float) -> tuple[int, float, float, Lam]:
    """Search for about this time: the number of trainings, the seconds, the best validation loss, and its λ.

    A draw has one value for all entries of a hyperparameter (one rate for all steps, one decay for all weights), as is
    usual in random search. It is uniform over the range, on the scale of the transform.
    """
    draw = torch.Generator().manual_seed(job.seed)
    started, trials = time.perf_counter(), 0
    best, best_lam = math.inf, job.space.lam
    while not trials or (time.perf_counter() - started) * (trials + 1) / trials <= seconds:
        lam = _drawn(job.space, draw) if trials else job.space.lam
        trials += 1
        try:
            _, value = job.run(lam)
        except DivergenceError:
            continue
        if value < best:
            best, best_lam = value, lam
    return trials, time.perf_counter() - started, best, best_lam


def search_for_comparison(
    job: TrainingProblem,
    seconds: float,
    tuned: float,
    held_out: tuple[Any, Any] | None,
    estimate: HeldOutEstimate | None,
) -> RandomSearch:
    """The random search for a tuning that took these seconds and reached the validation loss `tuned`."""
    trials, took, best, lam = random_search(job, seconds)
    loss = None
    if held_out is not None:
        w, _ = job.run(lam)
        with torch.no_grad():
            loss = float(job.outer(w, lam, whole_batch(held_out, job.seed, job.network.like, "held-out")))
    tuned_loss = None if estimate is None else estimate.tuned
    return RandomSearch(trials, took, best, tuned, job.space.plain(lam), loss, tuned_loss)


def _drawn(space: Space, draw: torch.Generator) -> dict[str, Tree]:
    lam: dict[str, Tree] = {}
    for name, transform in space.transforms.items():
        low, high = transform.leaf_range()
        start = space.lam[name]
        leaves = trees.leaves(start)
        free = not (math.isfinite(low) and math.isfinite(high))
        if isinstance(transform, SimplexTransform):
            few = leaves[0].numel() <= MAX_SIMPLEX
            spread = (
                2 * torch.randn(leaves[0].shape, generator=draw, dtype=torch.float64, device="cpu")
                if few
                else 0 * leaves[0]
            )
            lam[name] = trees.map(lambda leaf, x=spread: leaf + x.to(leaf), start)
            continue
        if free and trees.size(start) > 1:  # for example the initial weights: one value for all of them makes no sense
            lam[name] = start
            continue
        if free:
            middle, unit = float(leaves[0]), transform.unit(transform.value(leaves[0]))
            low, high = max(low, middle - UNITS_AROUND_START * unit), min(high, middle + UNITS_AROUND_START * unit)
        share = float(torch.rand((), generator=draw, dtype=torch.float64, device="cpu"))
        lam[name] = trees.map(lambda leaf, x=low + share * (high - low): torch.full_like(leaf, x), start)
    return lam
