"""The objectives of benchmark_bilevel in torch: the same functions of the same arrays, read from the jitted functions.

As a program: `python -m referee.objectives CHECKOUT PROBLEM …` compares values and gradients in float64, and prints a
JSON object for each problem. Run it in a separate directory: the data set `simulated` stores its matrices in the
working directory, in the precision of its first use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

import bilevel as bl


@dataclass(frozen=True)
class Bridged:
    """A problem of the referee in torch.

    Attributes:
        kind: "quadratics", "logistic" or "cleaning".
        inner: the inner objective `inner(w, lam, data)`, where `data` is all of the data or a minibatch.
        outer: the outer objective, with the same arguments.
        train: the data of the inner objective, as tensors with one row for each sample.
        val: the data of the outer objective.
        l2: the factor of ‖w‖² in the inner objective, for hyper-cleaning only.
    """

    kind: str
    inner: Callable[[Tensor, Tensor, Any], Tensor]
    outer: Callable[[Tensor, Tensor, Any], Tensor]
    train: tuple[Tensor, ...]
    val: tuple[Tensor, ...]
    l2: float = 0.0

    def problem(self, start: Tensor) -> bl.Problem:
        return bl.Problem(self.inner, self.outer, lambda lam: start, check_derivatives=False)

    def task(self) -> bl.Task:
        return bl.Task(self.train, self.val)

    def part(self, data: tuple[Tensor, ...], start: int, size: int) -> tuple[Tensor, ...]:
        return tuple(tensor[start : start + size] for tensor in data)


def kind_of(f_inner: Any) -> str:
    """The kind of problem to which a jitted inner objective belongs, found from its closure."""
    found = closure(f_inner)
    if "hess_inner" in found:
        return "quadratics"
    return "logistic" if found["y_train"].ndim == 1 else "cleaning"


def bridged(f_inner: Any, f_outer: Any) -> Bridged:
    """The objectives of two jitted functions in torch, with the arrays from their closures."""
    kind, train, val = kind_of(f_inner), arrays(f_inner), arrays(f_outer)
    if kind == "quadratics":
        names = ("hess_inner", "hess_outer", "cross", "linear_inner", "linear_outer")
        return Bridged(kind, quadratic, quadratic, *(tuple(part[n] for n in names) for part in (train, val)))
    rows = (train["X_train"], train["y_train"]), (val["X_val"], val["y_val"])
    if kind == "logistic":
        return Bridged(kind, penalised, logistic, *rows)
    l2 = closure(f_inner)["self"].reg

    def inner(w: Tensor, lam: Tensor, data: Any) -> Tensor:
        return weighted(w, lam, data) + l2 * (w**2).sum()

    (x, y), (x_val, y_val) = ((x, y.argmax(1)) for x, y in rows)
    own = torch.arange(len(x))
    return Bridged(kind, inner, lambda w, lam, data: classified(w, data).mean(), (x, y, own), (x_val, y_val), l2)


def closure(function: Any) -> dict[str, Any]:
    """The closure variables of a jitted function, by name."""
    code, cells = function.__wrapped__.__code__, function.__wrapped__.__closure__
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def arrays(function: Any) -> dict[str, Tensor]:
    """The arrays in the closure of a jitted function, in the precision of its matrices."""
    kept = {name: np.array(value) for name, value in closure(function).items() if hasattr(value, "shape")}
    floating = next(value.dtype for value in kept.values() if value.ndim > 1)
    return {name: torch.from_numpy(value.astype(floating)) for name, value in kept.items()}


def quadratic(w: Tensor, lam: Tensor, data: Any) -> Tensor:
    """The mean of ½ wᵀA w + ½ λᵀB λ + λᵀC w + aᵀw + bᵀλ over samples."""
    inner, outer, cross, a, b = (part.mean(0) for part in data)
    return 0.5 * w @ inner @ w + 0.5 * lam @ outer @ lam + lam @ cross @ w + a @ w + b @ lam


def logistic(w: Tensor, lam: Tensor, data: Any) -> Tensor:
    x, y = data
    return softplus(-y * (x @ w)).mean()


def penalised(w: Tensor, lam: Tensor, data: Any) -> Tensor:
    return logistic(w, lam, data) + 0.5 * (lam.exp() * w**2).sum()


def classified(w: Tensor, data: Any) -> Tensor:
    """The loss of every row."""
    return cross_entropy(data[0] @ w.view(data[0].shape[1], -1), data[1], reduction="none")


def weighted(w: Tensor, lam: Tensor, data: Any) -> Tensor:
    return (lam[data[2]].sigmoid() * classified(w, data)).mean()


def difference(ours: Bridged, f_inner: Any, f_outer: Any, w0: Any, lam0: Any, seed: int = 0) -> float:
    """The largest relative difference of values and gradients, at three points, on all data and on a minibatch."""
    import jax

    generator, largest = np.random.default_rng(seed), 0.0
    for scale in (0.0, 0.1, 1.0):
        w, lam = (np.asarray(x) + scale * generator.normal(size=x.shape).astype(x.dtype) for x in (w0, lam0))
        for mine, theirs, data in ((ours.inner, f_inner, ours.train), (ours.outer, f_outer, ours.val)):
            for start, size in ((0, len(data[0])), (64, 64)):
                value, grads = jax.value_and_grad(theirs, (0, 1))(w, lam, start=start, batch_size=size)
                leaves = [torch.tensor(x, requires_grad=True) for x in (w, lam)]
                found = mine(*leaves, ours.part(data, start, size))
                slopes = torch.autograd.grad(found, leaves, allow_unused=True)
                pairs = [(found.detach(), value)] + [
                    (torch.zeros_like(leaf) if slope is None else slope, grad)
                    for leaf, slope, grad in zip(leaves, slopes, grads, strict=True)
                ]
                for one, other in pairs:
                    expected = torch.tensor(np.array(other))
                    largest = max(largest, float((one - expected).norm() / expected.norm().clamp(min=1e-12)))
    return largest


if __name__ == "__main__":
    import jax

    jax.config.update("jax_enable_x64", True)
    from referee import arena

    for problem in sys.argv[2:]:
        evaluator = arena.objective(Path(sys.argv[1]), problem, 0)
        objectives = evaluator.f_inner, evaluator.f_outer
        apart = difference(bridged(*objectives), *objectives, evaluator.inner_var0, evaluator.outer_var0)
        print(json.dumps({"problem": problem, "apart": apart}), flush=True)
