"""The few-shot demonstration on a few scripts of Glyphs: what it learns, what it compares, and what it draws."""

import json
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch

from bilevel import BilevelError
from bilevel.cli import runs
from bilevel.experiments import _glyphs_picture, glyphs
from bilevel.experiments.base import reproduce
from bilevel.learners.library import find
from bilevel.plotting import RED
from bilevel.training.log import read_metrics
from few_scripts import drawn

# A real training, but a short one.
SHORT = {"iterations": "80", "looks": "2", "look_episodes": "20", "validation_episodes": "20", "test_episodes": "60"}
TINY = {"iterations": "2", "looks": "1", "look_episodes": "3", "test_episodes": "4", "validation_episodes": "3"}
TINY["step_sizes"] = "0.1,0.3"


@pytest.fixture(scope="module", autouse=True)
def few_scripts(tmp_path_factory):
    with drawn(tmp_path_factory) as data:
        yield data


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return reproduce("glyphs", SHORT, out=tmp_path_factory.mktemp("results"), progress=False)


def test_a_learned_representation_beats_raw_pixels_on_unseen_scripts(short):
    found = {name: one["accuracy"] for name, one in short[0].numbers["accuracy"].items()}
    assert found["reverse"] > found["pixels"] + 0.2
    assert found["reverse"] > found["untrained"] + 0.25
    assert found["pixels"] > 0.35 and found["untrained"] > 0.25  # all of them know more than chance, which is 0.2


def test_both_trainings_start_alike_and_both_learn(short):
    curves = short[0].numbers["meta-validation while learning"]
    assert short[0].numbers["hyperiterations"] == [0, 40, 80]
    assert curves["reverse"][0] == curves["first-order"][0] and curves["reverse"][1:] != curves["first-order"][1:]
    assert all(curve[-1] > curve[0] + 0.1 for curve in curves.values())


def test_the_difference_is_that_of_the_rows_and_pairing_narrows_it(short):
    numbers = short[0].numbers
    one, other, gap = (
        *(numbers["accuracy"][name] for name in ("reverse", "first-order")),
        numbers["reverse minus first-order"],
    )
    assert gap["accuracy"] == pytest.approx(one["accuracy"] - other["accuracy"], abs=1e-12)
    assert 0 < gap["interval"] < np.hypot(one["interval"], other["interval"])


def test_what_is_written(short):
    result, record = short
    assert {file.name for file in record.folder.iterdir()} == {"result.json", "glyphs.png", "table.md", "runs"}
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    assert "not in the paper" in written["paper"] and any("no table of the paper" in note for note in written["notes"])
    assert any("Batch norm: episode" in note and "transductive" in note for note in written["notes"])
    assert [row[0] for row in result.tables[0].rows] == list(glyphs.NAMES.values())
    for name, row in zip(glyphs.NAMES, result.tables[0].rows, strict=True):
        found = written["numbers"]["accuracy"][name]
        assert row[1] == str(found["steps"]) and row[4:] == (
            f"{100 * found['accuracy']:.2f}",
            f"{100 * found['interval']:.2f}",
        )
        # T is the best on meta-validation, and never looked for on the test scripts.
        assert found["steps"] == 1 + int(np.argmax(found["validation for every T"]))


def test_the_trainings_are_kept_as_runs_that_score_as_the_table_does(short, few_scripts):
    result, record = short
    assert record.result["runs"] == result.runs == ["runs/reverse", "runs/first-order"]
    settings = replace(glyphs.GlyphsSettings(), test_episodes=60)
    for method in ("reverse", "first-order"):
        folder = record.folder / "runs" / method
        assert runs.describe(folder)["state"] == "finished" and runs.describe(folder)["done"] == 80
        lines = read_metrics(folder)
        scores = [line["score"] for line in lines if "score" in line]
        assert scores == result.numbers["meta-validation while learning"][method]
        assert [line["iteration"] for line in lines if "loss" in line] == [20, 40, 60, 80]
        with glyphs.single_precision():
            trained = find(str(folder))
            stream = glyphs.episodes(replace(trained.settings, queries=settings.test_queries), few_scripts, "test")
            score = glyphs.evaluate(trained.learner, stream, settings.test_episodes, trained.learner.steps)
        found = result.numbers["accuracy"][method]
        assert trained.settings.method == method and trained.learner.steps == found["steps"]
        assert score.means[-1] == pytest.approx(found["accuracy"])


def test_the_picture_shows_something_everywhere(short):
    image = matplotlib.image.imread(short[1].folder / "glyphs.png")[..., :3]
    assert image.shape[0] > 600 and image.shape[1] > 1500
    for part in (quarter for half in np.array_split(image, 2) for quarter in np.array_split(half, 4, axis=1)):
        assert part.std() > 0.05


def test_quick(tmp_path):
    assert len(glyphs.QUICK) > 3 and glyphs.QUICK["iterations"] <= 100
    result, record = reproduce("glyphs", {"iterations": "10"}, quick=True, out=tmp_path, progress=False)
    assert record.command == "bilevel run glyphs --quick --set iterations=10"
    assert len(result.tables[0].rows) == 4 and (tmp_path / "glyphs" / "glyphs.png").exists()


def test_a_run_is_a_function_of_its_settings_and_seed(tmp_path):
    runs = []
    for seed, dtype in (("0", torch.float64), ("0", torch.float32), ("1", torch.float64)):
        torch.set_default_dtype(dtype)
        runs.append(reproduce("glyphs", TINY | {"seed": seed}, out=tmp_path, progress=False)[0].numbers)
        assert torch.get_default_dtype() == dtype
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_raw_pixels_are_logistic_regression_on_pixels(few_scripts):
    settings = glyphs.GlyphsSettings()
    with glyphs.single_precision():
        learner = glyphs._pixels(settings, few_scripts)
        episodes = glyphs.episodes(glyphs._training(settings, "reverse"), few_scripts, "test").batch([3])
        learner.inner_lr = 0.2
        found = learner.accuracies(episodes, 6)[0]
    (x, y), (queries, answers) = (
        (images[0].flatten(1).double().numpy(), labels[0].numpy()) for images, labels in (episodes.train, episodes.val)
    )
    x, queries = (np.hstack([part, np.ones((len(part), 1))]) for part in (x, queries))
    w = np.zeros((x.shape[1], 5))
    for accuracy in found:
        logits = np.exp(x @ w)
        w -= 0.2 * x.T @ (logits / logits.sum(1, keepdims=True) - np.eye(5)[y]) / len(x)
        assert ((queries @ w).argmax(1) == answers).mean() == pytest.approx(float(accuracy))


def test_the_step_size_is_the_best_on_meta_validation(few_scripts):
    settings = replace(glyphs.GlyphsSettings(), validation_episodes=10, test_episodes=2)
    calls = []
    with glyphs.single_precision():
        learner = glyphs._pixels(settings, few_scripts)
        found = {
            size: glyphs.evaluate_one(settings, few_scripts, "x", learner, (size,), calls.append)
            for size in (0.001, 0.1, 3.0)
        }
        both = glyphs.evaluate_one(settings, few_scripts, "x", learner, (0.001, 0.1, 3.0), calls.append)
    best = max(found, key=lambda size: max(found[size].validation.means))
    assert learner.inner_lr == best == 0.1 and both.steps == found[best].steps
    assert both.test == found[best].test


def test_the_episode_in_the_picture_is_scored_as_the_table_scores_it(few_scripts):
    settings = replace(glyphs.GlyphsSettings(), validation_episodes=2, test_episodes=2)
    with glyphs.single_precision():
        learner = glyphs.new_learner(glyphs._training(settings, "reverse"), few_scripts)
        evaluated = glyphs.evaluate_one(settings, few_scripts, "x", learner, (0.1,), lambda doing: None)
        shown = glyphs.show(settings, few_scripts, evaluated)
    assert shown.right / shown.queries == float(evaluated.per_episode[shown.number]) < 1 and shown.queries == 50
    assert (evaluated.per_episode[: shown.number] == 1).all()
    assert all(name.startswith("hebrew ") for name in shown.classes) and len(set(shown.classes)) == 5


def test_without_a_mistake_the_first_episode_is_shown(few_scripts):
    settings = glyphs.GlyphsSettings()
    with glyphs.single_precision():
        learner = glyphs._untrained(settings, few_scripts)
        evaluated = glyphs.EvaluatedGlyphs(learner, 1, None, None, torch.ones(3))
        assert glyphs.show(settings, few_scripts, evaluated).number == 0


def test_a_wrong_answer_can_be_seen(tmp_path):
    def red(last):
        # More queries than there is room for, and the last one is the one in question.
        predicted = [[0] * 9, [1] * 8 + [last]]
        shown = _glyphs_picture.Shown(3, ["a", "b"], np.zeros((2, 1, 28, 28)), np.zeros((2, 9, 28, 28)), predicted)
        accuracy = {name: {"accuracy": 0.5, "interval": 0.1, "validation": 0.4} for name in glyphs.NAMES}
        curves = {"reverse": {0: 0.2, 1: 0.3}}
        _glyphs_picture.draw(tmp_path / "x.png", shown, curves, accuracy, "2-way 1-shot")
        colour = np.array([int(RED[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return int((np.abs(matplotlib.image.imread(tmp_path / "x.png")[..., :3] - colour).max(-1) < 0.02).sum())

    assert red(last=1) == 0 and red(last=0) > 500


def test_the_bar_ends_where_it_should(few_scripts):
    settings = replace(
        glyphs.GlyphsSettings(), iterations=1, looks=1, look_episodes=2, validation_episodes=21, test_episodes=40
    )
    calls = []
    with glyphs.single_precision():
        glyphs.learn(settings, few_scripts, "reverse", calls.append)
        learner = glyphs._pixels(settings, few_scripts)
        glyphs.evaluate_one(settings, few_scripts, "x", learner, settings.step_sizes, calls.append)
        glyphs.evaluate_one(settings, few_scripts, "x", learner, (0.1,), calls.append)
    assert 2 * len(calls) == glyphs._work(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ways", "1"),
        ("shots", "0"),
        ("test_queries", "0"),
        ("queries", "20"),
        ("looks", "0"),
        ("iterations", "5"),
        ("look_episodes", "1"),
        ("test_episodes", "1"),
        ("most_steps", "0"),
        ("step_sizes", "0.1,-1"),
        ("step_sizes", ""),
        ("average", "1"),
        ("outer_lr", "0"),
        ("meta_batch", "0"),
    ],
)
def test_senseless_settings_are_refused_before_any_work(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(glyphs, "load", lambda *arguments, **options: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=key.replace("outer_lr", "lr") + "="):
        reproduce("glyphs", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
