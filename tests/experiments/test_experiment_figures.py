"""Figures 1 and 2: what the pictures show holds in numbers."""

import pytest
import torch

import bilevel as bl
from bilevel.experiments import figure_1, figure_2
from bilevel.experiments.base import reproduce


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return reproduce("figure-1", quick=True, out=tmp_path_factory.mktemp("results"), progress=False)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    return reproduce("figure-2", quick=True, out=tmp_path_factory.mktemp("results"), progress=False)


@pytest.mark.parametrize("name", ["first", "second"])
def test_what_is_written(name, request):
    result, record = request.getfixturevalue(name)
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "table.md", *result.pictures}
    assert result.choices and all(
        (record.folder / picture).read_bytes().startswith(b"\x89PNG") for picture in result.pictures
    )


def test_solve_finds_the_minimum_of_the_outer_curve(first):
    numbers = first[0].numbers
    assert abs(numbers["solve"]["lambda"] - numbers["grid"]["lambda"]) <= 2 * numbers["grid"]["spacing"]
    assert numbers["solve"]["f"] <= numbers["grid"]["f"] * (1 + 1e-6)
    # It lies inside Λ and below the validation errors of the curves drawn, so the red dot is a minimum to look at.
    assert 0.5 < numbers["solve"]["lambda"] < 5.5
    assert all(curve["validation"] >= numbers["solve"]["f"] for curve in numbers["curves"])


def test_the_dots_are_minimisers_of_the_training_error():
    settings = figure_1.OneWeightSettings()
    task, problem = figure_1.draw_task(settings), figure_1.one_weight(settings.ridge)
    lam = torch.tensor(settings.curves)
    curve = figure_1.closed_form(task, lam, settings.ridge)
    for index in range(len(lam)):
        w = curve.w[index].clone().requires_grad_()
        value = problem.inner(w, lam[index], task.train)
        (slope,) = torch.autograd.grad(value, w)
        assert abs(float(slope)) < 1e-12
        assert value.item() == pytest.approx(float(curve.inner[index]), rel=1e-12)
        assert float(problem.outer(w.detach(), lam[index], task.val)) == pytest.approx(
            float(curve.outer[index]), rel=1e-12
        )


def test_the_inner_steps_of_figure_1_have_converged():
    settings = figure_1.OneWeightSettings()
    task, problem = figure_1.draw_task(settings), figure_1.one_weight(settings.ridge)
    for lam in (settings.low, settings.high):
        here = torch.tensor(lam)
        w = bl.hypergradient(
            problem, here, task, dynamics=bl.GradientDescent(settings.lr), steps=settings.steps, method=bl.Spectral()
        ).inner
        assert float(w) == pytest.approx(float(figure_1.closed_form(task, here[None], settings.ridge).w), rel=1e-9)


def test_gradient_descent_reaches_the_worse_minimiser(second):
    numbers = second[0].numbers
    for at in [numbers["at"], *numbers["by penalty"]]:
        assert at["L1"] == pytest.approx(at["L2"], rel=1e-14)
        assert at["w_T"] == pytest.approx(at["w1"], rel=1e-9)
        assert at["f_T"] == pytest.approx(at["E1"], rel=1e-9)
        assert at["E1"] > at["E2"] == at["f"]
        assert at["f_T"] > at["f"] + 0.1
    gaps = [abs(value - numbers["at"]["E1"]) for value in numbers["f_T"]]
    assert gaps[-1] < 1e-9 < gaps[0]


def test_both_are_global_minimisers_of_the_training_error():
    settings = figure_2.TwoWellsSettings()
    task = figure_2.draw_task(settings)
    grid = torch.linspace(-3, 3, 20_001)
    a, _, y = task.train
    values = ((grid[:, None] ** 2 * a - y) ** 2).mean(1) + settings.penalty * grid**2
    lowest = float(values.min())
    for point in figure_2.minimisers(task, settings.penalty):
        w = torch.tensor(point)
        here = float(figure_2.error(w, task.train) + settings.penalty * w**2)
        assert here <= lowest and lowest - here < 1e-6


def test_from_the_other_side_it_reaches_the_better_one(tmp_path):
    result, _ = reproduce("figure-2", {"start": "-0.1", "steps": "0,100"}, out=tmp_path, progress=False)
    at = result.numbers["at"]
    assert at["f_T"] == pytest.approx(at["f"], rel=1e-9) and at["E1"] < at["E2"]


def test_a_penalty_that_leaves_one_minimiser_is_refused(tmp_path):
    with pytest.raises(bl.BilevelError, match=r"penalty=10.0 .*only minimiser"):
        reproduce("figure-2", {"penalty": "10"}, out=tmp_path, progress=False)
    with pytest.raises(bl.BilevelError, match="start=0"):
        reproduce("figure-2", {"start": "0"}, out=tmp_path, progress=False)
