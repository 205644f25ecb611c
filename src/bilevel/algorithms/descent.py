"""Descent along the hypergradient with any torch optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from bilevel import trees
from bilevel.algorithms.base import Algorithm, OuterProblem
from bilevel.engine.checks import check_lam
from bilevel.engine.method import Hypergradient
from bilevel.errors import BilevelError, DivergenceError, Outcome, differences
from bilevel.trees import Tree


@dataclass(frozen=True)
class Descent(Algorithm):
    """λ ← P_Λ(update(λ, ∇f_T(λ))), with the update rule of a torch optimiser.

    Args:
        optimizer: builds a torch optimiser from the leaves of λ; Adam with lr=1e-2 by default. Optimisers that search
            along a line, such as `torch.optim.LBFGS`, evaluate f_T several times per hyperiteration.
        scheduler: builds a torch learning-rate scheduler from the optimiser; stepped once per hyperiteration.
    """

    resumes: ClassVar[bool] = True

    # Functions have no useful text. Checkpoints compare what they build.
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = field(default=None, repr=False)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise BilevelError(
                "optimizer is an instance, but λ's leaves are made here. Pass a function, as in "
                "optimizer=lambda params: torch.optim.Adam(params, lr=1e-2)."
            )

    def minimise(self, outer: OuterProblem) -> Outcome:
        saved = outer.saved
        values, spec = trees.flatten(outer.lam if saved is None else saved["lam"])
        leaves = [value.detach().clone().requires_grad_() for value in values]
        optimizer = self.optimizer(leaves) if self.optimizer else torch.optim.Adam(leaves, lr=1e-2)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        settings = _settings(optimizer, scheduler)
        if saved is not None:
            _refuse_other_settings(saved.get("settings", settings), settings)
            # Copies, because optimisers change their state in place.
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            if scheduler is not None:
                scheduler.load_state_dict(copy.deepcopy(saved["scheduler"]))

        def lam() -> Tree:
            return spec.unflatten(leaf.detach() for leaf in leaves)

        def state() -> Tree:
            rest = None if scheduler is None else scheduler.state_dict()
            now = {"lam": lam(), "optimizer": optimizer.state_dict(), "scheduler": rest, "settings": settings}
            return copy.deepcopy(now)

        outer.keep(state)

        while True:
            result = outer.hyperiteration(trees.clone(lam()))
            _step(optimizer, leaves, result, lambda: outer.evaluate(lam()))
            if outer.constraint is not None:
                with torch.no_grad():
                    for leaf, value in zip(leaves, trees.leaves(outer.constraint.project(lam())), strict=True):
                        leaf.copy_(value)
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(float(result.value))
            elif scheduler is not None:
                scheduler.step()
            _check_finite(lam(), result)

    @classmethod
    def examples(cls) -> list[Self]:
        return [
            cls(lambda leaves: torch.optim.SGD(leaves, lr=0.3)),
            cls(
                lambda leaves: torch.optim.SGD(leaves, lr=0.2, momentum=0.8),
                lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=50),
            ),
        ]


def _settings(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, dict[str, str]]:
    """The classes and the settings of an optimiser and a scheduler that have not taken a step, as texts by name."""
    groups = optimizer.state_dict()["param_groups"]
    found = {
        f"{key} of group {number}" if len(groups) > 1 else key: str(value)
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    }
    texts = {} if scheduler is None else {key: str(value) for key, value in scheduler.state_dict().items()}
    # Names with an underscore are the state of a scheduler. A function has an address in its text, which differs
    # between processes.
    settings = {key: text for key, text in texts.items() if not key.startswith("_") and " at 0x" not in text}
    found |= {f"{key} of the scheduler": text for key, text in settings.items()}
    return {"classes": {"optimizer": _name(optimizer), "scheduler": _name(scheduler)}, "settings": found}


def _name(part: Any) -> str:
    return "none" if part is None else type(part).__name__


def _refuse_other_settings(there: dict[str, dict[str, str]], here: dict[str, dict[str, str]]) -> None:
    """Refuse to resume with another step size: the saved state of the optimiser would override it silently."""
    other = differences(there["classes"], here["classes"]) or differences(there["settings"], here["settings"])
    if other:
        raise BilevelError(
            f"The checkpoint is of a run with other settings of the optimiser ({'; '.join(other)}). Pass those of that "
            "run to go on with it, or another folder to begin a new run."
        )


def _step(
    optimizer: torch.optim.Optimizer,
    leaves: list[Tensor],
    result: Hypergradient,
    evaluate: Callable[[], Hypergradient],
) -> None:
    """One step of the optimiser. Its first evaluation of f_T is `result`; only line searches ask for others."""
    known: Hypergradient | None = result

    def closure() -> Tensor:
        nonlocal known
        here, known = known or evaluate(), None
        for leaf, grad in zip(leaves, trees.leaves(here.grad), strict=True):
            leaf.grad = grad.clone()
        return here.value

    # Some optimisers read the gradients before they call the closure.
    closure()
    known = result
    optimizer.step(closure)  # type: ignore[arg-type]


def _check_finite(lam: Tree, result: Hypergradient) -> None:
    try:
        check_lam(lam)
    except DivergenceError as error:
        raise DivergenceError(
            f"The update made λ non-finite (gradient norm {float(trees.norm(result.grad)):.3g}); lower the outer step "
            f"size. {error}"
        ) from error
