"""Certificates: bounds above the truth, on problems whose minimisers are known by other means."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import bilevel as bl
from bilevel import trees
from bilevel.experiments import certificates
from bilevel.experiments._known_problems import head_minimiser, ridge_problem
from bilevel.experiments.base import reproduce
from bilevel.structures import LinearClassifiers
from few_scripts import drawn

OMNIGLOT = ("omniglot/images_background.zip", "omniglot/images_evaluation.zip")
SMALL = {"dataset": "glyphs", "classes": "10", "steps": "1,8,64,512", "truncated": "16"}
NAMES = ["ridge", "feature map", "few-shot head"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with drawn(tmp_path_factory):
        yield reproduce("certificates", SMALL, out=tmp_path_factory.mktemp("results"), progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_lie_above_the_truth_and_close_to_it(small, name):
    one = small[0].numbers["problems"][name]
    assert one["held"] is True
    for true, certified in (("true gap", "certified gap"), ("true distance", "certified distance")):
        for truth, bound in zip(one[true], one[certified], strict=True):
            # Newton's point is the minimiser up to rounding, so that the bound is the truth and hardly more.
            assert truth <= bound <= 1.01 * truth + 1e-9 * max(1.0, abs(one["f"]))
    # The textbook's bound holds as well, and is the weaker one.
    for truth, certified, bare in zip(one["true distance"], one["certified distance"], one["‖∇L(w_T)‖/μ"], strict=True):
        assert truth <= bare and certified <= bare * (1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_w_approaches_its_limit_at_the_rate_that_theory_gives(small, name):
    one = small[0].numbers["problems"][name]
    assert all(a > b for a, b in pairwise(one["true distance"]))
    assert all(a > b for a, b in pairwise(one["certified distance"]))
    assert one["true gap"][-1] < 1e-2 * one["true gap"][0]
    assert one["slowest rate seen"] <= one["rate by theory"] + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_hypergradients_tend_to_the_limits_except_the_truncated_one(small, name):
    errors = small[0].numbers["problems"][name]["hypergradient errors"]
    assert list(errors) == ["∇f_T", "Truncated(16)", "Implicit"]
    for method in ("∇f_T", "Implicit"):
        assert errors[method][-1] < 0.1 * errors[method][0]
    # With k ≥ T it is reverse mode; with 16 of 512 steps a part of the gradient is missing, however large T is.
    assert errors["Truncated(16)"][:2] == pytest.approx(errors["∇f_T"][:2], rel=1e-9)
    assert errors["Truncated(16)"][-1] > 10 * errors["∇f_T"][-1]


def test_on_ridge_implicit_is_the_nearer_at_every_step_and_both_converge():
    problem = ridge_problem(seed=1, log_penalty=0.0)
    far, near = (certificates.measure(problem, steps, (10,)) for steps in (30, 3000))
    assert far["errors"]["Implicit"] < far["errors"]["∇f_T"]
    assert near["errors"]["Implicit"] < 1e-8 and near["errors"]["∇f_T"] < 1e-8
    assert far["held"] and near["held"] and near["true distance"] < 1e-8 * far["true distance"]
    assert "found by Lanczos" in far["condition"]


def test_the_truth_about_ridge_by_differences():
    problem = ridge_problem(seed=0, log_penalty=-1.0)
    direction = torch.randn(30, generator=torch.Generator().manual_seed(0))
    x, y = problem.task.train

    def f(lam):
        w = torch.linalg.inv(x.T @ x + torch.diag(lam.exp())) @ x.T @ y
        return float(problem.problem.outer(w, lam, problem.task.val))

    size = 1e-5
    slope = (f(problem.lam + size * direction) - f(problem.lam - size * direction)) / (2 * size)
    assert float(problem.grad @ direction) == pytest.approx(slope, rel=1e-6)
    assert problem.value == pytest.approx(f(problem.lam), rel=1e-9)


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
def test_the_dual_solution_minimises_the_head(l2):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 20, generator=generator)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    w = head_minimiser(features, labels, 3, l2).requires_grad_()
    loss = LinearClassifiers(l2)(w[None], None, (features[None], labels[None]))
    (slope,) = torch.autograd.grad(loss, w)
    assert w.shape == (20, 3) and float(slope.norm()) < 1e-12


def test_a_broken_bound_is_named():
    problem = ridge_problem(seed=0, log_penalty=0.0)
    sound = certificates.measure(problem, 30, (10,))
    # A truth that is farther away than the certificate allows.
    broken = certificates.measure(replace(problem, value=problem.value + 1e6), 30, (10,))
    rows = certificates._bounds("problem", [sound, broken]).rows
    assert sound["held"] and not broken["held"] and [row[-1] for row in rows] == ["yes", "NO"]


def test_what_is_written(small):
    result, record = small
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "certificates.png", "table.md"}
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    assert list(written["numbers"]["problems"]) == NAMES and list(written["data"]) == ["glyphs"]
    assert {"ridge", "feature map", "head", "truth"} <= set(written["choices"])
    table = (record.folder / "table.md").read_text(encoding="utf-8")
    assert "in all 12 cases" in table and "stays above μ" in table
    assert "| claim | paper | ours | difference | why |" in table
    assert all(math.isfinite(value) for one in result.numbers["problems"].values() for value in one["certified gap"])


def test_a_run_is_a_function_of_its_settings_and_seed():
    looks = [certificates.measure(ridge_problem(seed, 0.0), 20, (5,)) for seed in (0, 0, 1)]
    assert looks[0] == looks[1] != looks[2]


def test_bounds_hold_on_omniglot(real, shared_cache):
    real(*OMNIGLOT)
    settings = certificates.CertificatesSettings(classes=10)
    problem = certificates.feature_map_problem(settings.dataset, settings.model, 10, 0.1, 0)
    one = certificates.measure(problem, 64, (16,))
    assert one["held"] and one["errors"]["∇f_T"] < 1
    reverse = bl.hypergradient(
        problem.problem, problem.lam, problem.task, dynamics=problem.dynamics, steps=64, method=bl.Reverse()
    )
    error = float(trees.norm(trees.subtract(reverse.grad, problem.grad)) / trees.norm(problem.grad))
    assert one["errors"]["∇f_T"] == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", "0"),
        ("steps", "4,2"),
        ("truncated", "0"),
        ("classes", "1"),
        ("rho", "0"),
        ("l2", "0"),
        ("l2", "1"),
        ("log_penalty", "5"),
    ],
)
def test_senseless_settings_are_refused(tmp_path, key, value):
    with pytest.raises(bl.BilevelError, match=f"{key}="):
        reproduce("certificates", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
