"""Anderson's acceleration of a fixed-point iteration (Anderson, 1965; Walker and Ni, 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, Setting, at, mapped
from bilevel.trees import Tree


@dataclass(frozen=True)
class Anderson(Dynamics):
    """w_t = w + mixing·g − (ΔW + mixing·ΔG)γ,  γ = argmin ‖g − ΔG γ‖,  with g = Φ(w) − w at w = w_{t−1}.

    ΔW and ΔG are the last `memory` changes of w and of g: a multisecant method. It needs no contraction, and it usually
    takes far fewer evaluations of Φ than `Picard`. The least-squares problem is regularised by `ridge`, relative to the
    size of ΔG, so that the step has a derivative. Where Φ is expensive, differentiate the fixed point by `Implicit()`
    and not the steps.

    Args:
        memory: the number of changes that are kept.
        mixing: how much of the residual is added.
        ridge: the regularisation.
    """

    memory: int = 5
    mixing: Setting = 1.0
    ridge: float = 1e-10

    equations: ClassVar[bool] = True
    undifferentiated: ClassVar[tuple[str, ...]] = ("ridge",)

    def init(self, w: Tree) -> Tree:
        vector = trees.to_vector(trees.leaves(w))
        changes = vector.new_zeros(self.memory, vector.numel())
        return {"w": torch.zeros_like(vector), "g": torch.zeros_like(vector), "dw": changes, "dg": changes.clone()}

    def step(self, loss: Loss, w: Tree, state: dict[str, Tensor], t: int) -> tuple[Tree, Tree]:
        points, spec = trees.flatten(w)
        vector, mixing = trees.to_vector(points), at(self.mixing, t)
        g = trees.to_vector(trees.leaves(mapped(loss, w, self))) - vector
        # Before the first step there is no last w, and its g is exactly zero.
        known = (state["g"] != 0).any()
        dw, dg = (
            torch.cat([torch.where(known, new - old, torch.zeros_like(new)).unsqueeze(0), kept[:-1]])
            for new, old, kept in ((vector, state["w"], state["dw"]), (g, state["g"], state["dg"]))
        )
        gram = dg @ dg.T
        # Changes as small as the rounding of w are ignored, so that a converged w stays where it is.
        rounding = (100 * torch.finfo(g.dtype).eps * (vector.norm() + g.norm()).detach()) ** 2
        ridge = self.ridge * gram.diagonal().sum() + rounding.clamp_min(torch.finfo(g.dtype).tiny)
        gamma = torch.linalg.solve(gram + ridge * torch.eye(self.memory, dtype=g.dtype, device=g.device), dg @ g)
        after = vector + mixing * g - gamma @ (dw + mixing * dg)
        return spec.unflatten(trees.from_vector(after, points)), {"w": vector, "g": g, "dw": dw, "dg": dg}

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree:
        return mapped(loss, w, self)

    @classmethod
    def examples(cls) -> list[Self]:
        return [cls(memory=1, ridge=0.3)]
