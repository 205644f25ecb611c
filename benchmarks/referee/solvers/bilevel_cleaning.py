"""One weight per example: `NewtonLinear` for the inner problem, spectral projected gradients for the outer one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.nn.functional import one_hot

import bilevel as bl
from bilevel.structures import HeldOutLoss, LinearModels, LogLoss
from referee.bridge import TorchSolver, minimise
from referee.objectives import Bridged


class Solver(TorchSolver):
    """The outer variables are the weights σ(λ) in the box [0, 1], because L is linear in them. w is started warm."""

    name = "bilevel SPG, NewtonLinear"
    kinds: ClassVar[tuple[str, ...]] = ("cleaning",)
    # The factor of the scores in the outer objective. It is 1 in the referee's.
    sharpness = 1.0

    def prepare(self, ours: Bridged) -> None:
        features, classes = ours.train[0].shape[1], int(ours.train[1].max()) + 1

        def rows(x: Any, y: Any) -> tuple[Any, ...]:
            return x, one_hot(y, classes).T.to(x.dtype).contiguous(), x.new_full((1, len(x)), 1 / len(x))

        none, penalties = self.w0.new_zeros(()), self.w0.new_full((features,), 2 * ours.l2)
        model = LinearModels(LogLoss(), lambda weights: penalties, weight=lambda weights: weights)
        self.start = self.w0.new_zeros(1, classes, features)
        self.problem = bl.Problem(model, HeldOutLoss(model, lambda weights, data: none), lambda weights: self.start)
        self.task = bl.Task(rows(*ours.train[:2]), (*rows(self.sharpness * ours.val[0], ours.val[1]), none))

    def solve(self, show: Callable[[Any], bool]) -> None:
        minimise(
            self.problem,
            self.lam0.sigmoid(),
            self.task,
            show,
            dynamics=bl.GradientDescent(0.1),
            steps=0,
            start=self.start,
            method=bl.NewtonLinear(tol=0.1, dense=False),
            algorithm=bl.SPG(tol=0.0),
            constraint=bl.Box(0, 1),
        )

    def result(self, here: bl.Iteration) -> tuple[Any, Any]:
        return here.hypergradient.inner[0].T, here.lam.logit(1e-6)
