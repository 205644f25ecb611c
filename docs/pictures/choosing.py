"""Which method fits: questions from the top to the bottom, answers to the right."""

from __future__ import annotations

from pathlib import Path

from _canvas import BLUE, GREEN, GREY, ORANGE, arrow, box, canvas, save

QUESTIONS = [
    ("Is L quadratic in w, the steps constant,\nand w small (up to some thousand numbers)?", "Spectral()", BLUE),
    ("Do you want ∇f, the limit, and is the inner\nproblem solved well and strongly convex?", "Implicit(CG())", GREEN),
    ("Does the graph of all T steps\nfit into memory?", "Unrolled()", BLUE),
    ("Do T copies of w fit?", "Reverse()", BLUE),
    ("Has λ a handful of numbers only?", "Forward()", BLUE),
    ("Is Φ heavy ball, and T in the thousands?", "Reversible()", BLUE),
    ("Will a rough gradient do?", "Truncated(k)", ORANGE),
]
LAST = 'Reverse("sqrt")'


def draw(path: Path) -> None:
    step = 0.86
    height = step * (len(QUESTIONS) + 1) + 0.25
    figure, axes = canvas(6.6, height)
    for i, (question, method, colour) in enumerate(QUESTIONS):
        y = height - 0.55 - step * i
        box(axes, 2.05, y, question, size=(3.7, 0.6), colour=GREY, filled=False)
        box(axes, 5.6, y, method, size=(1.6, 0.46), colour=colour, filled=True)
        arrow(axes, (3.92, y), (4.78, y), "yes")
        arrow(axes, (2.05, y - 0.31), (2.05, y - step + 0.31))
        axes.text(2.13, y - step / 2, "no", fontsize=8.5, color=GREY, va="center")
    y = height - 0.55 - step * len(QUESTIONS)
    box(axes, 2.05, y, LAST, size=(1.6, 0.46), colour=BLUE, filled=True)
    for x, colour, meaning in [(3.4, BLUE, "exact ∇f_T"), (4.5, GREEN, "∇f at w_T"), (5.5, ORANGE, "approximate")]:
        axes.plot([x], [y], "s", color=colour, markersize=7)
        axes.text(x + 0.12, y, meaning, fontsize=8, va="center", color=GREY)
    save(figure, path)
