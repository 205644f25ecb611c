"""An honest estimate of what tuning gained: part of the validation examples is neither trained nor tuned on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.tuning.batches import Batch, whole_batch
from bilevel.tuning.training_problem import Lam, TrainingProblem, Weights


@dataclass(frozen=True)
class HeldOutEstimate:
    """Losses on validation examples that nothing was tuned on.

    Attributes:
        count: how many examples.
        tuned: the loss of the tuned model.
        start: that of the model trained with the values before tuning.
        val_alone: that of the model trained, with the values before tuning, on the other validation examples instead of
            the training set.
    """

    count: int
    tuned: float
    start: float
    val_alone: float

    def __str__(self) -> str:
        return (
            f"On {self.count} held-out examples: {self.start:.6g} before, {self.tuned:.6g} after, {self.val_alone:.6g} "
            "if trained on the validation examples alone."
        )


def split_validation(val: Any, share: float, like: Tensor, seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The validation examples to tune on, and those held out, as pairs (inputs, targets)."""
    if not (isinstance(share, (int, float)) and 0 < share < 1):
        raise BilevelError(f"holdout={share!r} is not a share of the validation examples; pass a number such as 0.3.")
    batch = whole_batch(val, seed, like, "val")
    out = round(share * batch.count)
    if not 0 < out < batch.count:
        raise BilevelError(f"holdout={share:g} of {batch.count} validation examples leaves {out} of them; pass more.")
    order = torch.randperm(batch.count, generator=torch.Generator().manual_seed(seed)).to(like.device)

    def rows(chosen: Tensor) -> tuple[Any, Any]:
        def taken(leaf: Any) -> Any:
            return leaf[chosen] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == batch.count else leaf

        return trees.map(taken, batch.inputs), trees.map(taken, batch.targets)

    return rows(order[out:]), rows(order[:out])


def judge_held_out(
    job: TrainingProblem,
    lam: Lam,
    w: Weights,
    held: tuple[Any, Any],
    on_val_alone: Callable[[tuple[Any, Any]], TrainingProblem],
) -> HeldOutEstimate:
    """The losses on the held-out examples. It warns if the validation examples alone do as well.

    Args:
        w: the parameters trained with λ.
        on_val_alone: the problem whose training set is the validation examples, given those to be judged on.
    """
    batch: Batch = whole_batch(held, job.seed, job.network.like, "held-out")
    start, _ = job.run(job.space.lam)
    with torch.no_grad():
        tuned, before = (float(job.outer(one, at, batch)) for one, at in ((w, lam), (start, job.space.lam)))
    alone = on_val_alone(held)
    found = HeldOutEstimate(batch.count, tuned, before, alone.run(alone.space.lam)[1])
    if found.val_alone <= found.tuned:
        warnings.warn(
            f"{found} The validation examples alone do as well as tuning with them: train on them, or on both sets.",
            BilevelWarning,
            stacklevel=3,
        )
    return found
