"""Optuna chooses what has no gradient; hypergradients tune the rest inside every trial."""

import pytest
import torch
from small_network import SETTINGS, problem_of, start

import bilevel as bl

optuna = pytest.importorskip("optuna", reason="optuna is not installed")

WIDTHS, STEPS, HYPERITERATIONS = [1, 2, 4, 8], [2, 6, 12], 6


@pytest.fixture(autouse=True)
def quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def tuned(width, steps, callbacks=(), lr=0.2):
    problem, task = problem_of(width)
    return bl.solve(
        problem,
        start(),
        task,
        **{**SETTINGS, "steps": steps},
        iterations=HYPERITERATIONS,
        optimizer=lambda leaves: torch.optim.Adam(leaves, lr=lr),
        callbacks=callbacks,
        raise_on_failure=True,
    )


def search(trial):
    def report(iteration):
        trial.report(iteration.hypergradient.value.item(), iteration.k)
        if trial.should_prune():
            raise optuna.TrialPruned

    choice = trial.suggest_categorical("width", WIDTHS), trial.suggest_categorical("steps", STEPS)
    sol = tuned(*choice, callbacks=[report])
    trial.set_user_attr("lam", {name: leaf.tolist() for name, leaf in sol.outer.items()})
    return sol.value


@pytest.fixture(scope="module")
def study():
    torch.manual_seed(0)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3), pruner=pruner)
    study.optimize(search, n_trials=10)
    return study


def test_the_study_improves_on_its_first_trial(study):
    assert study.best_value < 0.99 * study.trials[0].value


def test_the_best_trials_hyperparameters_give_its_value_back(study):
    best = study.best_trial
    problem, task = problem_of(best.params["width"])
    lam = {name: torch.tensor(leaf) for name, leaf in best.user_attrs["lam"].items()}
    settings = {**SETTINGS, "steps": best.params["steps"]}
    assert bl.hypergradient(problem, lam, task, **settings).value.item() == pytest.approx(best.value, rel=1e-12)
    untuned = bl.hypergradient(problem, start(), task, **settings).value.item()
    assert best.value < untuned


def test_what_optuna_saw_is_the_curve_of_the_outer_loop(study):
    best = study.best_trial
    curve = tuned(best.params["width"], best.params["steps"]).history["value"]
    assert [best.intermediate_values[k] for k in range(HYPERITERATIONS)] == pytest.approx(list(curve), rel=1e-12)


def test_pruned_trials_end_early_and_were_behind(study):
    pruned = study.get_trials(states=[optuna.trial.TrialState.PRUNED])
    assert pruned
    for trial in pruned:
        last = max(trial.intermediate_values)
        assert 1 <= last < HYPERITERATIONS and "lam" not in trial.user_attrs
        assert trial.intermediate_values[last] > study.best_trial.intermediate_values[last]


def test_a_trial_that_diverges_fails_alone():
    def search(trial):
        rate = trial.suggest_categorical("rate", [9.0, -3.0])
        problem, task = problem_of()
        with torch.no_grad():
            return bl.objective(
                problem, {**start(), "rate": torch.tensor(rate)}, task, **{**SETTINGS, "steps": 200}
            ).item()

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": [9.0, -3.0]}, seed=0))
    study.optimize(search, n_trials=2, catch=(bl.DivergenceError,))
    states = {trial.params["rate"]: trial.state.name for trial in study.trials}
    assert states == {9.0: "FAIL", -3.0: "COMPLETE"} and study.best_params == {"rate": -3.0}
