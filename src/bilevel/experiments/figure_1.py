"""Inner training errors and the outer objective of a problem with one weight.

The model is g_{w,λ}(x) = w·tanh(λx), a feature with a learned slope (the paper's g_{w,λ}(x) = ⟨w, h_λ(x)⟩ of Section
2.2 with one weight). For each λ the training error is a parabola in w; the validation errors at the bottoms of these
parabolas make f(λ), and `solve` finds its minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bilevel as bl
from bilevel.experiments._plotting import BLACK, BLUE, RED, legend_below, picture, titled
from bilevel.experiments.base import Result, Table, finished, one_thread, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = "Figure 1 (Section 2.1)"


@dataclass(frozen=True)
class Settings:
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
class Curve:
    """w_λ, the inner and the outer objective on a grid of λ, in closed form."""

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


def draw_task(settings: Settings) -> bl.Task:
    """Half the points to train on, half to validate on, from y = tanh(slope·x) + noise."""
    generator = torch.Generator().manual_seed(settings.seed)
    x = 4 * torch.rand(settings.points, generator=generator, dtype=torch.float64) - 2
    y = torch.tanh(settings.slope * x) + settings.noise * torch.randn(
        settings.points, generator=generator, dtype=torch.float64
    )
    half = settings.points // 2
    return bl.Task((x[:half], y[:half]), (x[half:], y[half:]))


def closed_form(task: bl.Task, lam: Tensor, ridge: float) -> Curve:
    """The inner minimiser of every λ at once: w_λ = ⟨h, y⟩/(⟨h, h⟩ + nρ), an oracle that shares no code with the
    solver."""
    x, y = task.train
    h = torch.tanh(lam[:, None] * x)
    w = (h * y).mean(1) / ((h * h).mean(1) + ridge)
    inner = ((w[:, None] * h - y) ** 2).mean(1) + ridge * w**2
    x, y = task.val
    outer = ((w[:, None] * torch.tanh(lam[:, None] * x) - y) ** 2).mean(1)
    return Curve(lam, w, inner, outer)


def run(settings: Settings, out: Path, progress: bool | None = None) -> Result:
    """Figure 1 from data, and f's minimiser by hypergradients beside the minimiser on a fine grid."""
    s = settings
    require(
        s.points >= 4, f"points={s.points} cannot be divided into a training and a validation set; pass at least 4."
    )
    require(0 < s.low < s.high, f"low={s.low} and high={s.high} must be positive and in this order.")
    require(
        len(s.curves) >= 1 and all(s.low <= c <= s.high for c in s.curves),
        f"curves={s.curves} must lie between low={s.low} and high={s.high}.",
    )
    require(s.grid >= 2, f"grid={s.grid} must be at least 2.")
    task = draw_task(s)
    with one_thread():
        solution = finished(
            bl.solve(
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
        )
    grid = closed_form(task, torch.linspace(s.low, s.high, s.grid, dtype=torch.float64), s.ridge)
    drawn = closed_form(task, torch.tensor(s.curves, dtype=torch.float64), s.ridge)
    best = int(grid.outer.argmin())
    numbers = {
        "solve": {
            "lambda": float(solution.outer),
            "w": float(solution.inner),
            "f": solution.value,
            "outcome": str(solution.outcome),
        },
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
    _draw(out / "figure-1.png", s, task, grid, drawn, solution)
    return Result(
        numbers,
        _choices(s),
        [_table(numbers)],
        ("figure-1.png",),
        ("The paper's figure is a cartoon without numbers; this one is computed.",),
    )


def _table(numbers: dict[str, Any]) -> Table:
    names = {"lambda": "λ that minimises f", "w": "w_λ there", "f": "f(λ) there"}
    rows = [
        (
            name,
            "cartoon",
            f"{numbers['solve'][key]:.5f}",
            f"{numbers['grid'][key]:.5f}",
            f"{numbers['solve'][key] - numbers['grid'][key]:+.1e}",
            "spacing of the grid",
        )
        for key, name in names.items()
    ]
    return Table(
        "Figure 1: the minimiser of f by hypergradients and on a grid",
        ("quantity", "paper", "ours", "grid", "difference", "why"),
        rows,
    )


def _choices(s: Settings) -> dict[str, str]:
    return {
        "problem": (
            f"w·tanh(λx) fitted to tanh({s.slope:g}x) plus normal noise of {s.noise:g}, {s.points} points, half of "
            "them to validate on"
        ),
        "inner": (
            f"mean squared error + {s.ridge:g} w², {s.steps} steps of gradient descent with η = {s.lr:g} from w = 0"
        ),
        "outer": (
            f"Adam, step {s.outer_lr:g} falling to 0 along a cosine, {s.iterations} hyperiterations from λ = "
            f"{s.start:g}, Λ = [{s.low:g}, {s.high:g}]"
        ),
    }


def _draw(path: Path, s: Settings, task: bl.Task, grid: Curve, drawn: Curve, solution: bl.Solution) -> None:
    with picture(path, height=5.2) as figure:
        left, right = figure.subplots(1, 2)
        _draw_inner(left, s, task, drawn, grid)
        left.plot(
            [float(solution.inner)],
            [solution.value],
            linestyle="none",
            marker="o",
            markersize=9,
            color=RED,
            label=r"minimiser of $f$",
            zorder=6,
        )
        legend_below(left)
        titled(right, "Outer objective", r"outer variable $\lambda$", r"validation error $f(\lambda) = E(w_\lambda)$")
        right.plot(grid.lam, grid.outer, color=BLACK, label=r"$f(\lambda)$, closed form")
        right.plot(
            drawn.lam,
            drawn.outer,
            linestyle="none",
            marker="o",
            markersize=6,
            color=BLUE,
            label=r"the $\lambda$ of the left panel",
        )
        found = rf"found by solve: $\lambda$ = {float(solution.outer):.2f}"
        right.plot(
            [float(solution.outer)],
            [solution.value],
            linestyle="none",
            marker="o",
            markersize=9,
            color=RED,
            label=found,
            zorder=5,
        )
        right.set_ylim(bottom=0)
        legend_below(right)


def _draw_inner(axes: Axes, s: Settings, task: bl.Task, drawn: Curve, grid: Curve) -> None:
    titled(axes, "Inner objectives", "inner variable $w$", "error")
    x, y = task.train
    w = torch.linspace(float(drawn.w.min()) - 0.6, float(drawn.w.max()) + 0.6, 300, dtype=torch.float64)
    for index, lam in enumerate(s.curves):
        training = ((w[:, None] * torch.tanh(lam * x) - y) ** 2).mean(1) + s.ridge * w**2
        axes.plot(
            w,
            training,
            color=BLUE,
            alpha=0.7,
            linewidth=1.2,
            label=r"training error $L_\lambda(w)$, a line for each $\lambda$" if index == 0 else None,
        )
        # Outwards, where the parabolas leave room: their bottoms lie on a curve that falls and rises again; the lowest
        # has room below.
        lowest = int(drawn.inner.argmin())
        side = 0 if index == lowest else 1 if drawn.w[index] > drawn.w[lowest] else -1
        at = (float(drawn.w[index]), float(drawn.inner[index]))
        align = {-1: "right", 0: "center", 1: "left"}[side]
        axes.annotate(
            f"{lam:g}",
            at,
            (7 * side, -4 if side else -6),
            textcoords="offset points",
            ha=align,
            va="top",
            fontsize=9,
            color=BLUE,
        )
    axes.plot(
        drawn.w,
        drawn.inner,
        linestyle="none",
        marker="o",
        markersize=6,
        color=BLUE,
        label=r"its minimiser $w_\lambda$ (number: $\lambda$)",
        zorder=4,
    )
    axes.plot(grid.w, grid.outer, color=BLACK, label=r"validation error at $w_\lambda$, all $\lambda$", zorder=3)
    axes.set_ylim(0, 1.6 * float(max(drawn.inner.max(), drawn.outer.max())))
    axes.set_xlim(float(w[0]), float(w[-1]))
