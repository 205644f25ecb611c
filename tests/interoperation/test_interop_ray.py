"""Ray Tune finds what a loop over its grid finds."""

import itertools
from pathlib import Path

import pytest
import torch
from small_network import SETTINGS, problem_of, start

import bilevel as bl

ray = pytest.importorskip("ray", reason="ray is not installed")
tune = pytest.importorskip("ray.tune", reason="ray is installed without tune")

GRID = {"width": [1, 4], "steps": [4, 12]}


def descend(config, report):
    problem, task = problem_of(config["width"])
    lam = {name: leaf.requires_grad_() for name, leaf in start().items()}
    optimizer = torch.optim.Adam(lam.values(), lr=0.2)
    for _ in range(5):
        f = bl.objective(problem, lam, task, **{**SETTINGS, "steps": config["steps"]})
        report({"loss": f.item(), "lam": {name: leaf.tolist() for name, leaf in lam.items()}})
        optimizer.zero_grad()
        f.backward()
        optimizer.step()


def trial(config):
    torch.set_default_dtype(torch.float64)  # a worker is a process of its own
    torch.set_num_threads(1)
    descend(config, tune.report)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # a worker imports this file to find `trial`
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            yield tune.Tuner(
                trial,
                param_space={name: tune.grid_search(values) for name, values in GRID.items()},
                tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
                run_config=tune.RunConfig(storage_path=str(tmp_path_factory.mktemp("ray")), verbose=0),
            ).fit()
        finally:
            ray.shutdown()


def test_ray_and_a_loop_over_the_grid_agree(results):
    assert not results.errors
    expected = {}
    for choice in itertools.product(*GRID.values()):
        reports = []
        descend(dict(zip(GRID, choice, strict=True)), reports.append)
        expected[choice] = reports
    found = {tuple(one.config[name] for name in GRID): one for one in results}
    assert found.keys() == expected.keys()
    for choice, reports in expected.items():
        curve = list(found[choice].metrics_dataframe["loss"])
        assert curve == pytest.approx([report["loss"] for report in reports], rel=1e-9)
        assert curve[-1] < curve[0]
    best = min(expected, key=lambda choice: expected[choice][-1]["loss"])
    assert results.get_best_result().config == dict(zip(GRID, best, strict=True))


def test_the_best_trials_hyperparameters_give_its_value_back(results):
    best = results.get_best_result()
    problem, task = problem_of(best.config["width"])
    lam = {name: torch.tensor(leaf) for name, leaf in best.metrics["lam"].items()}
    again = bl.hypergradient(problem, lam, task, **{**SETTINGS, "steps": best.config["steps"]})
    assert again.value.item() == pytest.approx(best.metrics["loss"], rel=1e-9)
