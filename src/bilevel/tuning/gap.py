"""How far the validation loss of the tuned model is from that of a fully trained one."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bilevel import trees
from bilevel.certificate import Certificate, certify
from bilevel.errors import BilevelError, Outcome
from bilevel.problem import Problem, Task
from bilevel.trees import Tree
from bilevel.tuning.batches import Batch, Replay


@dataclass(frozen=True)
class Gap:
    """A bound on |f_T(λ) − f(λ)|, where f has the inner problem solved on the whole training set, or why there is none.

    Attributes:
        bound: the bound; infinite where there is none.
        sentence: what it rests on, or why there is none.
        certificate: all that is known, if the inner problem is one that can be certified.
    """

    bound: float
    sentence: Outcome
    certificate: Certificate | None = None

    @property
    def applies(self) -> bool:
        return math.isfinite(self.bound)

    def __str__(self) -> str:
        if not self.applies:
            return str(self.sentence)
        return f"Training to the end would change the validation loss by at most {self.bound:.3g}. {self.sentence}"


def find_gap(
    problem: Problem,
    lam: Tree,
    w: Tree,
    task: Task,
    whole: Batch | None,
    dynamics: Any,
    steps: int,
    random: bool,
) -> Gap:
    """The gap at w = w_T. Certificates are about one inner objective: that of the whole training set.

    Args:
        whole: the whole training set where steps use minibatches; None where they use it anyway.
    """
    if random:
        return _no(
            "the training loss is random (dropout or augmentation), so there is no one inner problem to be solved."
        )
    kinds = {x.dtype for x in trees.tensors(w)}
    if not kinds <= {torch.float32, torch.float64}:
        return _no(f"certificates need float32 or float64, and the model is {', '.join(map(str, kinds))}.")
    try:
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            if whole is None:
                found = certify(problem, lam, task, dynamics=dynamics, steps=steps)
            else:
                # Minibatches have brought w to w_T; from there on the question is about the whole training set.
                found = certify(problem, lam, Task(whole, task.val), dynamics=dynamics, steps=0, start=w)
                found = dataclasses.replace(found, steps=steps, search=None)
    except BilevelError as error:
        return _no(str(error))
    remarks = " ".join(dict.fromkeys(str(one.message) for one in noticed))
    sentence = Outcome(found.outcome.kind, f"{found.outcome} {remarks}".strip())
    return Gap(found.value_gap, sentence, found)


def refuse_other_problem(loss: Callable[[Batch], Tensor], steps: Replay, whole: Batch) -> Gap | None:
    """A gap that says no where minibatches follow another objective than that of the whole training set.

    With a sum over examples in place of a mean, the whole set weighs N/B times as much against a penalty as a batch of
    B does; and a sampler that repeats some examples weighs them more.

    Args:
        loss: the training loss without penalties.
    """
    if len(set(whole.index.tolist())) < len(whole.index):
        return _no("the training loader's sampler repeats examples, so there is no one training set to be solved on.")
    with torch.no_grad():
        all_at_once = float(loss(whole))
        batches = [steps(t) for t in range(1, steps.per_epoch + 1)]
        shown = sum(len(batch.index) for batch in batches)
        one_by_one = sum(float(loss(batch)) * len(batch.index) for batch in batches) / shown
    # A part of an epoch differs from the whole by chance; a whole one with class weights a little, with a sum by much.
    tolerance = 0.05 if shown >= len(whole.index) else 0.5
    if abs(one_by_one - all_at_once) > tolerance * abs(all_at_once):
        return _no(
            f"the training loss is {all_at_once:.3g} on all examples and {one_by_one:.3g} on its batches, as with "
            "reduction='sum'. Minibatches then solve another problem than the whole training set. Use a mean."
        )
    return None


def _no(reason: str) -> Gap:
    return Gap(math.inf, Outcome("failed", f"No bound: {reason}"))
