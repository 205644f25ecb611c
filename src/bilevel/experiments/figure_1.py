"""Inner training errors and the outer objective of a problem with one weight.

The model is g_{w,λ}(x) = w·tanh(λx), a feature with a learned slope (the paper's g_{w,λ}(x) = ⟨w, h_λ(x)⟩ of Section
2.2 with one weight). For each λ the training error is a parabola in w; the validation errors at the bottoms of these
parabolas make f(λ), and `solve` finds its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel as bl
from bilevel.experiments.base import ExperimentResult, ExperimentSettings, TextTable, finished, require
from bilevel.plotting import BLACK, BLUE, RED, Axes, dots, legend_below, picture, titled
from bilevel.thread_pool import one_thread

PAPER = "Figure 1 (Section 2.1)"


@dataclass(frozen=True)
class OneWeightSettings(ExperimentSettings):
    """The full run."""

    seed: int = 0
    points: int = 40
    noise: float = 0.15
    slope: float = 2.0
    ridge: float = 0.01
    low: float = 0.4
    high: float = 6.0
    start: float = 0.8
    curves: tuple[float, ...] = (0.6, 0.8, 1.1, 1.5, 2.2, 3.5, 5.5)
    lr: float = 0.5
    steps: int = 200
    outer_lr: float = 0.3
    iterations: int = 300
    grid: int = 2001


QUICK: dict[str, Any] = {"iterations": 120, "grid": 501}


@dataclass(frozen=True)
class ClosedForm:
    """w_λ, the inner and the outer objective on a grid of λ."""

    lam: Tensor
    w: Tensor
    inner: Tensor
    outer: Tensor


def one_weight(ridge: float) -> bl.Problem:
    """Mean squared errors of w·tanh(λx); a little ridge keeps the inner problem strongly convex for every λ."""

    def error(w: Tensor, lam: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        return ((w * torch.tanh(lam * x) - y) ** 2).mean()

    return bl.Problem(inner=lambda w, lam, data: error(w, lam, data) + ridge * w**2, outer=error, init=torch.zeros_like)


def draw_task(s: OneWeightSettings) -> bl.Task:
    """Half the points to train on, half to validate on, from y = tanh(slope·x) + noise."""
    generator = torch.Generator().manual_seed(s.seed)
    x = 4 * torch.rand(s.points, generator=generator, dtype=torch.float64) - 2
    y = torch.tanh(s.slope * x) + s.noise * torch.randn(s.points, generator=generator, dtype=torch.float64)
    half = s.points // 2
    return bl.Task((x[:half], y[:half]), (x[half:], y[half:]))


def closed_form(task: bl.Task, lam: Tensor, ridge: float) -> ClosedForm:
    """The inner minimiser of every λ at once, w_λ = ⟨h, y⟩/(⟨h, h⟩ + nρ). It shares no code with the solver."""
    x, y = task.train
    h = torch.tanh(lam[:, None] * x)
    w = (h * y).mean(1) / ((h * h).mean(1) + ridge)
    inner = ((w[:, None] * h - y) ** 2).mean(1) + ridge * w**2
    x, y = task.val
    outer = ((w[:, None] * torch.tanh(lam[:, None] * x) - y) ** 2).mean(1)
    return ClosedForm(lam, w, inner, outer)


def run(settings: OneWeightSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Figure 1 from data, and f's minimiser by hypergradients beside the minimiser on a fine grid."""
    s = settings
    _check(s)
    task = draw_task(s)
    with one_thread():
        solution = bl.solve(
            one_weight(s.ridge),
            torch.tensor(s.start, dtype=torch.float64),
            task,
            dynamics=bl.GradientDescent(s.lr),
            steps=s.steps,
            method=bl.Spectral(),
            optimizer=lambda params: torch.optim.Adam(params, lr=s.outer_lr),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.iterations),
            constraint=bl.Box(s.low, s.high),
            iterations=s.iterations,
            progress=progress,
        )
    finished(solution)
    grid = closed_form(task, torch.linspace(s.low, s.high, s.grid, dtype=torch.float64), s.ridge)
    drawn = closed_form(task, torch.tensor(s.curves, dtype=torch.float64), s.ridge)
    best = int(grid.outer.argmin())
    found = {"lambda": float(solution.outer), "w": float(solution.inner), "f": solution.value}
    numbers = {
        "solve": {**found, "outcome": str(solution.outcome)},
        "grid": {
            "lambda": float(grid.lam[best]),
            "w": float(grid.w[best]),
            "f": float(grid.outer[best]),
            "spacing": float(grid.lam[1] - grid.lam[0]),
        },
        "curves": [
            {"lambda": float(lam), "w": float(w), "training": float(i), "validation": float(o)}
            for lam, w, i, o in zip(drawn.lam, drawn.w, drawn.inner, drawn.outer, strict=True)
        ],
    }
    _draw(out / "figure-1.png", s, task, grid, drawn, found)
    notes = ("The paper's figure is a cartoon without numbers; this one is computed.",)
    return ExperimentResult(numbers, _choices(s), [_table(numbers)], ("figure-1.png",), notes)


def _table(numbers: dict[str, Any]) -> TextTable:
    rows = []
    for key, name in {"lambda": "λ that minimises f", "w": "w_λ there", "f": "f(λ) there"}.items():
        ours, grid = numbers["solve"][key], numbers["grid"][key]
        rows.append((name, "cartoon", f"{ours:.5f}", f"{grid:.5f}", f"{ours - grid:+.1e}", "spacing of the grid"))
    columns = ("quantity", "paper", "ours", "grid", "difference", "why")
    return TextTable("Figure 1: the minimiser of f by hypergradients and on a grid", columns, rows)


def _choices(s: OneWeightSettings) -> dict[str, str]:
    return {
        "problem": f"w·tanh(λx) fitted to tanh({s.slope:g}x) plus normal noise of {s.noise:g}, {s.points} points, half "
        "of them to validate on",
        "inner": f"mean squared error + {s.ridge:g} w², {s.steps} steps of gradient descent with η = {s.lr:g} from "
        "w = 0",
        "outer": f"Adam, step {s.outer_lr:g} falling to 0 along a cosine, {s.iterations} hyperiterations from λ = "
        f"{s.start:g}, Λ = [{s.low:g}, {s.high:g}]",
    }


def _draw(
    path: Path, s: OneWeightSettings, task: bl.Task, grid: ClosedForm, drawn: ClosedForm, found: dict[str, float]
) -> None:
    with picture(path, height=5.2) as figure:
        left, right = figure.subplots(1, 2)
        _draw_inner(left, s, task, drawn, grid)
        dots(left, [found["w"]], [found["f"]], RED, r"minimiser of $f$", 9, zorder=6)
        titled(right, "Outer objective", r"outer variable $\lambda$", r"validation error $f(\lambda) = E(w_\lambda)$")
        right.plot(grid.lam, grid.outer, color=BLACK, label=r"$f(\lambda)$, closed form")
        dots(right, drawn.lam, drawn.outer, BLUE, r"the $\lambda$ of the left panel")
        name = rf"found by solve: $\lambda$ = {found['lambda']:.2f}"
        dots(right, [found["lambda"]], [found["f"]], RED, name, 9, zorder=5)
        right.set_ylim(bottom=0)
        for axes in (left, right):
            legend_below(axes)


def _draw_inner(axes: Axes, s: OneWeightSettings, task: bl.Task, drawn: ClosedForm, grid: ClosedForm) -> None:
    titled(axes, "Inner objectives", "inner variable $w$", "error")
    x, y = task.train
    w = torch.linspace(float(drawn.w.min()) - 0.6, float(drawn.w.max()) + 0.6, 300, dtype=torch.float64)
    lowest = int(drawn.inner.argmin())
    for index, lam in enumerate(s.curves):
        training = ((w[:, None] * torch.tanh(lam * x) - y) ** 2).mean(1) + s.ridge * w**2
        name = r"training error $L_\lambda(w)$, a line for each $\lambda$" if index == 0 else None
        axes.plot(w, training, color=BLUE, alpha=0.7, linewidth=1.2, label=name)
        # Labels stand outside: the bottoms lie on a curve that falls and rises again. The lowest has room below.
        side = 0 if index == lowest else 1 if drawn.w[index] > drawn.w[lowest] else -1
        where: Any = {"textcoords": "offset points", "va": "top", "ha": {-1: "right", 0: "center", 1: "left"}[side]}
        at = float(drawn.w[index]), float(drawn.inner[index])
        axes.annotate(f"{lam:g}", at, (7 * side, -4 if side else -6), fontsize=9, color=BLUE, **where)
    dots(axes, drawn.w, drawn.inner, BLUE, r"its minimiser $w_\lambda$ (number: $\lambda$)", zorder=4)
    axes.plot(grid.w, grid.outer, color=BLACK, label=r"validation error at $w_\lambda$, all $\lambda$", zorder=3)
    axes.set_ylim(0, 1.6 * float(max(drawn.inner.max(), drawn.outer.max())))
    axes.set_xlim(float(w[0]), float(w[-1]))


def _check(s: OneWeightSettings) -> None:
    s.at_least(4, points="cannot be divided into a training and a validation set")
    s.at_least(2, grid="leaves no grid")
    require(0 < s.low < s.high, f"low={s.low} and high={s.high} must be positive and in this order.")
    require(
        len(s.curves) >= 1 and all(s.low <= c <= s.high for c in s.curves),
        f"curves={s.curves} must lie between low={s.low} and high={s.high}.",
    )
