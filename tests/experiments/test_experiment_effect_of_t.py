"""The effect of T: the mathematics on made-up features, the whole experiment on a few scripts of Glyphs, and the
paper's problem where Omniglot is at hand."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import bilevel as bl
from bilevel.experiments import _effect_of_t_tables as words
from bilevel.experiments import effect_of_t as experiment
from bilevel.experiments._effect_of_t_tables import Hyperiteration, line
from bilevel.experiments._feature_map import (
    FeatureMapData,
    draw_data,
    encode,
    exact_value,
    feature_map,
    inner,
    minimiser,
    right,
)
from bilevel.experiments.base import reproduce
from few_scripts import drawn

OMNIGLOT = ("omniglot/images_background.zip", "omniglot/images_evaluation.zip")
SMALL = {
    "dataset": "glyphs",
    "classes": "15",
    "iterations": "12",
    "outer_lr": "1",
    "repeats": "1",
    "steps": "1,4,16,64",
    "heights": "32,256",
}
ENDS = {"value": 0.4, "accuracy": 0.9, "train": 1.0, "validation": 0.99, "f": 0.4, "η·ν": 1.0}


def made_up(classes=6, features=12, seed=0, noise=0.1):
    """Three sets of noisy features around a point for each class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=generator)

    def draw(each):
        labels = torch.arange(classes).repeat_interleave(each)
        x = centres[labels] + noise * torch.randn(len(labels), features, generator=generator)
        return x / features**0.5, F.one_hot(labels, classes).double()

    return FeatureMapData(draw(3), draw(3), draw(10))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with drawn(tmp_path_factory):
        runs = [
            reproduce("effect-of-t", SMALL | {"seed": seed}, out=tmp_path_factory.mktemp("results"), progress=False)
            for seed in ("0", "0", "1")
        ]
        yield runs


def test_the_closed_form_is_the_papers_and_minimises_the_inner_objective():
    data, rho = made_up(), 0.3
    h = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    w = minimiser(h, data.train, rho)
    x, y = data.train
    torch.testing.assert_close(torch.linalg.inv((x @ h).T @ x @ h + rho * torch.eye(12)) @ (x @ h).T @ y, w)
    w.requires_grad_()
    (slope,) = torch.autograd.grad(inner(w, encode(h, data.task).train, rho), w)
    assert float(slope.norm()) < 1e-12 * float((x.T @ y).norm())


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_spectral_equals_reverse(steps):
    data, rho = made_up(), 0.1
    h = data.start() + 0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(2))
    lr = 1 / data.curvature(h, rho)
    ours, algorithm_1 = (
        bl.hypergradient(
            feature_map(data, rho), h, data.task, dynamics=bl.GradientDescent(lr), steps=steps, method=method
        )
        for method in (bl.Spectral(), bl.Reverse())
    )
    torch.testing.assert_close(ours.value, algorithm_1.value, rtol=1e-12, atol=0)
    scale = float(algorithm_1.grad.norm())
    torch.testing.assert_close(ours.grad, algorithm_1.grad, rtol=1e-10, atol=1e-10 * scale)


def test_exact_is_the_limit_of_many_steps_and_the_derivative_of_f():
    data, rho = made_up(), 0.2
    h = data.start()
    dynamics = bl.GradientDescent(1 / data.curvature(h, rho))
    exact = bl.hypergradient(feature_map(data, rho, exact=True), h, data.task, dynamics=dynamics, steps=0)
    many = bl.hypergradient(feature_map(data, rho), h, data.task, dynamics=dynamics, steps=5000, method=bl.Spectral())
    torch.testing.assert_close(exact.inner, many.inner, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.grad, many.grad, rtol=1e-8, atol=1e-8 * float(exact.grad.norm()))
    direction, size = torch.randn(12, 12, generator=torch.Generator().manual_seed(3)), 1e-5
    slope = (exact_value(h + size * direction, data, rho) - exact_value(h - size * direction, data, rho)) / (2 * size)
    assert float((exact.grad * direction).sum()) == pytest.approx(slope, rel=1e-6)
    assert exact_value(h, data, rho) == pytest.approx(float(exact.value), rel=1e-12)


def farthest(curves):
    """How far each curve strays from the last one, at most."""
    return [max(abs(a - b) for a, b in zip(one, curves[-1], strict=True)) for one in curves[:-1]]


def test_curves_are_ordered_towards_exact():
    settings = experiment.EffectOfTSettings(iterations=30, outer_lr=0.05, steps=(1, 4, 16, 64))
    data = made_up()
    fits = [experiment.fit(settings, data, steps) for steps in (*settings.steps, None)]
    assert all(a > 2 * b for a, b in pairwise(farthest([one.values for one in fits])))
    assert len(fits[0].values) == len(fits[0].accuracies) == 31
    assert all(one.values[-1] < one.values[0] for one in fits)
    last = fits[-1]
    assert last.ends["f"] == pytest.approx(last.values[-1], rel=1e-12)
    assert float(last.right_at_end.double().mean()) == pytest.approx(last.accuracies[-1], abs=1e-6)


def test_accuracy_by_hand():
    h, w = torch.eye(2), torch.eye(2)
    batch = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert right(w, h, batch).tolist() == [True, True, False]


def test_a_step_does_not_see_the_size_of_h():
    data, rho = made_up(), 0.1
    lr = 1 / data.curvature(data.start(), rho)
    few, own, more = (Hyperiteration(data, rho, lr, height) for height in (5, 12, 30))
    assert [one.h.numel() for one in (few, own, more)] == [60, 144, 360]
    results = [one(3, bl.Reverse()) for one in (few, own, more)]
    assert {one.inner.shape for one in results} == {torch.Size([12, 6])}
    # Copies of features below an H that ignores them change nothing.
    torch.testing.assert_close(results[2].value, results[1].value)
    torch.testing.assert_close(own(3, bl.Reverse()).grad, Hyperiteration(data, rho, lr)(3, bl.Reverse()).grad)


def test_the_papers_times_lie_on_a_line():
    printed = {int(t): seconds for t, seconds in words.PRINTED.items() if t != "exact"}
    fitted = line(list(printed), list(printed.values()))
    assert 19 < fitted["slope"] < 23 and fitted["largest deviation"] < 0.15
    assert words.PRINTED["256"] / words.PRINTED["exact"] == pytest.approx(17.3, abs=0.05)


def runs_like(**accuracies):
    """Numbers of runs that reach these accuracies: (best, last, hyperiteration of the best)."""
    found = {}
    for name, (best, last, when) in accuracies.items():
        found[name.lstrip("T")] = {
            "value": [0.9, 0.5],
            "peak": {"accuracy": best, "hyperiteration": when},
            "end": {**ENDS, "accuracy": last},
            "peak minus exact's": {"difference": best - accuracies["exact"][0], "interval": 0.01},
            "end minus exact's": {"difference": last - accuracies["exact"][1], "interval": 0.01},
        }
    return {"T": found}


def test_what_is_said_follows_from_the_numbers():
    regularised = runs_like(T1=(0.90, 0.90, 90), T4=(0.945, 0.945, 50), exact=(0.94, 0.92, 10))
    assert words.regularising(regularised, "end") == ("4", pytest.approx(0.025), 0.01)
    verdict = words._regularises(regularised)
    assert verdict[2].startswith("yes after all") and verdict[2].endswith("at its best") and verdict[3] == "in part"
    assert words._hyperiterations(regularised)[2] == "yes"
    close = runs_like(T1=(0.90, 0.90, 9), T4=(0.96, 0.925, 50), exact=(0.94, 0.92, 10))
    verdict = words._regularises(close)
    assert verdict[2].startswith("not beyond chance after all") and "; yes where" in verdict[2]
    assert words._hyperiterations(close)[2:4] == ("no", "differs")
    worse = runs_like(T1=(0.90, 0.90, 90), T4=(0.93, 0.91, 50), exact=(0.94, 0.92, 10))
    assert words._regularises(worse)[2:4] == (
        "no after all hyperiterations; no where each run is stopped at its best",
        "differs",
    )


def test_the_whole_experiment_on_glyphs(small):
    result, record = small[0]
    found = result.numbers["T"]
    assert list(found) == ["1", "4", "16", "64", "exact"]
    assert all(a > b for a, b in pairwise(farthest([one["value"] for one in found.values()])))
    assert found["exact"]["end minus exact's"] == {"difference": 0.0, "interval": 0.0}
    for one in found.values():
        assert len(one["value"]) == len(one["test accuracy"]) == 13
        assert one["peak"]["accuracy"] == max(one["test accuracy"]) > 0.4  # chance is 1/15
    assert {file.name for file in record.folder.iterdir()} == {
        "result.json",
        "optimisation.png",
        "times.png",
        "table.md",
    }
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    assert {"ρ", "inner step size", "start of H", "outer optimiser", "sets", "features"} <= set(written["choices"])
    assert written["times"]["exact"]["seconds"] > 0 and "seconds" not in json.dumps(written["numbers"])
    assert "fingerprint" in written["data"]["glyphs"]
    table = (record.folder / "table.md").read_text(encoding="utf-8")
    assert "Table 2 with Algorithm 1" in table and "Table 2 with `Spectral`" in table
    assert "| claim | paper | ours | difference | why |" in table


def test_every_method_is_timed_at_every_t(small):
    times = small[0][0].times
    for method in ("Reverse", "Spectral"):
        assert set(times[method]) == {"1", "4", "16", "64"}
        assert all(one["seconds"] > 0 for one in times[method].values())


def test_a_run_is_a_function_of_its_settings_and_seed(small):
    first, again, other = (json.dumps(run[0].numbers) for run in small)
    assert first == again != other


def test_three_disjoint_sets_of_new_classes(real, shared_cache):
    real(*OMNIGLOT)
    data = draw_data("omniglot", "zoo:omniglot-5way-1shot", 100, (3, 3, 14), seed=0)
    assert [tuple(x.shape) for x, _ in (data.train, data.val, data.test)] == [(300, 256), (300, 256), (1400, 256)]
    assert all(bool((y.sum(1) == 1).all()) and y.shape[1] == 100 for _, y in (data.train, data.val, data.test))
    assert float(data.train[0].square().sum(1).mean()) == pytest.approx(1, rel=1e-12)
    every = torch.cat([x for x, _ in (data.train, data.val, data.test)])
    assert len(torch.unique(every, dim=0)) == 2000
    with pytest.raises(bl.BilevelError, match="20 examples"):
        draw_data("omniglot", "zoo:omniglot-5way-1shot", 100, (3, 3, 15), seed=0)


def test_on_omniglot_spectral_equals_reverse_and_exact_is_not_far_from_256_steps(real, shared_cache):
    real(*OMNIGLOT)
    settings = replace(experiment.EffectOfTSettings(), classes=20)
    data = draw_data(settings.dataset, settings.model, settings.classes, (3, 3, 14), seed=0)
    dynamics = bl.GradientDescent(experiment.step_size(settings, data))
    h = data.start()
    spectral, reverse = (
        bl.hypergradient(feature_map(data, 0.1), h, data.task, dynamics=dynamics, steps=256, method=method)
        for method in (bl.Spectral(), bl.Reverse())
    )
    torch.testing.assert_close(spectral.grad, reverse.grad, rtol=0, atol=1e-10 * float(reverse.grad.norm()))
    assert exact_value(h, data, 0.1) == pytest.approx(float(reverse.value), rel=1e-2)


def test_an_outer_step_that_is_too_long_is_named():
    settings = experiment.EffectOfTSettings(iterations=30, outer_lr=100.0)
    with pytest.raises(bl.DivergenceError, match=r"outer_lr=100.*smaller"):
        experiment.fit(settings, made_up(), 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", "1"),
        ("train", "0"),
        ("steps", "0"),
        ("rho", "0"),
        ("step_scale", "2"),
        ("outer_lr", "0"),
        ("momentum", "1"),
        ("iterations", "0"),
        ("repeats", "0"),
        ("heights", "0"),
    ],
)
def test_senseless_settings_are_refused(tmp_path, key, value):
    with pytest.raises(bl.BilevelError, match=f"{key}="):
        reproduce("effect-of-t", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
