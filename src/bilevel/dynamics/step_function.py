"""A step function as a dynamics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, gradient, update
from bilevel.trees import Tree


def _no_state(w: Tree) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class StepFunction(Dynamics):
    """`function(loss, w, state, t) -> (w, state)` as a dynamics; `start(w)` is the auxiliary state before step 1.

    A function with these four parameters can be passed as the dynamics itself. It may compute gradients in any way:
    `torch.autograd.grad(loss(w), …, create_graph=True)`, or `bilevel.gradient(loss, w)`, which is faster where no graph
    is needed.
    """

    function: Callable[[Loss, Tree, Tree, int], tuple[Tree, Tree]]
    start: Callable[[Tree], Tree] = _no_state

    def init(self, w: Tree) -> Tree:
        return self.start(w)

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        # New containers, because the function may write the next state into the dict or list that it is given.
        state = trees.map(lambda leaf: leaf, state)
        if torch.is_grad_enabled():
            return self.function(loss, _requiring_grad(w), state, t)
        with torch.enable_grad():
            result = self.function(loss, _requiring_grad(w), state, t)
        return trees.detach(result[0]), trees.detach(result[1])

    @classmethod
    def examples(cls) -> list[Self]:
        def sign_descent(loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
            return update(lambda w, g: w - 0.1 * torch.tanh(g), w, gradient(loss, w)), state

        return [cls(sign_descent)]


def _requiring_grad(w: Tree) -> Tree:
    """w such that `torch.autograd.grad(loss(w), w)` works in the user's function."""

    def prepare(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

    return trees.map(prepare, w)
