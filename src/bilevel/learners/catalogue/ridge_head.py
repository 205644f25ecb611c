"""Ridge regression as the classifier, in closed form (R2-D2; Bertinetto, Henriques, Torr and Vedaldi, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.learners.base import LearnerOptions
from bilevel.learners.linear_head import PENALTY, HeadOptions, Leaves, LinearHead, row_weights
from bilevel.learners.settings import setting

BIAS = "head.bias"


@dataclass(frozen=True, kw_only=True)
class RidgeHeadOptions(HeadOptions):
    """The settings of `RidgeHead`: `scale` and `penalty` are the initial s and ρ."""

    scale: float = setting(10.0, above=0)


class RidgeHead(LinearHead):
    """W = Xᵀ(XXᵀ + ρI)⁻¹Y, ridge regression of one-hot labels Y on the features X; logits s·xᵀW.

    W minimises ‖XW − Y‖² + ρ‖W‖², the inner problem. Its solution has a closed form, so autograd differentiates f(λ)
    directly. s, ρ and the bias are leaves of λ. If there are more examples than features, the same W is computed as
    (XᵀX + ρI)⁻¹XᵀY.

    Open choices: the paper adds one number to all logits as a bias, which the softmax ignores. Here the bias b is the
    value of the constant feature, so a larger b means a weaker penalty on the intercept. If classes have different
    numbers of images, the squared errors are weighted such that every class has the same weight.
    """

    Options: ClassVar[type[LearnerOptions]] = RidgeHeadOptions

    def build(self) -> None:
        super().build()
        self.lam[BIAS] = next(iter(self.lam.values())).new_ones(())

    def prepared(self, lam: Leaves, support: Tensor, queries: Tensor, labels: Tensor, ways: int) -> tuple[Tensor, ...]:
        bias = lam[BIAS].double()
        return tuple(torch.cat([x[..., :-1], bias.expand(*x.shape[:2], 1)], -1) for x in (support, queries))

    def weights(self, lam: Leaves, support: Tensor, labels: Tensor, ways: int) -> Tensor:
        rho, weight = lam[PENALTY].double().exp(), row_weights(labels, ways)
        targets = F.one_hot(labels, ways).double()
        if support.shape[1] <= support.shape[2]:
            gram = torch.bmm(support, support.mT) + torch.diag_embed(rho / weight)
            return torch.bmm(support.mT, torch.cholesky_solve(targets, torch.linalg.cholesky(gram)))
        weighted = support * weight[..., None]
        gram = torch.bmm(support.mT, weighted) + rho * torch.eye(support.shape[2]).to(support)
        return torch.cholesky_solve(torch.bmm(weighted.mT, targets), torch.linalg.cholesky(gram))
