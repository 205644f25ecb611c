"""A learned optimiser (Andrychowicz et al., 2016): a recurrent network computes the inner step of each coordinate."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bilevel import trees
from bilevel.dynamics import Dynamics, DynamicsLike, gradient
from bilevel.dynamics.base import Loss
from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.maml import MAML, MAMLOptions, Weights
from bilevel.learners.settings import setting
from bilevel.trees import Tree

OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(MAMLOptions):
    """The settings of learners whose inner steps are computed by a recurrent network.

    Args:
        adapts: what w is: "head", the last layer, or "all", also the weights of the network. Time and memory of a step
            are proportional to `hidden` times the size of w.
        hidden: units of a layer of the recurrent network.
        first_order: treat ∇L as a constant in the derivative, as the papers do. The hypergradient is then not the
            derivative of f_T.
        log_range: p of `log_and_sign`.
    """

    adapts: Literal["head", "all"] = "head"
    hidden: int = setting(20, least=1)
    first_order: bool = True
    log_range: float = setting(10.0, above=0)


@dataclass(frozen=True, kw_only=True)
class LearnedOptimizerOptions(RecurrentOptions):
    """The settings of `LearnedOptimizer`. `inner_lr` multiplies the output of the LSTM."""


class CoordinateLSTM(nn.Module):
    """Two LSTM layers and a linear layer, from the two inputs of a coordinate to its update."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(2, hidden), nn.LSTMCell(hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        first = self.first(inputs, state[0])
        second = self.second(first[0], state[1])
        return self.output(second[0])[:, 0], (first, second)


@dataclass(frozen=True)
class RecurrentDescent(Dynamics):
    """(w_t, s_t) = m_λ(w_{t−1}, ∇L, L, s_{t−1}), with all coordinates of w in one vector.

    Args:
        weights: the leaves of λ that a step uses.
        move: m, a function of these weights, w, ∇L, L and s.
        begin: s_0 for a vector w.
        first_order: whether ∇L and L are constants in the derivative of a step.
    """

    weights: Weights
    move: Callable[[Weights, Tensor, Tensor, Tensor, Tree], tuple[Tensor, Tree]]
    begin: Callable[[Tensor], Tree]
    first_order: bool

    def init(self, w: Tree) -> Tree:
        return self.begin(trees.to_vector(trees.leaves(w)))

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        values: list[Tensor] = []

        def recorded_loss(point: Tree) -> Tensor:
            values.append(loss(point))
            return values[-1]

        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.first_order):
            slopes = trees.to_vector(trees.leaves(gradient(recorded_loss, w)))
        value = values[-1] if torch.is_grad_enabled() and not self.first_order else values[-1].detach()
        leaves, spec = trees.flatten(w)
        after, state = self.move(self.weights, trees.to_vector(leaves), slopes, value, state)
        return spec.unflatten(trees.from_vector(after, leaves)), state


def log_and_sign(x: Tensor, p: float) -> Tensor:
    """(log|x|/p, sign x) if |x| ≥ e⁻ᵖ, else (−1, eᵖx): inputs of moderate size for any magnitude (Appendix A).

    >>> log_and_sign(torch.tensor([-1.0, 0.0]), 10.0).abs()
    tensor([[0., 1.],
            [1., 0.]])
    """
    least = math.exp(-p)
    large = x.abs() >= least
    logarithm = torch.where(large, x.abs().clamp(min=least).log() / p, -1.0)
    return torch.stack([logarithm, torch.where(large, x.sign(), x / least)], -1)


class RecurrentLearner(MAML):
    """A learner whose Φ_t is a recurrent network, applied to every coordinate of w separately."""

    strategy: ClassVar[str] = "optimisation"
    stacks = False  # the recurrent network sees the loss of one episode

    @property
    def adapts_network(self) -> bool:
        return bool(self.options.adapts == "all")

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return not self.options.first_order and (self.method or self.default_method).exact

    @property
    def dynamics(self) -> DynamicsLike:
        return self._descent

    def _descent(self, lam: Weights) -> Dynamics:
        weights = {name: leaf for name, leaf in lam.items() if name.startswith(f"{OPTIMIZER}.")}
        return RecurrentDescent(weights, self.move, self.begin, self.options.first_order)

    @abstractmethod
    def begin(self, w: Tensor) -> Tree:
        """The initial state of the recurrent network for a vector w."""

    @abstractmethod
    def move(self, lam: Weights, w: Tensor, slopes: Tensor, loss: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The next w and state; `slopes` is ∇L(w)."""


class LearnedOptimizer(RecurrentLearner):
    """w_t = w_{t−1} + η·m_t, (m_t, s_t) = LSTM_λ(∇L(w_{t−1}), s_{t−1}): one network for all coordinates, Φ_t(λ).

    λ is the LSTM with two layers, and the network of the features. By default w is the last layer, which begins at
    zero. With adapts=all the network's weights are part of w too, and λ holds their start. `log_and_sign` scales the
    gradients for the LSTM, and the hypergradient treats them as constants (first_order), both as in the paper. The
    paper's objective is the sum of the losses of all steps; here it is f_T, as for all learners.
    """

    Options: ClassVar[type[LearnerOptions]] = LearnedOptimizerOptions

    def build(self) -> None:
        super().build()
        self.add_part(OPTIMIZER, CoordinateLSTM(self.options.hidden))

    def begin(self, w: Tensor) -> Tree:
        zero = w.new_zeros(len(w), self.options.hidden)
        return (zero, zero), (zero, zero)

    def move(self, lam: Weights, w: Tensor, slopes: Tensor, loss: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        change, state = self.part(OPTIMIZER, lam, log_and_sign(slopes, self.options.log_range), state)
        return w + self.options.inner_lr * change, state
