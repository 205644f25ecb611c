"""Two inner minimisers, and gradient descent at the worse: f_T need not tend to f.

The model is g_w(a, b) = w²·a + w·b. The training points all have b = 0, so that the training error sees w² only and has
two minimisers ±w; the validation points do have b, and tell the sign. Started at a small positive w, gradient descent
ends at the wrong one (Section 3): lim f_T(λ) = E(w⁽¹⁾, λ) > E(w⁽²⁾, λ) = f(λ).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bilevel as bl
from bilevel.experiments.base import ExperimentResult, ExperimentSettings, TextTable, require
from bilevel.plotting import BLACK, BLUE, GREEN, ORANGE, RED, Axes, dots, picture, titled
from bilevel.thread_pool import one_thread

PAPER = "Figure 2 (Section 3)"


@dataclass(frozen=True)
class TwoWellsSettings(ExperimentSettings):
    """The full run."""

    seed: int = 0
    points: int = 20
    noise: float = 0.05
    truth: float = -1.0
    penalty: float = 0.1
    start: float = 0.1
    lr: float = 0.05
    steps: tuple[int, ...] = (0, 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 70, 100)
    penalties: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4)


QUICK: dict[str, Any] = {"points": 12}

Points = tuple[Tensor, Tensor, Tensor]


def predict(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return w**2 * a + w * b


def error(w: Tensor, data: Points) -> Tensor:
    a, b, y = data
    return ((predict(w, a, b) - y) ** 2).mean()


def two_wells(start: float) -> bl.Problem:
    """Mean squared errors; λ weighs a penalty w², which leaves both minimisers equally good inside."""
    return bl.Problem(
        inner=lambda w, lam, data: error(w, data) + lam * w**2,
        outer=lambda w, lam, data: error(w, data),
        init=lambda lam: torch.full_like(lam, start),
    )


def draw_task(s: TwoWellsSettings) -> bl.Task:
    generator = torch.Generator().manual_seed(s.seed)
    truth = torch.tensor(s.truth, dtype=torch.float64)

    def points(with_b: bool) -> Points:
        a = 0.5 + torch.rand(s.points, generator=generator, dtype=torch.float64)
        b = torch.randn(s.points, generator=generator, dtype=torch.float64) * with_b
        return a, b, predict(truth, a, b) + s.noise * torch.randn(s.points, generator=generator, dtype=torch.float64)

    return bl.Task(points(with_b=False), points(with_b=True))


def minimisers(task: bl.Task, penalty: float) -> tuple[float, float]:
    """w⁽¹⁾ > 0 > w⁽²⁾ in closed form: with u = w², the training error mean(ua − y)² + λu is least at u = (mean(ay) −
    λ/2)/mean(a²)."""
    a, _, y = task.train
    u = float(((a * y).mean() - penalty / 2) / (a * a).mean())
    require(
        u > 0,
        f"penalty={penalty} is so large that w = 0 is the only minimiser; pass one below "
        f"{float(2 * (a * y).mean()):.3g}.",
    )
    return u**0.5, -(u**0.5)


def approximation(task: bl.Task, penalty: float, steps: int, s: TwoWellsSettings) -> tuple[float, float]:
    """w_T and f_T(λ)."""
    lam = torch.tensor(penalty, dtype=torch.float64)
    arguments: dict[str, Any] = {"dynamics": bl.GradientDescent(s.lr), "steps": steps, "method": bl.Reverse()}
    found = bl.hypergradient(two_wells(s.start), lam, task, **arguments, allow_unused=True)
    return float(found.inner), float(found.value)


def run(settings: TwoWellsSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Figure 2 from data: both outer values, and f_T on its way to the wrong one."""
    s = settings
    require(
        s.start != 0,
        "start=0 is the top between the two wells, where gradient descent stays for ever; pass a number on one side.",
    )
    require(len(s.steps) >= 1 and len(s.penalties) >= 1, "steps and penalties must each hold at least one number.")
    task = draw_task(s)
    for penalty in (s.penalty, *s.penalties):
        minimisers(task, penalty)
    with one_thread():
        path = [approximation(task, s.penalty, steps, s) for steps in s.steps]
        by_penalty = [_limits(task, penalty, s) for penalty in s.penalties]
    numbers = {
        "at": _limits(task, s.penalty, s),
        "T": list(s.steps),
        "w_T": [w for w, _ in path],
        "f_T": [f for _, f in path],
        "by penalty": by_penalty,
    }
    _draw(out / "figure-2.png", s, task, numbers)
    notes = (
        "The paper's figure is a cartoon without numbers; this one is computed. The gap holds for every λ tried, see "
        "result.json.",
    )
    return ExperimentResult(numbers, _choices(s), [_table(s, numbers)], ("figure-2.png",), notes)


def _limits(task: bl.Task, penalty: float, s: TwoWellsSettings) -> dict[str, float]:
    """w1 on the side of the start and w2 on the other, their inner and outer values, and w_T and f_T for the largest T,
    at this λ."""
    right, left = minimisers(task, penalty)
    reached, other = (right, left) if s.start > 0 else (left, right)
    w, f = approximation(task, penalty, max(s.steps), s)
    values = {"lambda": penalty, "w1": reached, "w2": other, "w_T": w, "f_T": f}
    for name, point in (("1", reached), ("2", other)):
        at = torch.tensor(point, dtype=torch.float64)
        values["L" + name] = float(error(at, task.train) + penalty * at**2)
        values["E" + name] = float(error(at, task.val))
    return values | {"f": min(values["E1"], values["E2"])}


def _table(s: TwoWellsSettings, numbers: dict[str, Any]) -> TextTable:
    at = numbers["at"]
    last = f"f_T(λ), T = {max(s.steps)}"
    compared = (
        ("L(w1), w1 on the side of the start", "= L(w2)", "L1", "L2", ".1e", "both minimise the inner objective"),
        ("E(w1)", "> E(w2)", "E1", "E2", ".3f", "the training data do not tell the sign of w"),
        ("E(w2)", "= f(λ)", "E2", "f", ".1e", "f(λ) is the better of the two, by Eq. 2"),
        (last, "→ E(w1)", "f_T", "E1", ".1e", "gradient descent stays on the side where it began"),
    )
    rows = [
        (name, paper, f"{at[ours]:.6f}", f"{at[ours] - at[other]:+{form}}", why)
        for name, paper, ours, other, form, why in compared
    ]
    return TextTable(f"Figure 2 at λ = {s.penalty:g}", ("quantity", "paper", "ours", "difference", "why"), rows)


def _choices(s: TwoWellsSettings) -> dict[str, str]:
    return {
        "problem": (
            f"w²·a + w·b with w = {s.truth:g} plus normal noise of {s.noise:g}; {s.points} training points with b = 0 "
            "and as many validation points with normal b"
        ),
        "inner": f"mean squared error + λw², λ = {s.penalty:g}",
        "dynamics": f"gradient descent, η = {s.lr:g}, from w = {s.start:g}",
    }


def _draw(path: Path, s: TwoWellsSettings, task: bl.Task, numbers: dict[str, Any]) -> None:
    at = numbers["at"]
    with picture(path) as figure:
        left, right = figure.subplots(1, 2)
        _draw_wells(left, s, task, numbers)
        titled(right, r"$f_T$ tends to $E(w^{(1)})$", "inner steps $T$", "outer value")
        right.axhline(at["E1"], color=RED, linestyle="--", label=rf"$E(w^{{(1)}})$ = {at['E1']:.3g}")
        right.axhline(at["E2"], color=GREEN, linestyle="--", label=rf"$E(w^{{(2)}})$ = {at['E2']:.3g}")
        shown: Any = {"marker": "o", "markersize": 5, "clip_on": False, "zorder": 4}
        right.plot(numbers["T"], numbers["f_T"], color=BLUE, label=r"$f_T(\lambda)$", **shown)
        right.set_xscale("symlog", linthresh=1)
        right.set_xlim(0, 1.2 * max(*s.steps, 1))
        right.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
        highest = max(*numbers["f_T"], at["E1"], at["E2"])
        right.set_ylim(-0.06 * highest, 1.45 * highest)
        right.legend(loc="upper left")


def _draw_wells(axes: Axes, s: TwoWellsSettings, task: bl.Task, numbers: dict[str, Any]) -> None:
    titled(axes, "Two inner minimisers", "inner variable $w$", "objective")
    at = numbers["at"]
    reach = 1.45 * abs(at["w1"])

    def inner(w: float) -> float:
        return float(error(torch.tensor(w, dtype=torch.float64), task.train)) + s.penalty * w**2

    w = np.linspace(-reach, reach, 400)
    axes.plot(w, [inner(v) for v in w], color=BLUE, label=r"inner objective $L_\lambda(w)$")
    axes.plot(w, [float(error(torch.tensor(v), task.val)) for v in w], color=ORANGE, label="outer objective $E(w)$")
    iterates = numbers["w_T"]
    dots(axes, iterates, [inner(v) for v in iterates], BLACK, "gradient descent", 4.5, zorder=4)
    for name, colour in (("1", RED), ("2", GREEN)):
        point, low, high = (at[letter + name] for letter in "wLE")
        axes.plot([point] * 2, [low, high], color=colour, linestyle=":", linewidth=1.4)
        dots(axes, [point], [high], colour, rf"$E(w^{{({name})}})$", 8, marker="D", zorder=5)
    highest = max(at["E1"], at["E2"])
    axes.set_ylim(-0.05 * highest, 1.9 * highest)
    axes.set_xlim(-reach, reach)
    axes.legend(loc="upper center", ncols=2)
