"""Any `torch.optim` class with a `differentiable` switch, as a dynamics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from bilevel import trees
from bilevel.dynamics.base import Dynamics, Loss, at, gradient, root
from bilevel.errors import BilevelError
from bilevel.trees import Tree

# Classes whose lr may be a tensor that requires grad (torch 2.13, against central differences).
_LEARN_LR = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)

# Classes whose weight_decay is added to the gradient. AdamW shrinks the weights instead.
_DECAY_IN_SLOPE = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)


@dataclass(frozen=True, init=False)
class TorchOptim(Dynamics):
    """One step of a `torch.optim` optimiser: `TorchOptim(torch.optim.Adagrad, lr=0.1)`.

    Settings are the optimiser's own; each may be a function of t. A learned step size (a tensor as `lr`) works with
    SGD, Adam, AdamW, NAdam and RAdam; the other classes of torch 2.13 refuse it or lose its gradient, and both are
    errors here. The optimiser's state per parameter is the auxiliary state, and is differentiated.
    """

    optimizer: Any
    # A dict has no hash.
    settings: Mapping[str, Any] = field(hash=False)

    def __init__(self, optimizer: type[torch.optim.Optimizer], **settings: Any) -> None:
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "settings", settings)
        if "differentiable" not in inspect.signature(optimizer).parameters:
            raise BilevelError(
                f"torch.optim.{optimizer.__name__} has no `differentiable` switch, so one cannot differentiate through "
                "its step. Write the step as a function `step(loss, w, state, t)` and pass that as the dynamics."
            )

    def _refuse_learned_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse learned settings that make torch raise a TypeError or, as with ASGD, silently drop the gradient."""
        for name, value in settings.items():
            learned = any(leaf.requires_grad for leaf in trees.tensors(value))
            if learned and not (name == "lr" and issubclass(self.optimizer, _LEARN_LR)):
                raise BilevelError(
                    f"torch.optim.{self.optimizer.__name__} cannot learn {name!r}: torch would drop its gradient. The "
                    "lr of SGD, Adam, AdamW, NAdam and RAdam can be learned, and so can every setting of bilevel's own "
                    "dynamics."
                )

    def slope_decay(self, t: int) -> float:
        if self.optimizer not in _DECAY_IN_SLOPE or at(self.settings.get("decoupled_weight_decay", False), t):
            return 0.0
        decay = float(at(self.settings.get("weight_decay", 0.0), t))
        if self.optimizer is torch.optim.ASGD:
            decay += float(at(self.settings.get("lambd", 1e-4), t))
        return -decay if at(self.settings.get("maximize", False), t) else decay

    def init(self, w: Tree) -> Tree:
        # The classes of torch create their state at the first step.
        return [{} for _ in trees.leaves(w)]

    def step(self, loss: Loss, w: Tree, state: Tree, t: int) -> tuple[Tree, Tree]:
        points, spec = trees.flatten(w)
        grads = trees.leaves(gradient(loss, w))
        # The optimiser writes into its parameters and its state, so it gets copies, which stay in the graph.
        parameters = [point.clone() for point in points]
        settings = {k: at(v, t) for k, v in self.settings.items()}
        self._refuse_learned_settings(settings)
        try:
            optimizer = self.optimizer(parameters, differentiable=True, **settings)
            for parameter, grad, old in zip(parameters, grads, state, strict=True):
                # Some classes rescale the gradient they are given in place.
                parameter.grad = grad.clone()
                if old:
                    optimizer.state[parameter] = {k: _copy_of_state(k, v) for k, v in old.items()}
            with _Differentiable():
                optimizer.step()
        except (TypeError, ValueError, AssertionError) as error:
            raise BilevelError(
                f"torch.optim.{self.optimizer.__name__} refused the settings {dict(self.settings)}: {error}. If a "
                "setting is learned, use SGD, Adam, AdamW, NAdam or RAdam, or one of bilevel's own dynamics."
            ) from error
        tensors = _detached_unless_recording
        new_state = [{k: tensors(v) for k, v in optimizer.state[parameter].items()} for parameter in parameters]
        return spec.unflatten(tensors(parameter) for parameter in parameters), new_state

    @classmethod
    def examples(cls) -> list[Self]:
        return [
            cls(torch.optim.SGD, lr=0.2, momentum=0.9),
            cls(torch.optim.Adam, lr=0.1),
            cls(torch.optim.Adagrad, lr=0.3),
            cls(torch.optim.SGD, lr=0.2, weight_decay=0.5),
        ]


def _copy_of_state(key: str, value: Any) -> Any:
    """A copy of an entry of the state for the optimiser to write to. The count of steps, and ASGD's `eta` and `mu`, are
    tensors but not variables, so they are detached."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone() if key in ("step", "eta", "mu") else value.clone()


def _detached_unless_recording(value: Any) -> Any:
    # `Optimizer.step` enables gradients itself, so its results have a graph even under `torch.no_grad`.
    return value.detach() if isinstance(value, Tensor) and not torch.is_grad_enabled() else value


class _Differentiable(TorchFunctionMode):
    """A mode that corrects three operations that `differentiable=True` leaves wrong (torch 2.13).

    Square roots of the adaptive optimisers get derivative 0 at 0, as in bilevel's own dynamics. SGD's first momentum
    buffer, which torch detaches, stays in the graph. ASGD's average keeps a copy of the factor that torch overwrites.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.mul_ and isinstance(args[1], Tensor):
            return func(args[0], args[1].clone())
        if func in (torch.sqrt, Tensor.sqrt) and trees.is_variable(args[0]):
            return root(args[0])
        if func is Tensor.sqrt_ and trees.is_variable(args[0]):
            return args[0].copy_(root(args[0].clone()))
        return func(*args, **(kwargs or {}))
