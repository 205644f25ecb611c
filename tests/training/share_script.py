"""A script with an estimator and with `tune`, as a user's would be, for a test that starts it under torchrun: `FOLDER`.

Each process writes what it found, every number in hexadecimal, and how many hypergradients it computed.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import bilevel as bl
from bilevel.estimators import BilevelRidge
from bilevel.hypergradients import Evaluator
from bilevel.tuning import LearningRate, WeightDecay


def table():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 6))
    return X, X[:, 0] - 2 * X[:, 1] + rng.normal(size=40)


def estimator():
    found = BilevelRidge(cv=4).fit(*table())
    return [*found.alpha_, *found.coef_, found.tether_, *found.history_["value"]]


def tuned():
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = (x[:, 0] > 0).long()
    data = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=10, shuffle=True)
    declared, val = [LearningRate(0.3, per="step"), WeightDecay()], (x[40:], y[40:])
    settings = {"steps": 6, "iterations": 3, "runs": 3}
    found = bl.tune(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, declared, data, val, **settings)
    return [*found.values["lr"], found.value, *found.model.weight.detach().reshape(-1).tolist()]


def counted(work):
    """The numbers that some work gives, and how many tasks this process worked on."""
    done, of_one_task = {"tasks": 0}, Evaluator._of_one_task

    def task(self, process, method):
        done["tasks"] += 1
        return of_one_task(self, process, method)

    Evaluator._of_one_task = task
    try:
        return {"numbers": [float(x).hex() for x in work()], **done}
    finally:
        Evaluator._of_one_task = of_one_task


def everything():
    return {"estimator": counted(estimator), "tuned": counted(tuned)}


if __name__ == "__main__":
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(everything()))
