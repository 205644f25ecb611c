"""Reptile (Nichol, Achiam and Schulman, 2018): λ moves towards the weights after training on a task."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.learners.catalogue.maml import MAML
from bilevel.problem import Task


class Reptile(MAML):
    """w_0 = λ, w_t = w_{t−1} − η ∇L_t(w_{t−1});  λ moves along the mean over episodes of (w_T − λ)/η.

    The optimiser of λ uses (λ − w_T)/η as the gradient. It is the sum of the gradients of the inner steps, and not the
    gradient of the value, which is the loss of w_T on the queries.

    In training the inner steps use all images of an episode, support and queries. The images of each class are
    distributed over T minibatches, one for each step: the paper shows that different minibatches are needed for a
    direction that improves fast adaptation. A new task is learned by T steps on its support set. The paper's inner
    algorithm is Adam without momentum; here it is gradient descent.
    """

    exact = False
    trains_on_cross_entropy = False  # the inner steps of training see the queries too
    also_uses: ClassVar[frozenset[str]] = frozenset()

    @torch.no_grad()
    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        values, solutions = [], []
        problem = self.episode_problem(int(task.train[1].max()) + 1)
        for support, labels, queries, answers in zip(*task.train, *task.val[:2], strict=True):
            batches = minibatches(torch.cat([support, queries]), torch.cat([labels, answers]), self.steps)
            episode = Task(lambda t, batches=batches: batches[(t - 1) % len(batches)], (queries, answers))
            *_, w = self.solutions(problem, episode, self.steps)
            values.append(problem.outer(w, self.lam, episode.val))
            solutions.append(w)
        rate = self.options.inner_lr
        direction = {
            name: torch.stack([(leaf - w[name]) / rate for w in solutions]).mean(0) for name, leaf in self.lam.items()
        }
        return torch.stack(values).mean(), direction


def minibatches(images: Tensor, labels: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """The images, distributed over at most `count` minibatches, each of which has images of every class.

    >>> [y.tolist() for _, y in minibatches(torch.zeros(5, 1), torch.tensor([0, 0, 0, 1, 1]), 3)]
    [[0, 0, 1], [0, 1]]
    """
    members = F.one_hot(labels)
    rank = (members.cumsum(0) * members).sum(1) - 1  # the position of an image among those of its class
    part = rank % min(count, int(members.sum(0).min()))
    return [(images[part == i], labels[part == i]) for i in range(int(part.max()) + 1)]
