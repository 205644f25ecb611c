"""Two ways to diverge: the inner loss where the step is too long, and the hypergradient where T is large."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from _canvas import BLUE, GREEN, ORANGE, RED, save

import bilevel as bl

NU = 4.0  # the largest curvature of the quadratic on the left


def draw(path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for share, colour in [(0.5, BLUE), (0.95, GREEN), (1.05, ORANGE), (1.2, RED)]:
        left.semilogy(losses(share * 2 / NU, 40), color=colour, label=f"η = {share:g} · 2/ν")
    left.set(xlabel="inner step t", ylabel="inner loss", title="The step size against 2/ν", ylim=(1e-8, 1e8))
    left.legend(fontsize=8)
    steps = [1, 2, 5, 10, 20, 50, 100, 200]
    for label, lr, method, colour in [
        ("η = 1.7, Reverse", 1.7, bl.Reverse(), RED),
        ("η = 1.7, Truncated(10)", 1.7, bl.Truncated(10), ORANGE),
        ("η = 0.5, Reverse", 0.5, bl.Reverse(), BLUE),
    ]:
        right.loglog(steps, [slope(T, lr, method) for T in steps], "o-", markersize=3, color=colour, label=label)
    right.set(xlabel="T", ylabel="|∂f_T/∂λ|", title="The hypergradient against T")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    save(figure, path)


def losses(lr: float, steps: int) -> list[float]:
    curvature = torch.tensor([0.5, NU], dtype=torch.float64)
    w, found = torch.ones(2, dtype=torch.float64), []
    dynamics = bl.GradientDescent(lr)
    for t in range(1, steps + 1):
        found.append(float((curvature * w**2).sum() / 2))
        with torch.no_grad():
            w, _ = dynamics.step(lambda w: (curvature * w**2).sum() / 2, w, (), t)
    return found


def slope(steps: int, lr: float, method: bl.Method) -> float:
    """L has curvature 2 at its minima: steps above 1 jump about for ever without leaving, and neighbours part."""
    problem = bl.Problem(
        inner=lambda w, lam, data: w**4 / 4 - w**2 / 2 + lam * w,
        outer=lambda w, lam, data: (w - 1) ** 2,
        init=lambda lam: torch.full((), 0.3, dtype=torch.float64),
    )
    lam = torch.tensor(0.01, dtype=torch.float64)
    run = {"dynamics": bl.GradientDescent(lr), "steps": steps, "method": method}
    return abs(float(bl.hypergradient(problem, lam, bl.Task(None, None), **run).grad))
