"""Curves of trainings: the series of a run, thinned out, and the figures that plotly draws of them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bilevel.errors import BilevelError
from bilevel.learners.settings import TrainingSettings

if TYPE_CHECKING:
    from bilevel.report.read import FoundRun

# Points of a curve on the page. More cannot be told apart on a screen, and would make the file large.
MOST = 500
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
COLOURS = 8  # in style.css; the next run takes the next dash

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Numbers of one run over hyperiterations and over minutes; NaN where there is none."""

    iterations: Array
    minutes: Array
    values: Array
    interval: Array | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class RunCurves:
    """What a run recorded: the outer loss and the speed, and the accuracy on meta-validation."""

    loss: Series
    speed: Series
    accuracy: Series

    @property
    def empty(self) -> bool:
        return not (len(self.loss) or len(self.accuracy))


def curves(run: FoundRun) -> RunCurves:
    validations = [line for line in run.metrics if "score" in line]
    steps = [line for line in run.metrics if "loss" in line]
    minutes = _minutes_of_losses(validations, steps, run.settings)
    when = _numbers(validations, "iteration")
    accuracy = Series(
        when, _numbers(validations, "minutes"), _numbers(validations, "score"), _numbers(validations, "interval")
    )
    at = _numbers(steps, "iteration")
    loss, speed = (Series(at, minutes, _numbers(steps, name)) for name in ("loss", "images_per_second"))
    return RunCurves(_thinned(loss), _thinned(speed), _picked(accuracy))


def _minutes_of_losses(
    validations: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], settings: dict[str, Any]
) -> Array:
    """The minutes of the loss records, which do not contain any.

    Between two validations they are interpolated; after the last one they follow from the speed and the number of
    images in a hyperiteration.
    """
    known = [line for line in validations if "minutes" in line]
    if not known:
        return np.full(len(steps), math.nan)
    last, minutes = known[-1]["iteration"], known[-1]["minutes"]
    found: Array = np.interp(_numbers(steps, "iteration"), _numbers(known, "iteration"), _numbers(known, "minutes"))
    try:
        images = TrainingSettings.of(settings).images_in_iteration if settings else math.nan
    except BilevelError:  # settings of another version
        images = math.nan
    for i, line in enumerate(steps):
        if line["iteration"] > last:
            speed = line.get("images_per_second", math.nan)
            minutes += (line["iteration"] - last) * images / speed / 60 if speed else math.nan
            last, found[i] = line["iteration"], minutes
    return found


def _numbers(lines: Sequence[dict[str, Any]], name: str) -> Array:
    return np.array([line.get(name, math.nan) for line in lines], dtype=float)


def _thinned(series: Series) -> Series:
    """Means of neighbouring records, which are means over hyperiterations themselves."""
    count = math.ceil(len(series) / MOST)
    if count <= 1:
        return series
    edges = range(0, len(series), count)

    def means(values: Array) -> Array:
        return np.array([values[i : i + count].mean() for i in edges])

    return Series(means(series.iterations).round(), means(series.minutes), means(series.values))


def _picked(series: Series) -> Series:
    """Some of the validations as they are, with the first, the best and the last."""
    if len(series) <= MOST:
        return series
    best = int(np.nanargmax(series.values)) if np.isfinite(series.values).any() else 0
    rows = np.unique([*np.linspace(0, len(series) - 1, MOST).astype(int), best])
    assert series.interval is not None
    return Series(series.iterations[rows], series.minutes[rows], series.values[rows], series.interval[rows])


def figures(named: Sequence[tuple[str, RunCurves]]) -> dict[str, list[dict[str, Any]]]:
    """The traces of three charts, as plotly reads them: loss, accuracy with its 95 % band, and images per second.

    A trace's `meta` says which run it belongs to and holds both of its x axes, between which the page switches.
    """
    drawn: dict[str, list[dict[str, Any]]] = {"loss": [], "accuracy": [], "speed": []}
    for number, (name, found) in enumerate(named):
        for kind, traces in drawn.items():
            series: Series = getattr(found, kind)
            if not np.isfinite(series.values).any():
                continue
            unit = {"loss": ".4f", "accuracy": ".2f", "speed": ",.0f"}[kind]
            trace: dict[str, Any] = {
                "type": "scatter",
                "x": _plain(series.iterations),
                "y": _plain(series.values),
                "name": html.escape(name, quote=False),  # plotly reads tags and entities in names
                "mode": "lines+markers" if len(series) < 60 else "lines",
                "marker": {"size": 5, "symbol": number % 8},
                "line": {"dash": DASHES[number // COLOURS % len(DASHES)], "width": 2},
                "hovertemplate": f"%{{y:{unit}}}",
                "meta": {"run": number, "part": "line", **_axes(series)},
            }
            if series.interval is not None:  # an accuracy
                traces.append(_band(series, series.interval, number))
                trace["y"] = _plain(100 * series.values)
                trace["hovertemplate"] += "%{customdata} %"
                trace["customdata"] = [f" ± {100 * x:.2f}" if math.isfinite(x) else "" for x in series.interval]
            traces.append(trace)
    return drawn


def _band(series: Series, interval: Array, number: int) -> dict[str, Any]:
    """The interval as one closed shape, up along one side and back along the other."""
    width = np.nan_to_num(interval)
    forth, back = 100 * (series.values + width), 100 * (series.values - width)
    axes = {name: values + values[::-1] for name, values in _axes(series).items()}
    return {
        "type": "scatter",
        "x": axes["iterations"],
        "y": _plain(forth) + _plain(back)[::-1],
        "fill": "toself",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"run": number, "part": "band", **axes},
    }


def _axes(series: Series) -> dict[str, list[float | None]]:
    return {"iterations": _plain(series.iterations), "minutes": _plain(series.minutes)}


def _plain(values: Array) -> list[float | None]:
    """Numbers for JSON, rounded to what can be seen; what is not finite becomes a gap."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
