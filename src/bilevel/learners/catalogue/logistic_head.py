"""Logistic regression to convergence as the classifier: the paper's inner problem with T = ∞ and an L2 penalty."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.learners.linear_head import PENALTY, Leaves, SolvedHead, row_weights
from bilevel.linear_solvers.cg import CG
from bilevel.methods.implicit import Implicit

# The norm ‖∇L‖ at which Newton's method stops, in double precision.
NEWTON_TOLERANCE = 1e-9


class LogisticHead(SolvedHead):
    """w_λ = argmin of mean cross-entropy(Φw, y) + ρ/2 ‖w‖², solved by Newton's method and differentiated implicitly.

    The gradient is ∇f = ∇_λ E − ∂_λ∇L(w_λ, λ)ᵀ q with ∇²L(w_λ, λ) q = ∇_w E. L is strongly convex with μ = ρ, so the
    minimiser is unique and the certificates of `certify` apply. ρ and the scale s of the logits are leaves of λ.

    Open choices: the bias is penalised like the other weights. If classes have different numbers of images, the mean is
    over classes of the mean over the images of each class.
    """

    def inner(self, ways: int) -> Callable[[Tensor, Leaves, tuple[Tensor, Tensor]], Tensor]:
        def objective(w: Tensor, lam: Leaves, batch: tuple[Tensor, Tensor]) -> Tensor:
            features, labels = batch
            losses = F.cross_entropy(torch.bmm(features, w).flatten(0, 1), labels.flatten(), reduction="none")
            # A mean over the examples of an episode, and a sum over episodes, which are independent problems.
            fit = (row_weights(labels, ways).flatten() * losses).sum() / labels.shape[1]
            return fit + lam[PENALTY].double().exp() / 2 * w.square().sum()

        return objective

    def start(self, lam: Leaves, episodes: int, ways: int, examples: int) -> Tensor:
        return lam[PENALTY].double().new_zeros(episodes, self.features, ways)

    def classifier(self, w: Tensor, lam: Leaves, support: Tensor, labels: Tensor) -> Tensor:
        return w

    @property
    def dynamics(self) -> GradientDescent:
        # Newton's method computes the minimiser. The dynamics only defines the limit that is differentiated.
        return GradientDescent(1e-3)

    def best_method(self) -> Method:
        return Implicit(CG(tol=1e-10), newton=NEWTON_TOLERANCE)
