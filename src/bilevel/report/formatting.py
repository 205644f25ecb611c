"""Names and numbers as text for the page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def task_name(settings: dict[str, Any]) -> str:
    """The data set, ways and shots of a few-shot training; of other settings, the data set alone.

    >>> task_name({"dataset": "glyphs", "ways": 5, "shots": 1})
    'glyphs 5-way 1-shot'
    """
    if not {"dataset", "ways", "shots"} <= settings.keys():
        return str(settings.get("dataset", ""))
    return f"{settings['dataset']} {settings['ways']}-way {settings['shots']}-shot"


def labels(specs: Sequence[str], owned: Sequence[bool] = ()) -> list[str]:
    """Short, distinct names of runs: as many of the last parts of their paths as that needs.

    A run that belongs to a result is named with it.

    >>> labels(["results/a/runs/reverse", "results/b/runs/reverse", "zoo:x", "runs/long"])
    ['a/reverse', 'b/reverse', 'zoo:x', 'long']
    >>> labels(["results/glyphs/runs/reverse"], [True])
    ['glyphs/reverse']
    """
    parts = [[part for part in Path(spec).parts if part != "runs"] or [spec] for spec in specs]
    found = []
    for number, own in enumerate(parts):
        least = min(2 if owned and owned[number] else 1, len(own))
        tried = (own[-length:] for length in range(least, len(own) + 1))
        alone = (tail for tail in tried if [other[-len(tail) :] for other in parts].count(tail) == 1)
        found.append("/".join(next(alone, own)))
    return [name if found.count(name) == 1 else spec for name, spec in zip(found, specs, strict=True)]


def slug(text: str) -> str:
    """The text as an HTML anchor.

    >>> slug("runs/My run №1")
    'runs-my-run-1'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def number(value: Any) -> str:
    """A value as text: three digits of a float, "none" for one that is not finite, other types by `str`.

    >>> number(0.000123456), number(float("inf")), number(None), number([1, 2]), number(True)
    ('0.000123', 'none', '–', '1, 2', 'yes')
    """
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(number(item) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:.3g}" if math.isfinite(value) else "none"


def setting(value: Any) -> str:
    """A setting as text, not rounded.

    >>> setting(1e-05), setting([0.1, 0.3]), setting(False), setting("")
    ('1e-05', '0.1, 0.3', 'no', '–')
    """
    if isinstance(value, float):
        return f"{value:.10g}"
    return ", ".join(map(setting, value)) if isinstance(value, (list, tuple)) else number(value)


def minutes(value: Any) -> str:
    """A number of minutes as text, in seconds, minutes or hours.

    >>> minutes(0.5), minutes(90.0), minutes(float("nan"))
    ('30 s', '1.5 h', '–')
    """
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "–"
    if value < 1:
        return f"{60 * value:.0f} s"
    return f"{value:.1f} min" if value < 60 else f"{value / 60:.1f} h"
