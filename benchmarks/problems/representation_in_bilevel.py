"""A case as one of the package's learners, `HyperRepresentation` by default, and a meta-batch."""

from __future__ import annotations

from typing import Any

import torch

import bilevel as bl
from bilevel.cli._allocator import keep_freed_memory
from bilevel.learners.base import Learner
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from harness.contract import Case


def learner_and_episodes(case: Case, kind: type[Learner] = HyperRepresentation, **options: Any) -> tuple[Any, bl.Task]:
    torch.set_num_threads(case.threads)
    keep_freed_memory()
    (images, labels), (queries, answers) = ([torch.from_numpy(x) for x in group] for group in (case.train, case.val))
    shape = tuple(images.shape[2:])
    learner = kind(case.network, shape, steps=case.steps, inner_lr=case.lr, **options)
    for value, weights in zip(learner.lam.values(), case.lam, strict=True):
        value.copy_(torch.from_numpy(weights))
    return learner, bl.Task((images, labels), (queries, answers))
