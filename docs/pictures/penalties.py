"""A penalty for every feature: what `BilevelRidge` finds where five of forty features matter."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from _canvas import BLUE, GREY, ORANGE, save
from sklearn.linear_model import RidgeCV

from bilevel.estimators import BilevelRidge

TRUTH = [3, -2, 2, 1, -1]


def draw(path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1060, 40))
    y = X[:, :5] @ TRUTH + rng.normal(size=1060)
    one = RidgeCV(alphas=np.logspace(-3, 3, 25)).fit(X[:60], y[:60])
    many = BilevelRidge().fit(X[:60], y[:60])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    features = np.arange(40)
    left.bar(features, many.alpha_, color=np.where(features < 5, BLUE, ORANGE))
    left.axhline(one.alpha_, color=GREY, linestyle="--", label="RidgeCV: one for all")
    left.set(yscale="log", xlabel="feature", ylabel="penalty α", title="The first five matter")
    left.legend(fontsize=8)
    right.plot(features[:5], TRUTH, "k_", markersize=14, label="truth")
    right.plot(features[5:], np.zeros(35), "k_", markersize=6)
    right.plot(features, one.coef_, "x", color=GREY, markersize=5, label="RidgeCV")
    right.plot(features, many.coef_, "o", color=BLUE, markersize=4, label="BilevelRidge")
    right.set(xlabel="feature", ylabel="coefficient", title="60 rows, 40 features")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    save(figure, path)
