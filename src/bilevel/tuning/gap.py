"""A bound on the difference between the tuned model's validation loss and that of a fully trained model."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass

import torch

from bilevel.certificate import Certificate, certify
from bilevel.errors import BilevelError, Outcome
from bilevel.problem import Task
from bilevel.tuning.batches import Batch, ReplayedLoader, whole_batch
from bilevel.tuning.training_problem import Lam, TrainingProblem, Weights


@dataclass(frozen=True)
class Gap:
    """A bound on |f_T(λ) − f(λ)|, where f is the validation loss of the minimiser on the whole training set.

    Attributes:
        bound: the bound; infinite if there is none.
        sentence: what the bound assumes, or why there is none.
        certificate: the certificate of the inner problem, if it can be certified.
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


def find_gap(job: TrainingProblem, lam: Lam, w: Weights) -> Gap:
    """The gap at w = w_T. The certificate is about the inner objective of the whole training set."""
    if job.random:
        return _no_bound("the training loss is random (dropout or augmentation), so there is no single inner problem.")
    if job.network.like.dtype not in (torch.float32, torch.float64):
        return _no_bound(f"certificates need float32 or float64, and the model is {job.network.like.dtype}.")
    data = job.data
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if isinstance(data, Batch):
                certificate = certify(job.problem, lam, job.task, dynamics=job.dynamics, steps=job.steps)
            else:
                all_examples = whole_batch(data.loader, job.seed, job.network.like, "train")
                refusal = _other_objective(job, lam, w, data, all_examples)
                if refusal is not None:
                    return _no_bound(refusal)
                # w_T was computed from minibatches. The certificate is about the whole training set, at w_T.
                task = Task(all_examples, job.val)
                certificate = certify(job.problem, lam, task, dynamics=job.dynamics, steps=0, start=w)
                certificate = dataclasses.replace(certificate, steps=job.steps, search=None)
    except BilevelError as error:
        return _no_bound(str(error))
    remarks = " ".join(dict.fromkeys(str(warning.message) for warning in caught))
    sentence = Outcome(certificate.outcome.kind, f"{certificate.outcome} {remarks}".strip())
    return Gap(certificate.value_gap, sentence, certificate)


def _other_objective(
    job: TrainingProblem, lam: Lam, w: Weights, data: ReplayedLoader, all_examples: Batch
) -> str | None:
    """Why minibatches minimise a different objective from that of the whole training set, or None.

    With a sum over examples instead of a mean, the loss of N examples weighs N/B times as much against a penalty as
    that of a batch of B. A sampler that repeats some examples gives them more weight.
    """
    if len(set(all_examples.index.tolist())) < all_examples.count:
        return "the training loader's sampler repeats examples, so minibatches do not minimise the plain training loss."
    with torch.no_grad():
        all_at_once = float(job.data_loss(w, lam, all_examples))
        batches = [data(t) for t in range(1, data.per_epoch + 1)]
        shown = sum(batch.count for batch in batches)
        by_batches = sum(float(job.data_loss(w, lam, batch)) * batch.count for batch in batches) / shown
    # A part of an epoch differs from all examples by chance. A full epoch differs slightly with class weights.
    tolerance = 0.05 if shown >= all_examples.count else 0.5
    if abs(by_batches - all_at_once) <= tolerance * abs(all_at_once):
        return None
    return (
        f"the training loss is {all_at_once:.3g} on all examples and {by_batches:.3g} on its batches, as with "
        "reduction='sum'. Minibatches then minimise a different objective. Use a mean."
    )


def _no_bound(reason: str) -> Gap:
    return Gap(math.inf, Outcome("failed", f"No bound: {reason}"))
