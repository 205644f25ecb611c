"""The nouns of the paper: a bilevel problem, and the data of one learning problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bilevel import trees
from bilevel.trees import Tree


@dataclass(frozen=True)
class Task:
    """One learning problem's data: D_tr for the inner objective, D_val for the outer one (Section 2.1).

    Args:
        train: a batch (any tree of tensors), or a pure function of the step number t = 1…T that returns one.
            Pure, because the methods replay steps: `train(3)` must give the same batch whenever it is called.
        val: a batch.
    """

    train: Any
    val: Any

    def batch(self, t: int) -> Tree:
        """The training data of step t."""
        return self.train(t) if callable(self.train) else self.train


trees.register(Task, ["train", "val"])


@dataclass(frozen=True, eq=False)
class Problem:
    """min over λ of E(w_λ, λ) subject to w_λ = argmin_w L_λ(w) (Eqs. 1–4), as four pure functions.

    Args:
        inner: `inner(w, lam, batch)`, the inner objective L_λ(w) on a batch of training data; a scalar.
        outer: `outer(w, lam, batch)`, the outer objective E(w, λ) on the validation data; a scalar.
        init: `init(lam)`, the start w_0 = Φ_0(λ); it may use λ, and is then differentiated too.
        encode: `encode(lam, task) -> task` maps a task's data once, pictures to features say. It is computed once and
            differentiated once, however many steps follow and whichever method is used.
        check_derivatives: compare autograd's derivatives of `inner` and `outer` with differences at the first call, and
            refuse a problem where they differ. False is for those that differ on purpose: straight-through estimators,
            stopped gradients.

    >>> import torch, bilevel as bl
    >>> ridge = bl.Problem(
    ...     inner=lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).sum() + (lam.exp() * w**2).sum(),
    ...     outer=lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean(),
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    """

    inner: Callable[[Tree, Tree, Tree], Tensor]
    outer: Callable[[Tree, Tree, Tree], Tensor]
    init: Callable[[Tree], Tree]
    encode: Callable[[Tree, Task], Task] | None = None
    check_derivatives: bool = True
    # What has been checked already for this problem, so that a loop of a million calls checks once.
    checked: dict[Any, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Problem, (self.inner, self.outer, self.init, self.encode, self.check_derivatives))
