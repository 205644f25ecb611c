"""Table 5: the mathematics of the experiment, and the paper's shape in its quick form."""

import json
from dataclasses import replace

import pytest
import torch

import bilevel as bl
from bilevel.experiments import ridge
from bilevel.experiments.base import reproduce

SMALL = {"seeds": "2", "iterations": "6", "steps": "10,50"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    result, record = reproduce("ridge", quick=True, out=tmp_path_factory.mktemp("results"), progress=False)
    return result, record


def test_the_papers_shape_appears(quick):
    rows = quick[0].numbers["T"]
    assert list(rows) == ["10", "50", "100", "250", "exact"]
    validation = [row["validation"]["median"] for row in rows.values()]
    test = [row["test"]["median"] for row in rows.values()]
    objective = [row["objective"]["median"] for row in rows.values()]
    assert validation == sorted(validation, reverse=True)
    assert objective == sorted(objective, reverse=True)
    assert test[0] > test[1] > test[2] > test[3]
    # From some T on more steps no longer pay: 250 of them are about as good as the exact solution, 10 are worse by far.
    assert test[3] < 3 * test[4] and test[0] > 10 * test[4]


def test_noise_features_are_regularised_away(quick):
    for row in quick[0].numbers["T"].values():
        assert row["median exp(λ) of noise features"] > 100 * row["median exp(λ) of informative features"]


def test_what_is_written(quick):
    record = quick[1]
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "ridge.png", "table.md"}
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    assert (
        written["experiment"] == "ridge" and written["seed"] == 0 and written["command"] == "bilevel run ridge --quick"
    )
    assert written["settings"]["seeds"] == 5 and len(written["numbers"]["T"]["10"]["test"]["per seed"]) == 5
    assert (
        written["numbers"]["T"]["250"]["test"]["paper"] == 0.50
        and written["numbers"]["T"]["exact"]["validation"]["paper"] == 0.37
    )
    assert {"noise", "inner step size", "outer optimiser", "Λ", "start of λ", "MAPE"} <= set(written["choices"])
    assert {"cpu", "cores", "python", "torch", "bilevel"} <= set(written["machine"]) and written["minutes"] > 0
    table = (record.folder / "table.md").read_text(encoding="utf-8")
    assert "| T | error | paper | ours | mean | difference | why |" in table and "| 10 | test | 43.49 |" in table
    assert (record.folder / "ridge.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_a_function_of_its_settings_and_seed(tmp_path):
    runs = [
        json.loads(json.dumps(reproduce("ridge", SMALL | {"seed": seed}, out=tmp_path, progress=False)[0].numbers))
        for seed in ("0", "0", "1")
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    # Seeds are counted from `seed`, so the second data set of one run is the first of the other.
    assert runs[0]["T"]["50"]["test"]["per seed"][1] == runs[2]["T"]["50"]["test"]["per seed"][0]


def test_the_default_dtype_does_not_matter():
    settings = replace(ridge.RidgeSettings(), iterations=3)
    expected = ridge.fit(settings, 0, 50)
    torch.set_default_dtype(torch.float32)
    assert ridge.fit(settings, 0, 50) == expected


@pytest.mark.parametrize("steps", [10, 50])
def test_spectral_equals_reverse(steps):
    data = ridge.draw_data(ridge.RidgeSettings(), seed=3)
    lam = torch.linspace(-6, 4, 30)
    results = [
        bl.hypergradient(
            ridge.ridge(data, steps),
            lam,
            bl.Task(data.train, data.val),
            dynamics=bl.GradientDescent(data.lr),
            steps=steps,
            method=method,
        )
        for method in (bl.Spectral(), bl.Reverse())
    ]
    torch.testing.assert_close(results[0].value, results[1].value, rtol=1e-10, atol=0)
    torch.testing.assert_close(results[0].grad, results[1].grad, rtol=1e-10, atol=1e-10 * float(results[1].grad.norm()))


def test_the_exact_row_is_the_limit_of_many_steps():
    data = ridge.draw_data(ridge.RidgeSettings(), seed=1)
    lam, task, dynamics = torch.zeros(30), bl.Task(data.train, data.val), bl.GradientDescent(data.lr)
    exact = bl.hypergradient(ridge.ridge(data, None), lam, task, dynamics=dynamics, steps=0)
    many = bl.hypergradient(ridge.ridge(data, 10_000), lam, task, dynamics=dynamics, steps=10_000, method=bl.Spectral())
    torch.testing.assert_close(exact.inner, many.inner, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.grad, many.grad, rtol=1e-8, atol=1e-8 * float(exact.grad.norm()))
    w = exact.inner.clone().requires_grad_()
    (slope,) = torch.autograd.grad(ridge.inner(w, lam, data.train), w)
    assert float(slope.norm()) < 1e-9 * float((data.train[0].T @ data.train[1]).norm())


def test_the_step_size_is_safe_for_the_whole_box():
    settings = ridge.RidgeSettings()
    data = ridge.draw_data(settings, seed=0)
    corner = torch.full((30,), settings.high)
    hessian = torch.autograd.functional.hessian(lambda w: ridge.inner(w, corner, data.train), torch.zeros(30))
    assert data.lr * float(torch.linalg.eigvalsh(hessian)[-1]) == pytest.approx(settings.step_scale, rel=1e-12)
    assert settings.step_scale < 2


def test_mape_by_hand():
    assert ridge.mape(torch.tensor([1.0]), (torch.tensor([[1.0], [2.0]]), torch.tensor([-2.0, 2.5]))) == pytest.approx(
        (150 + 20) / 2
    )


def test_data_as_the_paper_describes_them():
    data = ridge.draw_data(ridge.RidgeSettings(noise=0.0), seed=5)
    sizes = {part[0].shape for part in (data.train, data.val, data.test)}
    assert sizes == {torch.Size([30, 30])}
    # Without noise the five informative features alone explain every target.
    x, y = data.test
    few = x[:, :5]
    torch.testing.assert_close(few @ torch.linalg.lstsq(few, y[:, None]).solution[:, 0], y, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seeds", "0"),
        ("points", "2"),
        ("informative", "30"),
        ("steps", "0"),
        ("noise", "-1"),
        ("step_scale", "2"),
        ("low", "5"),
        ("low", "nan"),
        ("high", "1000"),
        ("iterations", "0"),
    ],
)
def test_senseless_settings_are_refused(tmp_path, key, value):
    with pytest.raises(bl.BilevelError, match=f"{key}="):
        reproduce("ridge", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_the_paper_does_not_have(tmp_path):
    result, record = reproduce("ridge", {"seeds": "1", "iterations": "2", "steps": "20"}, out=tmp_path, progress=False)
    assert (
        result.tables[0].rows[0][:3] == ("20", "validation", "")
        and result.tables[0].rows[0][-1] == "the paper has no such row"
    )
    assert record.command == "bilevel run ridge --set seeds=1 --set iterations=2 --set steps=20"
