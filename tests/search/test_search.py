"""The short form of the search, and a proof that it finds what it looks for."""

import dataclasses

import pytest

import bilevel as bl
from bilevel import trees
from search.__main__ import search
from search.drawing import METHODS, Case
from search.judging import Defect, judge

PLAIN = Case(
    method="Reverse",
    dynamics="HeavyBall",
    loss="squares",
    penalty="one",
    outer="squares",
    start="learned",
    batches="all",
    learned="",
    hazard="",
    tree="dict",
    single=False,
    size=3,
    rows=4,
    steps=5,
    lr=0.1,
    momentum=0.5,
    seed=1,
)


def test_no_answer_is_wrong_without_a_word():
    lines = []
    counts = search(60, seed=1, report=lines.append)
    assert not counts["wrong"], lines
    assert counts["right"] > 20 and counts["refused"] > 5


@pytest.mark.parametrize("hazard", ["λ in a closure", "random noise"])
def test_what_cannot_be_right_is_refused(hazard):
    assert judge(dataclasses.replace(PLAIN, hazard=hazard)) == "refused"


@pytest.mark.parametrize("factor", [0.99, -1.0, 0.0])
def test_a_wrong_gradient_is_found(factor, monkeypatch):
    class Scaled(bl.Reverse):
        def __call__(self, process):
            result = super().__call__(process)
            return dataclasses.replace(result, grad=trees.scale(result.grad, factor))

    assert judge(PLAIN) == "right"
    monkeypatch.setitem(METHODS, "Reverse", Scaled())
    with pytest.raises(Defect, match="slope"):
        judge(PLAIN)


def test_a_wrong_value_is_found(monkeypatch):
    class Shifted(bl.Reverse):
        def __call__(self, process):
            result = super().__call__(process)
            return dataclasses.replace(result, value=result.value + 0.01)

    monkeypatch.setitem(METHODS, "Reverse", Shifted())
    with pytest.raises(Defect, match="value"):
        judge(PLAIN)
