"""What a random search would have reached in the time of a tuning."""

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

# Weights on a simplex with at most this many entries are drawn one by one.
FEW = 10
# Where a range has no end, values are drawn this many units around the start.
AROUND = 3.0


@dataclass(frozen=True)
class RandomSearch:
    """The best of random draws.

    Attributes:
        trials: trainings, the start values first; those that diverged count.
        seconds: how long they took, about as long as the tuning.
        value: the smallest validation loss.
        tuned: that of the tuning, for comparison.
        values: the hyperparameters that reached it.
        held_out: their loss on the held-out examples, with `tune(..., holdout=…)`, and
        tuned_held_out: that of the tuned model.
    """

    trials: int
    seconds: float
    value: float
    tuned: float
    values: dict[str, Any] = field(repr=False)
    held_out: float | None = None
    tuned_held_out: float | None = None

    def __str__(self) -> str:
        held = ""
        if self.held_out is not None and self.tuned_held_out is not None:
            held = f" On the held-out examples: {self.held_out:.6g} by search, {self.tuned_held_out:.6g} tuned."
        return (
            f"A random search of {self.trials} training{'s' * (self.trials != 1)} in the same time, with one value for "
            f"each hyperparameter, reaches a validation loss of {self.value:.6g}; the tuned one is {self.tuned:.6g}."
            f"{held}"
        )


def random_search(job: TrainingProblem, seconds: float) -> tuple[int, float, float, Lam]:
    """How many trainings fit into these seconds, how long they took, the best validation loss, and its λ.

    A draw has one value for all entries of a hyperparameter, uniform on the scale of its transform over its range: a
    rate for all steps, a decay for all weights. That is what people search over.
    """
    draw = torch.Generator().manual_seed(job.seed)
    began, trials = time.perf_counter(), 0
    best, found = math.inf, job.space.lam
    while not trials or (time.perf_counter() - began) * (trials + 1) / trials <= seconds:
        lam = _drawn(job.space, draw) if trials else job.space.lam
        trials += 1
        try:
            _, value = job.run(lam)
        except DivergenceError:
            continue
        if value < best:
            best, found = value, lam
    return trials, time.perf_counter() - began, best, found


def search_beside(
    job: TrainingProblem, seconds: float, tuned: float, held: tuple[Any, Any] | None, estimate: HeldOutEstimate | None
) -> RandomSearch:
    """The search beside a tuning that took these seconds and reached the validation loss `tuned`."""
    trials, took, best, lam = random_search(job, seconds)
    held_out = None
    if held is not None:
        w, _ = job.run(lam)
        with torch.no_grad():
            held_out = float(job.outer(w, lam, whole_batch(held, job.seed, job.network.like, "held-out")))
    judged = None if estimate is None else estimate.tuned
    return RandomSearch(trials, took, best, tuned, job.space.plain(lam), held_out, judged)


def _drawn(space: Space, draw: torch.Generator) -> dict[str, Tree]:
    found: dict[str, Tree] = {}
    for name, transform in space.transforms.items():
        low, high = transform.leaf_range()
        start = space.lam[name]
        leaves = trees.leaves(start)
        free = not (math.isfinite(low) and math.isfinite(high))
        if isinstance(transform, SimplexTransform):
            few = leaves[0].numel() <= FEW
            spread = 2 * torch.randn(leaves[0].shape, generator=draw, dtype=torch.float64) if few else 0 * leaves[0]
            found[name] = trees.map(lambda leaf, x=spread: leaf + x.to(leaf), start)
            continue
        if free and trees.size(start) > 1:  # weights to start from, for example: one value for all means nothing
            found[name] = start
            continue
        if free:
            middle, unit = float(leaves[0]), transform.unit(transform.value(leaves[0]))
            low, high = max(low, middle - AROUND * unit), min(high, middle + AROUND * unit)
        share = float(torch.rand((), generator=draw, dtype=torch.float64))
        found[name] = trees.map(lambda leaf, x=low + share * (high - low): torch.full_like(leaf, x), start)
    return found
