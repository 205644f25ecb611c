"""Outer objectives that declare their structure: the loss of linear models on the rows that each fold holds out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bilevel.structures.data_checks import refuse_asymmetric
from bilevel.structures.linear_models import LinearModels
from bilevel.structures.penalties import code_of
from bilevel.trees import Tree


class DeclaredOuter(ABC):
    """An outer objective with a term extra(λ). The last entry of the batch is the data that `extra(lam, data)` takes.

    An `extra` that is a `FunctionOfLam` is differentiated without autograd.
    """

    extra: Callable[[Tree, Any], Tensor]

    def code(self) -> tuple[Any, ...] | None:
        """What the checks of this objective depend on besides the data; see `code_of`."""
        return code_of(self, self.extra)

    def check(self, batch: Any) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse data for which the hand-written derivatives do not hold."""

    @abstractmethod
    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        """E(w, λ)."""


class HeldOut(DeclaredOuter):
    """E(w, λ) = loss(w) + extra(λ)."""

    def __call__(self, w: Tensor, lam: Tree, batch: Any) -> Tensor:
        return self.loss(w, batch) + self.extra(lam, batch[-1])

    @abstractmethod
    def loss(self, w: Tensor, batch: Any) -> Tensor:
        """The terms that depend on w."""

    @abstractmethod
    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss and its derivative; called under `torch.no_grad`."""


@dataclass(frozen=True)
class HeldOutLoss(HeldOut):
    """Σ_k Σ_i v_ki loss(x_i w_k, y_i) / Σ v + extra(λ), with the batch (X, y, v, data)."""

    model: LinearModels
    extra: Callable[[Tree, Any], Tensor]

    def code(self) -> tuple[Any, ...] | None:
        model = self.model.code()
        return None if model is None else code_of(self, self.extra, model=model)

    def check(self, batch: Any) -> None:
        self.model.check(batch)

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        self.check(batch)
        X, y, weight, _ = batch
        return (weight * self.model.loss.values(self.model.scores(w, X), y)).sum() / weight.sum()

    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        X, y, weight, _ = batch
        share, scores = weight / weight.sum(), self.model.scores(w, X)
        slope = self.model.transposed(share[:, None] * self.model.loss.slopes(scores, y), X)
        return (share * self.model.loss.values(scores, y)).sum(), slope


@dataclass(frozen=True)
class HeldOutSquares(HeldOut):
    """½ Σ_k ⟨w_k, w_k G_k⟩ − 2⟨b_k, w_k⟩ + c + extra(λ): squared errors given by sums over rows.

    The batch is (G, b, c, data), the sums XᵀVX, yᵀVX and yᵀVy over the rows that are held out, divided by their weight.
    """

    extra: Callable[[Tree, Any], Tensor]

    def check(self, batch: Any) -> None:
        refuse_asymmetric(batch[0], "The matrix G of the outer objective")

    def loss(self, w: Tensor, batch: Any) -> Tensor:
        gram, moments, constant, _ = batch
        return 0.5 * ((w * (w @ gram - 2 * moments)).sum() + constant)

    def loss_and_slope(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        gram, moments, constant, _ = batch
        slope = w @ gram - moments
        return 0.5 * ((w * (slope - moments)).sum() + constant), slope
