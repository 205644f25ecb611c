"""The nouns of the paper: a bilevel problem, and the data of one learning problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree


@dataclass(frozen=True)
class Task:
    """One learning problem's data: D_tr for the inner objective, D_val for the outer one (Section 2.1).

    Args:
        train: a batch (any tree of tensors), or a pure function of the step number t = 1…T that returns one.
            Pure, because the methods replay steps: `train(3)` must give the same batch whenever it is called.
        val: a batch, or a pure function of the hyperiteration k = 1, 2, … that returns one, for `solve`.
    """

    train: Any
    val: Any

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        trees.register(cls, ["train", "val"])

    def batch(self, t: int) -> Tree:
        """The training data of step t."""
        return self.train(t) if callable(self.train) else self.train


trees.register(Task, ["train", "val"])


Objective: TypeAlias = Callable[[Tree, Tree, Tree], Tensor]
Equation: TypeAlias = Callable[[Tree, Tree, Tree], Tree]


@dataclass(frozen=True)
class HalfSquaredResidual:
    """½‖r(w, λ, batch)‖²: the inner objective of a problem that is given by equations r = 0, or by residuals."""

    residual: Equation

    def __call__(self, w: Tree, lam: Tree, batch: Tree) -> Tensor:
        parts = [0.5 * part.square().sum() for part in trees.leaves(self.residual(w, lam, batch))]
        return torch.stack(parts).sum()


@dataclass(frozen=True)
class Difference:
    """w − function(w, λ, batch), which turns a fixed point into a root and a root into a fixed point."""

    function: Equation
    name: str

    def __call__(self, w: Tree, lam: Tree, batch: Tree) -> Tree:
        image = self.function(w, lam, batch)
        shapes = [[leaf.shape for leaf in trees.leaves(tree)] for tree in (w, image)]
        if trees.flatten(image)[1] != trees.flatten(w)[1] or shapes[0] != shapes[1]:
            raise BilevelError(
                f"{self.name}(w, lam, batch) returned {trees.describe(image)} for a w of {trees.describe(w)}. It must "
                "return a tree like w. For residuals of another shape write Problem(residual=…)."
            )
        return trees.subtract(w, image)


def no_outer(w: Tree, lam: Tree, batch: Tree) -> Tensor:
    """The outer objective of a problem that was given none."""
    raise BilevelError(
        "This problem has no outer objective. inner_solution(problem, lam, task, …) needs none; for everything else "
        "write Problem(inner=…, outer=lambda w, lam, batch: …, init=…)."
    )


@dataclass(frozen=True)
class Problem:
    """min over λ of E(w_λ, λ) subject to w_λ = argmin_w L_λ(w) (Eqs. 1–4), as pure functions.

    In place of the inner objective, w_λ may be given by a fixed point w = Φ(w, λ), by a root F(w, λ) = 0, or as a
    solution of nonlinear least squares, min ½‖r(w, λ)‖². For the first two, L = ½‖w − Φ‖² and ½‖F‖².

    Args:
        inner: `inner(w, lam, batch)`, the inner objective L_λ(w) on a batch of training data; a scalar.
        outer: `outer(w, lam, batch)`, the outer objective E(w, λ) on the validation data; a scalar. May be left out if
            only `inner_solution` is called.
        init: `init(lam)`, the start w_0 = Φ_0(λ); it may use λ, and is then differentiated too.
        encode: `encode(lam, task) -> task` maps a task's data, for example pictures to features. It is computed and
            differentiated once, however many steps follow and whichever method is used.
        check_derivatives: compare autograd's derivatives of `inner` and `outer` with differences at the first call, and
            refuse a problem for which they differ. Pass False if they differ on purpose: straight-through estimators,
            stopped gradients.
        fixed_point: `fixed_point(w, lam, batch)`, a tree like w; for the dynamics `Picard` and `Anderson`.
        root: `root(w, lam, batch)`, a tree like w that is zero at the solution; the same as the fixed point w − F.
        residual: `residual(w, lam, batch)`, a tree of any shapes; for `LevenbergMarquardt`.

    >>> import torch, bilevel as bl
    >>> ridge = bl.Problem(
    ...     inner=lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).sum() + (lam.exp() * w**2).sum(),
    ...     outer=lambda w, lam, data: ((data[0] @ w - data[1]) ** 2).mean(),
    ...     init=lambda lam: torch.zeros_like(lam),
    ... )
    >>> cosine = bl.Problem(
    ...     fixed_point=lambda w, lam, _: torch.cos(lam * w), outer=lambda w, lam, _: w, init=torch.zeros_like
    ... )
    >>> hg = bl.hypergradient(cosine, torch.ones(()), bl.Task(None, None), dynamics=bl.Picard(), steps=100)
    >>> round(float(hg.value), 4), round(float(hg.grad), 4)
    (0.7391, -0.2975)
    """

    inner: Objective = None  # type: ignore[assignment] # derived where the problem is given by equations
    outer: Objective = no_outer
    init: Callable[[Tree], Tree] = None  # type: ignore[assignment] # refused in __post_init__
    encode: Callable[[Tree, Task], Task] | None = None
    check_derivatives: bool = True
    fixed_point: Equation | None = field(default=None, kw_only=True)
    residual: Equation | None = field(default=None, kw_only=True)
    root: InitVar[Equation | None] = field(default=None, kw_only=True)

    def __post_init__(self, root: Equation | None) -> None:
        names = ("inner", "fixed_point", "residual")
        given = [name for name in names if getattr(self, name) is not None] + ["root"] * (root is not None)
        if self.outer is None:
            self._set(outer=no_outer)
        # `dataclasses.replace` passes the functions that were derived here before.
        if self.init is None or (len(given) != 1 and not (root is None and self._is_derived())):
            what = "leaves out init" if self.init is None else f"gives {' and '.join(given) or 'none of them'}"
            raise BilevelError(
                "A Problem has an outer objective, an init, and one of inner, fixed_point, root and residual; this one "
                f"{what}. Write Problem(inner, outer, init), or Problem(fixed_point=…, outer=…, init=…)."
            )
        if root is not None:
            self._set(residual=root, fixed_point=Difference(root, "root"))
        elif self.fixed_point is not None and self.residual is None:
            self._set(residual=Difference(self.fixed_point, "fixed_point"))
        if self.residual is not None:
            self._set(inner=HalfSquaredResidual(self.residual))

    def _is_derived(self) -> bool:
        """Whether inner, residual and fixed_point are those of one system of equations."""
        if self.residual is None or self.inner != HalfSquaredResidual(self.residual):
            return False
        if self.fixed_point is None or self.fixed_point == Difference(self.residual, "root"):
            return True
        return self.residual == Difference(self.fixed_point, "fixed_point")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def reading(self, read: Callable[[Tree], Tree]) -> Problem:
        """The same problem for another λ, from which `read` takes the λ of this one."""

        def of(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda w, lam, batch: function(w, read(lam), batch)

        encode, init = self.encode, self.init
        parts: dict[str, Any] = {"outer": of(self.outer), "init": lambda lam: init(read(lam))}
        if encode is not None:
            parts["encode"] = lambda lam, task: encode(read(lam), task)
        if self.fixed_point is not None:
            parts["fixed_point"] = of(self.fixed_point)
        elif self.residual is not None:
            parts["residual"] = of(self.residual)
        else:
            parts["inner"] = of(self.inner)
        return Problem(**parts, check_derivatives=self.check_derivatives)
