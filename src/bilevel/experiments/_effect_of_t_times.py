"""Table 2 measured: processor seconds of one hyperiteration, by method, by T and by the size of H."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bilevel as bl
from bilevel.experiments._feature_map import Batch, FeatureMapData, feature_map

METHODS: dict[str, bl.Method] = {"Reverse": bl.Reverse(), "Spectral": bl.Spectral()}
# Numbers of steps from which the time of one step is computed, for every size of H.
FEW, MANY = 4, 32


class Hyperiteration:
    """f_T and ∇f_T at H_0, for one size of H; T = None is the closed form."""

    def __init__(self, data: FeatureMapData, rho: float, lr: float, height: int | None = None) -> None:
        self.h = data.start()
        self.data = data
        if height is not None:
            self.h = torch.eye(height, self.h.shape[1], dtype=self.h.dtype)
            self.data = replace(data, train=_of_height(data.train, height), val=_of_height(data.val, height))
        self.dynamics = bl.GradientDescent(lr)
        # Kept from call to call, as in the outer loop, so that the problem's checks are made once.
        self.problems = {exact: feature_map(self.data, rho, exact) for exact in (True, False)}

    def __call__(self, steps: int | None, method: bl.Method) -> bl.Hypergradient:
        problem = self.problems[steps is None]
        return bl.hypergradient(
            problem, self.h, self.data.task, dynamics=self.dynamics, steps=steps or 0, method=method
        )


def measure(
    data: FeatureMapData, rho: float, lr: float, steps: Sequence[int], heights: Sequence[int], repeats: int, begin: Any
) -> dict[str, Any]:
    """The least of `repeats` measurements, taken in turn, so that a slow minute of the machine affects all alike.

    It measures processor time of this thread, not wall time. Other programs can still evict its caches, which only adds
    to a time: on a busy machine the least ratios of two runs agreed within 3 %, those of medians within 15 %.
    """
    whole = Hyperiteration(data, rho, lr)
    sized = {height: Hyperiteration(data, rho, lr, height) for height in heights}
    # What is timed, by name, size of H and T: a hyperiteration, and what it is called with.
    calls: dict[tuple[str, int, int], tuple[Hyperiteration, int | None, bl.Method]] = {
        ("exact", 0, 0): (whole, None, bl.Reverse())
    }
    for name, method in METHODS.items():
        calls |= {(name, 0, t): (whole, t, method) for t in steps}
    for height, one in sized.items():
        calls |= {("Reverse", height, t): (one, t, bl.Reverse()) for t in (FEW, MANY)}
    for one, t, method in calls.values():  # the first call of a problem also checks it
        one(t and 1, method)
    found: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
    for repeat in range(repeats):
        begin(f"timing, {repeat + 1} of {repeats}")
        for key, (one, t, method) in calls.items():
            began = time.thread_time()
            one(t, method)
            found[key].append(time.thread_time() - began)
    least = {key: min(values) for key, values in found.items()}
    exact = "exact", 0, 0

    def seconds(*key: Any) -> dict[str, float]:
        return {"seconds": least[key], "median": statistics.median(found[key]), "over exact": least[key] / least[exact]}

    return {
        "unit": "processor seconds of one hyperiteration, the least of all rounds",
        "exact": seconds(*exact),
        **{name: {str(t): seconds(name, 0, t) for t in steps} for name in METHODS},
        "line": line(steps, [least["Reverse", 0, t] for t in steps]) if len(steps) > 2 else None,
        "size of H": [
            {
                "rows": height,
                "entries of H": one.h.numel(),
                "entries of w": one.h.shape[1] * one.data.train[1].shape[1],
                "seconds per step": (least["Reverse", height, MANY] - least["Reverse", height, FEW]) / (MANY - FEW),
            }
            for height, one in sized.items()
        ],
    }


def line(steps: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    """seconds ≈ start + slope·T. Relative errors are squared, so that small T count as much as large ones.

    >>> fitted = line([1, 4, 16], [3.0, 9.0, 33.0])
    >>> round(fitted["slope"], 6), round(fitted["start"], 6), round(fitted["largest deviation"], 6)
    (2.0, 1.0, 0.0)
    """
    t, y = np.asarray(steps, float), np.asarray(seconds, float)
    (start, slope), *_ = np.linalg.lstsq(np.stack([1 / y, t / y], 1), np.ones(len(y)), rcond=None)
    deviation = np.abs((start + slope * t) / y - 1).max()
    return {"start": float(start), "slope": float(slope), "largest deviation": float(deviation)}


def _of_height(data: Batch, height: int) -> Batch:
    """The features cut, or repeated, to another number of them: H then has `height` rows, and w keeps its size."""
    x, y = data
    copies: Tensor = x.repeat(1, -(-height // x.shape[1]))
    return copies[:, :height].contiguous(), y
