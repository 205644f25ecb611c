"""The meta-learner LSTM (Ravi and Larochelle, 2017): the weights of a task are the cell state of an LSTM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bilevel.learners.base import LearnerOptions
from bilevel.learners.catalogue.learned_optimizer import (
    OPTIMIZER,
    RecurrentLearner,
    RecurrentOptions,
    log_and_sign,
)
from bilevel.learners.catalogue.maml import Weights
from bilevel.learners.settings import setting
from bilevel.trees import Tree

# The initial bias of the forget gate, so that the gate begins at σ(5) = 0.993.
FORGET = 5.0


@dataclass(frozen=True, kw_only=True)
class MetaLSTMOptions(RecurrentOptions):
    """The settings of `MetaLSTM`. `inner_lr`, below 1, is the initial value of the input gate."""

    inner_lr: float = setting(0.1, above=0, below=1)


class Gates(nn.Module):
    """An LSTM layer on the gradient and the loss, and the two gates of a coordinate."""

    def __init__(self, hidden: int, rate: float) -> None:
        super().__init__()
        self.layer = nn.LSTMCell(4, hidden)
        self.forget, self.input = nn.Linear(hidden + 2, 1), nn.Linear(hidden + 2, 1)
        for gate, bias in ((self.forget, FORGET), (self.input, math.log(rate / (1 - rate)))):
            nn.init.uniform_(gate.weight, -0.01, 0.01)
            nn.init.constant_(gate.bias, bias)

    def forward(self, inputs: Tensor, w: Tensor, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        before, forget, rate = state
        now = self.layer(inputs, before)
        forget = self.forget(torch.cat([now[0], torch.stack([w, forget], 1)], 1)).sigmoid()[:, 0]
        rate = self.input(torch.cat([now[0], torch.stack([w, rate], 1)], 1)).sigmoid()[:, 0]
        return forget, rate, (now, forget, rate)


class MetaLSTM(RecurrentLearner):
    """c_t = f_t ⊙ c_{t−1} + i_t ⊙ c̃_t with c = w, c̃_t = −∇L(w_{t−1}): the gate f and the step size i are learned.

        f_t = σ(W_F [h_t, w_{t−1}, f_{t−1}] + b_F),   i_t = σ(W_I [h_t, w_{t−1}, i_{t−1}] + b_I)

    h_t is the output of an LSTM layer on the gradient and the loss, both scaled by `log_and_sign`. All coordinates
    share the weights of the gates, which are leaves of λ with the network and the start c_0. The hypergradient treats
    gradient and loss as constants (first_order), as in the paper. Choices: by default w is the last layer, with c_0 = 0
    (with head=learned, c_0 is part of λ). With adapts=all, as in the paper, w is all weights. The forget gate begins at
    0.993 and the input gate at inner_lr.
    """

    Options: ClassVar[type[LearnerOptions]] = MetaLSTMOptions

    def build(self) -> None:
        super().build()
        self.add_part(OPTIMIZER, Gates(self.options.hidden, self.options.inner_lr))

    def begin(self, w: Tensor) -> Tree:
        zero = w.new_zeros(len(w), self.options.hidden)
        return (zero, zero), torch.zeros_like(w), torch.zeros_like(w)

    def move(self, lam: Weights, w: Tensor, slopes: Tensor, loss: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        p = self.options.log_range
        inputs = torch.cat([log_and_sign(slopes, p), log_and_sign(loss, p).expand(len(w), 2)], 1)
        forget, rate, state = self.part(OPTIMIZER, lam, inputs, w, state)
        return forget * w - rate * slopes, state
