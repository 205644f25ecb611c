"""The hyper-representation as the package's learner."""

from __future__ import annotations

import torch

import bilevel as bl
from bilevel.meta.hyper_representation import HyperRepresentation
from bilevel.models._allocator import keep_freed_memory
from harness.contract import Case


def learner_and_episodes(case: Case) -> tuple[HyperRepresentation, bl.Task]:
    torch.set_num_threads(case.threads)
    keep_freed_memory()
    (images, labels), (queries, answers) = ([torch.from_numpy(x) for x in group] for group in (case.train, case.val))
    shape = tuple(images.shape[2:])
    learner = HyperRepresentation(case.network, shape, steps=case.steps, inner_lr=case.lr)
    for value, weights in zip(learner.lam.values(), case.lam, strict=True):
        value.copy_(torch.from_numpy(weights))
    return learner, bl.Task((images, labels), (queries, answers))
