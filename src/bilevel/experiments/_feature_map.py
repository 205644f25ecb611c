"""The problem of Section 5.1: a linear feature map H below ridge regression, on the features of a trained network.

L_H(w) = ½‖XHw − Y‖² + ρ/2 ‖w‖² inside, whose minimiser w_H = [(XH)ᵀXH + ρI]⁻¹(XH)ᵀY is known, and the mean squared
error on validation data outside (Example 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import bilevel as bl
from bilevel.experiments.base import described, single_precision
from bilevel.learners import library
from bilevel.learners.streams import open_data
from bilevel.models.batch_norm import MEANING
from bilevel.tasks.episodes import Episodes

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FeatureMapData:
    """Three disjoint sets of features with their classes as unit vectors, where they come from, and how the network's
    batch norm treated them."""

    train: Batch
    val: Batch
    test: Batch
    name: str = ""
    description: str = ""
    batch_norm: str = ""

    @property
    def task(self) -> bl.Task:
        return bl.Task(self.train, self.val)

    def start(self) -> Tensor:
        """H_0, the identity."""
        return torch.eye(self.train[0].shape[1], dtype=self.train[0].dtype)

    def curvature(self, h: Tensor, rho: float) -> float:
        """ν of the inner objective at H."""
        return float(torch.linalg.matrix_norm(self.train[0] @ h, 2)) ** 2 + rho


def inner(w: Tensor, data: Batch, rho: float) -> Tensor:
    """The inner objective on features XH, which `encode` computes once for all steps."""
    z, y = data
    return 0.5 * (z @ w - y).square().sum() + 0.5 * rho * w.square().sum()


def outer(w: Tensor, data: Batch) -> Tensor:
    z, y = data
    return (z @ w - y).square().sum(1).mean()


def encode(h: Tensor, task: bl.Task) -> bl.Task:
    (x, y), (x_val, y_val) = task.train, task.val
    return bl.Task((x @ h, y), (x_val @ h, y_val))


def minimiser(h: Tensor, train: Batch, rho: float) -> Tensor:
    """w_H = [(XH)ᵀXH + ρI]⁻¹(XH)ᵀY."""
    z = train[0] @ h
    return torch.linalg.solve(z.T @ z + rho * torch.eye(z.shape[1], dtype=z.dtype), z.T @ train[1])


def feature_map(data: FeatureMapData, rho: float, exact: bool = False) -> bl.Problem:
    """The bilevel problem; with `exact`, Φ_0 is the closed form of w_H, so that zero steps give f itself."""

    def start(h: Tensor) -> Tensor:
        return minimiser(h, data.train, rho) if exact else h.new_zeros(h.shape[1], data.train[1].shape[1])

    return bl.Problem(lambda w, h, batch: inner(w, batch, rho), lambda w, h, batch: outer(w, batch), start, encode)


def exact_value(h: Tensor, data: FeatureMapData, rho: float) -> float:
    """f(H) = E(w_H)."""
    return float(outer(minimiser(h, data.train, rho), encode(h, data.task).val))


def right(w: Tensor, h: Tensor, data: Batch) -> Tensor:
    """Which examples are classified correctly: their largest output is where the 1 is."""
    x, y = data
    return (x @ (h @ w)).argmax(1) == y.argmax(1)


def draw_data(dataset: str, model: str, classes: int, sizes: tuple[int, int, int], seed: int) -> FeatureMapData:
    """Classes that the network was not trained on, with their drawings divided into three disjoint sets by the seed.

    Each set goes through the network by itself and is normalised by its own statistics, as in the network's training.
    One factor on all features makes their mean squared norm 1 on the training set.
    """
    train, val, test = sizes
    with single_precision(), torch.no_grad():
        trained = library.find(model, batch_norm="episode")
        source = open_data(replace(trained.settings, dataset=dataset))
        if dataset == trained.settings.dataset:
            trained.check_data(source)
        task = Episodes(source, "test", classes, train, val + test, seed=seed).episode(0)
        others = task.val[0].unflatten(0, (classes, val + test))
        images = (task.train[0], others[:, :val].flatten(0, 1), others[:, val:].flatten(0, 1))
        # The learner appends a constant for the bias, which this problem does not have.
        features = [trained.learner.represent(trained.learner.lam, part)[:, :-1].double() for part in images]
    scale = features[0].square().sum(1).mean().rsqrt()
    labels = [torch.arange(classes).repeat_interleave(each) for each in sizes]
    known, checked, asked = ((x * scale, F.one_hot(y, classes).double()) for x, y in zip(features, labels, strict=True))
    norm = f"episode: {MEANING['episode']}"
    return FeatureMapData(known, checked, asked, name=source.name, description=described(source), batch_norm=norm)
