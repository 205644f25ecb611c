"""An unbiased estimate of the gain from tuning, on validation examples that are neither trained nor tuned on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError, BilevelWarning
from bilevel.tasks.holdout import shuffled
from bilevel.tuning.batches import Batch, whole_batch
from bilevel.tuning.training_problem import Lam, TrainingProblem, Weights


@dataclass(frozen=True)
class HeldOutEstimate:
    """Losses on validation examples that were not used for tuning.

    Attributes:
        count: the number of examples.
        tuned: the loss of the tuned model.
        start: the loss of the model trained with the values before tuning.
        val_alone: the loss of the model trained with the values before tuning on the other validation examples, without
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
        raise BilevelError(
            f"holdout={share!r} is not a fraction of the validation examples. Pass a number such as 0.3."
        )
    batch = whole_batch(val, seed, like, "val")
    count = round(share * batch.count)
    if not 0 < count < batch.count:
        raise BilevelError(
            f"holdout={share:g} of {batch.count} validation examples holds out {count}. Pass more examples or another "
            "fraction, so that both parts have some."
        )
    order = shuffled(batch.count, seed).to(like.device)

    def rows(chosen: Tensor) -> tuple[Any, Any]:
        def select(leaf: Any) -> Any:
            return leaf[chosen] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == batch.count else leaf

        return trees.map(select, batch.inputs), trees.map(select, batch.targets)

    return rows(order[count:]), rows(order[:count])


def evaluate_held_out(
    job: TrainingProblem,
    lam: Lam,
    w: Weights,
    held_out: tuple[Any, Any],
    on_val_alone: Callable[[tuple[Any, Any]], TrainingProblem],
) -> HeldOutEstimate:
    """The losses on the held-out examples. It warns if training on the validation examples alone is as good.

    Args:
        w: the parameters trained with λ.
        on_val_alone: a function from evaluation examples to the problem that trains on the validation examples.
    """
    batch: Batch = whole_batch(held_out, job.seed, job.network.like, "held-out")
    start, _ = job.run(job.space.lam)
    with torch.no_grad():
        tuned, before = (float(job.outer(*point, batch)) for point in ((w, lam), (start, job.space.lam)))
    alone = on_val_alone(held_out)
    estimate = HeldOutEstimate(batch.count, tuned, before, alone.run(alone.space.lam)[1])
    if estimate.val_alone <= estimate.tuned:
        warnings.warn(
            f"{estimate} Training on the validation examples alone is as good as tuning with them: train on them, or "
            "on both sets.",
            BilevelWarning,
            stacklevel=3,
        )
    return estimate
