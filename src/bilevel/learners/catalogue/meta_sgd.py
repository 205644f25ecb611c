"""Meta-SGD (Li, Zhou, Chen and Li, 2017): MAML with a learned step size for every weight."""

from __future__ import annotations

from bilevel.dynamics import Dynamics, DynamicsLike
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.learners.catalogue.maml import HEAD, MAML, Weights

RATE = "rate."


class MetaSGD(MAML):
    """w_0 = λ, w_t = w_{t−1} − α ⊙ ∇L(w_{t−1}): λ holds the start and α, one step size per weight.

    As in the paper α is not constrained, so it may become negative. Choices: every α begins at inner_lr, so that the
    untrained learner is `maml` (in the paper α is random), and T is 5 (in the paper 1). With head=zero the last layer
    has one α per feature, which all classes share; with head=learned one α per weight. Methods that do not
    differentiate the steps refuse this learner, because they cannot compute the derivative in α.
    """

    def build(self) -> None:
        super().build()
        first = self.initial(self.lam, 1)
        self.lam |= {RATE + name: value.new_full(value.shape, self.options.inner_lr) for name, value in first.items()}

    @property
    def dynamics(self) -> DynamicsLike:
        return self._descent

    def _descent(self, lam: Weights) -> Dynamics:
        return GradientDescent({name: lam[RATE + name] for name in (HEAD, *self.representation.names)})
