"""The effect of T: a linear feature map for 100 Omniglot characters, learned through T inner steps and exactly.

Ridge regression on XH inside, the validation error outside (Example 3.1, Section 5.1): H is learned by gradient descent
with momentum, through T = 1, 4, 16, 64 and 256 steps of gradient descent on w and through the closed form of w_H. The
time of a hyperiteration is measured with Algorithm 1, and with `Spectral`, whose time does not depend on T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilevel as bl
from bilevel.experiments import _effect_of_t_picture as pictures
from bilevel.experiments import _effect_of_t_tables as tables
from bilevel.experiments._feature_map import FeatureMapData, draw_data, exact_value, feature_map, right
from bilevel.experiments.base import ExperimentResult, ExperimentSettings, finished, label, require
from bilevel.outer_loop import Iteration
from bilevel.progress import counter
from bilevel.thread_pool import one_thread

PAPER = "Figures 3 and 4, Table 2 (Section 5.1)"


@dataclass(frozen=True)
class EffectOfTSettings(ExperimentSettings):
    """The full run."""

    seed: int = 0
    dataset: str = "omniglot"
    model: str = "zoo:omniglot-5way-1shot"
    classes: int = 100
    train: int = 3
    val: int = 3
    test: int = 14
    steps: tuple[int, ...] = (1, 4, 16, 64, 256)
    rho: float = 0.1
    step_scale: float = 1.0
    outer_lr: float = 20.0
    momentum: float = 0.9
    iterations: int = 500
    repeats: int = 7
    heights: tuple[int, ...] = (64, 256, 1024)


QUICK: dict[str, Any] = {"iterations": 25, "repeats": 3}


@dataclass(frozen=True)
class FeatureMapFit:
    """One outer run.

    Attributes:
        values: the objective after 0, 1, … hyperiterations.
        accuracies: of w_T on the test set, likewise.
        h: the last H.
        ends: accuracies, f and η·ν at the last H.
        right_at_peak, right_at_end: which test examples were classified correctly when the accuracy was highest, and
            at the end.
    """

    values: list[float]
    accuracies: list[float]
    h: Tensor
    ends: dict[str, float]
    right_at_peak: Tensor
    right_at_end: Tensor


def fit(
    settings: EffectOfTSettings, data: FeatureMapData, steps: int | None, begin: Callable[[str], None] | None = None
) -> FeatureMapFit:
    """Learn H through `steps` steps of gradient descent or, with None, exactly."""
    seen: list[Tensor] = []

    def record(now: Iteration) -> None:
        seen.append(right(now.hypergradient.inner, now.lam, data.test))
        if begin is not None:
            begin(f"T = {label(steps)}, {float(now.hypergradient.value):.3f}")

    lr = step_size(settings, data)
    solution = bl.solve(
        feature_map(data, settings.rho, exact=steps is None),
        data.start(),
        data.task,
        dynamics=bl.GradientDescent(lr),
        steps=steps or 0,
        # Both are exact; for up to four steps, Reverse is faster than an eigendecomposition.
        method=bl.Spectral() if steps and steps > 4 else bl.Reverse(),
        optimizer=lambda params: torch.optim.SGD(params, lr=settings.outer_lr, momentum=settings.momentum),
        iterations=settings.iterations,
        callbacks=[record],
        progress=False,
    )
    if solution.outcome.kind == "diverged":
        raise bl.DivergenceError(
            f"T = {label(steps)} with outer_lr={settings.outer_lr:g}: {solution.outcome} Pass a smaller outer_lr; "
            "fewer classes need one."
        )
    w, h = finished(solution).inner, solution.outer
    seen.append(right(w, h, data.test))
    accuracies = [round(_share(one), 6) for one in seen]
    ends = {
        "train": _share(right(w, h, data.train)),
        "validation": _share(right(w, h, data.val)),
        "f": exact_value(h, data, settings.rho),
        "η·ν": lr * data.curvature(h, settings.rho),
    }
    values = [*map(float, solution.history["value"]), solution.value]
    return FeatureMapFit(values, accuracies, h, ends, seen[accuracies.index(max(accuracies))], seen[-1])


def step_size(settings: EffectOfTSettings, data: FeatureMapData) -> float:
    """η = step_scale/ν with the ν of H_0."""
    return settings.step_scale / data.curvature(data.start(), settings.rho)


def run(settings: EffectOfTSettings, out: Path, progress: bool | None = None) -> ExperimentResult:
    """Figures 3 and 4, and Table 2 twice."""
    _check(settings)
    s, rows = settings, [*settings.steps, None]
    data = draw_data(s.dataset, s.model, s.classes, (s.train, s.val, s.test), s.seed)
    with one_thread(), counter("effect-of-t", len(rows) * s.iterations + s.repeats, progress) as begin:
        fits = {label(steps): fit(s, data, steps, begin) for steps in rows}
        times = tables.measure(data, s.rho, step_size(s, data), s.steps, s.heights, s.repeats, begin)
    numbers = _numbers(fits)
    pictures.draw_curves(out / "optimisation.png", numbers["T"])
    pictures.draw_times(out / "times.png", times)
    return ExperimentResult(
        numbers,
        _choices(s, data),
        [tables.runs(numbers), tables.claims(numbers, times), *tables.seconds(times), tables.sizes(times)],
        ("optimisation.png", "times.png"),
        tables.notes(s, numbers, times),
        data={data.name: data.description},
        times=times,
    )


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


def _numbers(fits: dict[str, FeatureMapFit]) -> dict[str, Any]:
    exact = fits["exact"]
    found = {}
    for name, one in fits.items():
        found[name] = {
            "value": one.values,
            "test accuracy": one.accuracies,
            "peak": {"accuracy": max(one.accuracies), "hyperiteration": one.accuracies.index(max(one.accuracies))},
            "end": one.ends | {"value": one.values[-1], "accuracy": one.accuracies[-1]},
            "peak minus exact's": _paired(one.right_at_peak, exact.right_at_peak),
            "end minus exact's": _paired(one.right_at_end, exact.right_at_end),
        }
    return {"T": found}


def _paired(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """The difference of two accuracies on the same test examples, and 1.96 of its standard errors."""
    gaps = ours.double() - theirs.double()
    return {"difference": float(gaps.mean()), "interval": float(1.96 * gaps.std() / len(gaps) ** 0.5)}


def _choices(s: EffectOfTSettings, data: FeatureMapData) -> dict[str, str]:
    drawings = "20 drawings of a character" if s.dataset == "omniglot" else "the drawings of a class"
    return {
        "sets": f"{s.train} training, {s.val} validation and {s.test} test examples a class, no drawing in two sets; "
        f"the paper's 3, 3 and 15 would need 21, and there are {drawings}",
        "classes": f"{s.classes} that are new to the network: meta-test classes, not rotated, drawn by the seed",
        "features": f"{data.train[0].shape[1]} numbers of {s.model}, batch norm {data.batch_norm}; no constant "
        "feature; one factor on all of them makes the mean squared norm 1 on the training set",
        "ρ": f"{s.rho:g} in ½‖XHw − Y‖² + ρ/2 ‖w‖², which has the paper's closed form",
        "outer objective": "mean over the validation set of ‖y − wᵀHᵀx‖², y a unit vector",
        "inner step size": f"η = {s.step_scale:g}/ν with the ν of H_0, the same for all T and hyperiterations; w_0 = 0",
        "start of H": "the identity",
        "outer optimiser": f"gradient descent with momentum {s.momentum:g} and step {s.outer_lr:g}, {s.iterations} "
        "hyperiterations, the same for all T",
        "hypergradient": "Reverse() up to T = 4 and Spectral() above, which both give the exact ∇f_T; 'exact' "
        "differentiates w_H",
        "accuracy": "of w_T at the current H, by the largest of the outputs",
        "precision": "float64; the network ran in float32",
        "time": f"processor seconds of one thread for f_T and ∇f_T at H_0, the least of {s.repeats} rounds in which "
        "everything is measured in turn; the paper's are seconds of a whole run on a GPU",
    }


def _check(s: EffectOfTSettings) -> None:
    s.at_least(2, classes="leaves nothing to tell apart")
    empty = "leaves a set empty"
    s.at_least(1, train=empty, val=empty, test=empty, heights="must be numbers of rows")
    s.at_least(1, iterations="learns nothing", repeats="measures no time")
    require(
        len(s.steps) >= 1 and all(t >= 1 for t in s.steps) and list(s.steps) == sorted(set(s.steps)),
        f"steps={s.steps} must be growing numbers T ≥ 1; the exact run is always added.",
    )
    require(s.rho > 0, f"rho={s.rho} leaves the inner problem without a unique minimiser; pass a positive number.")
    s.check_step_scale(s.step_scale)
    require(s.outer_lr > 0, f"outer_lr={s.outer_lr} must be positive.")
    require(0 <= s.momentum < 1, f"momentum={s.momentum} must be at least 0 and below 1.")
