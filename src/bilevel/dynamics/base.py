"""The base class of dynamics Φ, and the operations that they share."""

from __future__ import annotations

import contextlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.trees import Tree

Loss: TypeAlias = Callable[[Tree], Tensor]
# A number, a tensor, a tree like w, or a function of t that returns one of them.
Setting: TypeAlias = Any


@dataclass(frozen=True)
class Dynamics(ABC):
    """One optimisation algorithm: w_t = Φ_t(w_{t−1}, λ), t = 1…T (Section 2.3).

    A dynamics holds settings only. Every setting may be a number, a tensor, a tree like w (a value per parameter) or a
    function of t that returns one of these (a schedule). To learn a setting, pass a function of λ as the dynamics:
    `dynamics=lambda lam: GradientDescent(lr=lam["lr"].exp())`.
    """

    # True promises that no leaf of the next w is computed from another leaf of the next w. Otherwise the engine
    # separates the leaves in the graph before it takes the next gradient, which costs a few microseconds.
    leafwise: ClassVar[bool] = False
    # True if a step needs the map or the residuals of a problem that is given by equations; see `EquationLoss`.
    equations: ClassVar[bool] = False
    # False if a step is a solver of its own that runs to a tolerance: only methods that do not differentiate the steps
    # may be used, which means `Implicit`.
    differentiable: ClassVar[bool] = True
    # True if late steps may leave w unchanged: at a tolerance, or where a line search finds no smaller value. Such a
    # step is not a contraction, so `Truncated`, which relies on contraction, is refused.
    stops: ClassVar[bool] = False
    # Settings that decide when to stop or which branch is taken. They have no derivative.
    undifferentiated: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        # A subclass that overrides `step` must declare anew what the steps are known to do.
        if "step" in vars(cls) and "leafwise" not in vars(cls):
            cls.leafwise = False
        if "step" in vars(cls) or "init" in vars(cls):
            for name in ("heavy_ball_form", "largest_step", "slope_decay", "stationary_step"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Dynamics, name))

    @property
    def kind(self) -> str:
        """The class, with those of the dynamics or the optimiser inside: what auxiliary variables belong to."""
        inside = [value for value in vars(self).values() if isinstance(value, (type, Dynamics))]
        names = [value.__name__ if isinstance(value, type) else value.kind for value in inside]
        return f"{type(self).__name__}({', '.join(names)})" if names else type(self).__name__

    def init(self, w: Tree) -> Tree:
        """The auxiliary variables (velocities, moments) before the first step; they are differentiated like w."""
        return ()

    @abstractmethod
    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        """Step t: the next w and the next auxiliary variables.

        It must be a pure function of its arguments, built of differentiable operations; `gradient(loss, w)` gives ∇L.
        """

    def heavy_ball_form(self, t: int) -> tuple[Any, Any] | None:
        """`(lr, momentum)` where step t is v ← momentum·v − lr·∇L(w), w ← w + v, v_0 = 0; None where it is not.

        `Spectral`, `Reversible` and the certificates use it.
        """
        return None

    def largest_step(self, nu: float, t: int) -> tuple[float, float] | None:
        """The step size in use at step t, and the largest one that converges where the curvature is ν; None if
        unknown."""
        form = self.heavy_ball_form(t)
        return None if form is None else (largest(form[0]), 2 * (1 - largest(trees.map(operator.neg, form[1]))) / nu)

    def slope_decay(self, t: int) -> float:
        """ρ where the limits satisfy ∇L(w) + ρ·w = 0: a weight decay that the step adds to its gradient; 0 by
        default."""
        return 0.0

    def stationary_step(self, loss: Loss, w: Tree, t: int) -> Tree | None:
        """A step without auxiliary variables whose fixed points are this dynamics' limits.

        None, the default, says that the limits are the points with ∇L + ρ·w = 0, ρ the `slope_decay`.
        """
        return None

    def iterations(self, state: Tree) -> int | None:
        """For a dynamics that stops at a tolerance: how many steps it took so far; None for all others."""
        return None

    def finished(self, state: Tree) -> bool:
        """Whether the next steps would change nothing, because a tolerance is reached."""
        return False

    @classmethod
    def examples(cls) -> list[Self]:
        """Instances for the conformance battery of `bilevel.testing`, fit for a loss with curvature in [0.5, 4]."""
        try:
            return [cls()]
        except TypeError:
            raise BilevelError(
                f"{cls.__name__} has settings without defaults, so the battery cannot build one. Give it a classmethod "
                "`examples` that returns a few instances."
            ) from None


@dataclass(frozen=True)
class EquationLoss:
    """½‖r(w)‖² as the loss of a step, together with the residual r and, where it is like w, the map Φ(w) = w − r(w)."""

    value: Loss
    residual: Callable[[Tree], Tree]
    fixed_point: Callable[[Tree], Tree] | None

    def __call__(self, w: Tree) -> Tensor:
        return self.value(w)


def mapped(loss: Loss, w: Tree, dynamics: Any) -> Tree:
    """Φ(w), for a dynamics that iterates the map of the problem."""
    fixed_point = getattr(loss, "fixed_point", None)
    if fixed_point is None:
        raise BilevelError(
            f"{dynamics} iterates the map of a fixed point, and this problem has none. Write "
            "Problem(fixed_point=…, outer=…, init=…) or Problem(root=…, …); to minimise an inner objective use "
            "GradientDescent(lr) or another dynamics."
        )
    return fixed_point(w)


def gradient(loss: Loss, w: Tree) -> Tree:
    """∇L(w) as a tree like w; differentiable itself exactly when gradients are enabled around the call."""
    points, rebuild = _take_apart(w)
    return rebuild(_slopes(loss, points, rebuild))


def gradient_step(loss: Loss, w: Tree, lr: Any) -> Tree:
    """w − lr·∇L(w); the tree is flattened and rebuilt once."""
    if not isinstance(lr, (int, float)):
        return update(lambda point, slope, rate: point - rate * slope, w, gradient(loss, w), settings=(lr,))
    points, rebuild = _take_apart(w)
    slopes = _slopes(loss, points, rebuild)
    return rebuild([torch.sub(point, slope, alpha=lr) for point, slope in zip(points, slopes, strict=True)])


def _slopes(loss: Loss, points: list[Tensor], rebuild: Callable[[list[Tensor]], Tree]) -> list[Tensor]:
    """The derivatives of the loss at the points."""
    differentiable = torch.is_grad_enabled()
    with contextlib.nullcontext() if differentiable else torch.enable_grad():
        live = [point if point.requires_grad else point.detach().requires_grad_() for point in points]
        parts = torch.autograd.grad(loss(rebuild(live)), live, create_graph=differentiable, allow_unused=True)
    return [
        # The gradient of an embedding may be sparse, which few operations support.
        torch.zeros_like(point) if part is None else part if part.layout == torch.strided else part.to_dense()
        for point, part in zip(points, parts, strict=True)
    ]


def _take_apart(w: Tree) -> tuple[list[Tensor], Callable[[list[Tensor]], Tree]]:
    """The leaves of w, and a function that rebuilds w from leaves.

    Tensors and flat dicts and lists of tensors are handled without the tree library, whose calls cost a tenth of a
    small step. The order of the leaves is therefore not that of `trees.leaves`.
    """
    if isinstance(w, Tensor):
        return [w], operator.itemgetter(0)
    if type(w) is dict and all(isinstance(leaf, Tensor) for leaf in w.values()):
        return list(w.values()), lambda leaves: dict(zip(w, leaves, strict=True))
    if type(w) is list and all(isinstance(leaf, Tensor) for leaf in w):
        return w, list
    leaves, spec = trees.flatten(w)
    return leaves, spec.unflatten


def at(setting: Setting, t: int) -> Any:
    """The value of a setting at step t: a schedule is called, anything else is returned as it is."""
    return setting(t) if callable(setting) and not isinstance(setting, Tensor) else setting


def per_leaf(setting: Any, w: Tree) -> list[Any]:
    """A setting's value for every leaf of w: one value for all, or a tree like w.

    >>> per_leaf(0.1, {"a": torch.zeros(2), "b": torch.zeros(3)})
    [0.1, 0.1]
    """
    count = len(trees.leaves(w))
    if isinstance(setting, (Tensor, float, int)):
        return [setting] * count
    values, spec = trees.flatten(setting)
    if spec != trees.flatten(w)[1]:
        raise BilevelError(
            f"A setting of the dynamics is a tree of {trees.describe(setting)}, but w is a tree of "
            f"{trees.describe(w)}. Pass one number, one tensor that broadcasts, or a tree with exactly w's structure."
        )
    return values


def update(function: Callable[..., Tensor], w: Tree, *others: Tree, settings: tuple[Any, ...] = ()) -> Tree:
    """Apply `function(w_leaf, *other_leaves, *setting_values)` to every leaf of w."""
    if isinstance(w, Tensor) and all(isinstance(setting, (Tensor, float, int)) for setting in settings):
        return function(w, *others, *settings)
    points, spec = trees.flatten(w)
    columns = [points, *(trees.leaves(other) for other in others), *(per_leaf(setting, w) for setting in settings)]
    return spec.unflatten(function(*row) for row in zip(*columns, strict=True))


def descend(w: Tensor, g: Tensor, lr: Any) -> Tensor:
    """w − lr·g, as one operation where lr is a plain number."""
    return torch.sub(w, g, alpha=lr) if isinstance(lr, (int, float)) else w - lr * g


def largest(setting: Any) -> float:
    """The largest number in a setting."""
    return max(float(torch.as_tensor(leaf, device="cpu").detach().max()) for leaf in trees.leaves(setting))


def zeros_like(w: Tree) -> Tree:
    return trees.map(torch.zeros_like, w)


def root(x: Tensor) -> Tensor:
    """√x with derivative 0 at x = 0, where the plain root's is infinite.

    A weight whose gradient was zero at every step so far has second moment v = 0. The step g/(√v + ε) has derivative
    1/ε with respect to g there; the infinite slope of a plain root would turn it into NaN.
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))
