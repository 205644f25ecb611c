"""What `tune(...).plot()` draws: the validation loss, and every hyperparameter."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from _canvas import save
from sklearn.datasets import load_digits
from torch import nn

import bilevel as bl
from bilevel.tuning import LearningRate, WeightDecay


def draw(path: Path) -> None:
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    found = bl.tune(
        model,
        nn.functional.cross_entropy,
        [LearningRate(0.3, per="step"), WeightDecay(1e-3, per="layer")],
        (x[:300] / 16, y[:300]),
        (x[300:600] / 16, y[300:600]),
        steps=30,
        iterations=20,
    )
    figure = plt.figure(figsize=(8.4, 2.8), layout="constrained")
    save(found.plot(figure), path)
