"""`bilevel evaluate`: accuracy for every T, the choice on meta-validation, and one look at meta-test."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from bilevel.data import load
from bilevel.files import read_json
from bilevel.learners import evaluation, library
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.evaluation import evaluate
from bilevel.learners.streams import episodes
from bilevel.training.files import read_tensors, write_tensors
from training.processes import here, words

FEW = ["--episodes", "6", "--steps", "1-8", "--threads", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    done = here(*words(folder, "--iterations", 3, "--average", 0.9, "--inner-lr", 0.5))
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def few_calibrations(monkeypatch):
    """Calibrate for few ways and shots, on few episodes: almost all time would go there."""
    monkeypatch.setattr("bilevel.cli._evaluation.GRID", ((2, 1), (5, 5)))
    monkeypatch.setattr("bilevel.cli._evaluation.CALIBRATED", 2)


def numbers(*arguments):
    done = here("evaluate", *arguments, "--json")
    assert done.exit_code == 0 and done.stderr == "", done.output
    return json.loads(done.stdout)


def test_every_number_of_steps_is_evaluated_and_the_best_once_on_test(run, monkeypatch):
    asked = []

    def evaluated(learner, stream, count, steps, **options):
        asked.append((stream.split, count, steps))
        return evaluate(learner, stream, count, steps, **options)

    monkeypatch.setattr("bilevel.learners.evaluation.evaluate", evaluated)
    found = numbers(run, *FEW)
    chosen = found["steps"]
    assert asked == [("val", 6, 8), ("test", 6, chosen)]
    assert [line["steps"] for line in found["validation"]] == list(range(1, 9))
    best = max(line["accuracy"] for line in found["validation"])
    assert chosen == min(line["steps"] for line in found["validation"] if line["accuracy"] == best)
    assert found["test"]["steps"] == chosen and 0 < found["test"]["interval"] < 1
    assert (found["ways"], found["shots"], found["queries"], found["episodes"]) == (3, 1, 2, 6)
    other = numbers(run, *FEW, "--ways", 4, "--shots", 2, "--queries", 1)
    assert (other["ways"], other["shots"], other["queries"]) == (4, 2, 1)
    # The same from Python, with the weights of the best validation.
    trained = library.find(str(run))
    score = evaluate(trained.learner, episodes(trained.settings, load("glyphs"), "test"), 6, chosen)
    assert score.means[-1] == found["test"]["accuracy"] and score.intervals[-1] == found["test"]["interval"]
    assert found["inner_lr"] == trained.learner.inner_lr <= 0.5


def test_the_table_says_what_was_measured(run):
    done = here("evaluate", run, *FEW)
    found = numbers(run, *FEW)
    assert done.exit_code == 0
    for line in found["validation"]:
        assert f"{line['accuracy']:.2%}" in done.stdout and f"{line['interval']:.2%}" in done.stdout
    assert done.stdout.count("← best") == 1
    test = found["test"]
    assert f"Meta-test accuracy {test['accuracy']:.2%} ± {test['interval']:.2%} with T = {test['steps']}" in done.stdout
    assert "3-way 1-shot, 2 queries a class" in done.stdout and "6 episodes" in done.stdout
    assert "Batch norm: episode" in done.stdout


def test_options(run, tmp_path):
    found = numbers(run, *FEW)
    assert found == numbers(run, *FEW)
    assert found["validation"] != numbers(run, *FEW, "--seed", 5)["validation"]
    assert found["validation"][2:4] == numbers(run, *FEW, "--steps", "3-4")["validation"]
    assert [line["steps"] for line in numbers(run, *FEW, "--steps", "5")["validation"]] == [5]
    support = numbers(run, *FEW, "--batch-norm", "support")
    assert support["batch_norm"] == "support" and support["validation"] != found["validation"]
    mirrored = numbers(run, *FEW, "--mirror", "--save", tmp_path / "mirrored")
    assert mirrored["mirror"] and not found["mirror"] and mirrored["validation"] != found["validation"]
    assert numbers(tmp_path / "mirrored", *FEW)["test"] == mirrored["test"]
    assert numbers(tmp_path / "mirrored", *FEW, "--no-mirror")["validation"] == found["validation"]


def test_half_precision_is_what_is_scored_and_saved(run, tmp_path):
    found = numbers(run, *FEW, "--half", "--save", tmp_path / "half")
    numbers(run, *FEW, "--save", tmp_path / "whole")
    half, whole = (read_tensors(tmp_path / f"{name}.safetensors")[0] for name in ("half", "whole"))
    assert half.keys() == whole.keys() and {tensor.dtype for tensor in half.values()} == {torch.float16}
    assert all(torch.equal(half[name], whole[name].half()) for name in half)
    assert any(not torch.equal(half[name].float(), whole[name]) for name in half)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.6 * sizes[1]
    again = numbers(tmp_path / "half", *FEW)
    assert {**again, "model": ""} == {**found, "model": ""}
    assert library.find(str(tmp_path / "half")).learner.lam.popitem()[1].dtype == torch.float32


def test_a_saved_learner_scores_what_the_run_scored(run, tmp_path):
    found = numbers(run, *FEW, "--save", tmp_path / "model")
    card = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    assert card["score"]["test"] == found["test"] and card["learner"]["steps"] == found["steps"]
    again = numbers(tmp_path / "model", *FEW)
    assert again == {**found, "model": str(tmp_path / "model")}
    learner = HyperRepresentation.load(tmp_path / "model")
    assert learner.steps == found["steps"]


def test_running_averages_are_part_of_a_run(tmp_path):
    assert here(*words(tmp_path / "run", "--iterations", 2, "--batch-norm", "running")).exit_code == 0
    assert numbers(tmp_path / "run", *FEW)["batch_norm"] == "running"


def refused(done, *messages):
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.output and done.stdout == ""
    for message in messages:
        assert message in done.stderr, done.stderr


def test_what_cannot_be_evaluated(run, tmp_path):
    refused(here("evaluate", tmp_path / "nothing"), "There is no trained model", "the folder of a run")
    refused(here("evaluate", tmp_path), "holds no run: there is no config.json")
    refused(here("evaluate", "zoo:nothing"), "The zoo has no model 'nothing'")
    refused(here("evaluate", run, "--steps", "20-1"), "--steps 20-1 is not a range")
    refused(here("evaluate", run, "--steps", "0"), "write --steps 1-20")
    refused(here("evaluate", run, "--steps", "many"), "--steps many is not a range")
    refused(here("evaluate", run, *FEW, "--batch-norm", "none"), "batch_norm='none' is unknown")
    refused(here("evaluate", run, *FEW, "--batch-norm", "running"), "needs running averages")
    refused(here("evaluate", run, *FEW, "--seed", "-3"), "seed=-3")
    refused(here("evaluate", run, *FEW, "--save", tmp_path / "no" / "where"), "could not be written")
    assert here("evaluate", run, "--episodes", "1").exit_code == 2


def test_damaged_runs(run, tmp_path):
    def copy(name):
        shutil.copytree(run, tmp_path / name)
        return tmp_path / name

    empty = copy("empty")
    for name in ("best", "last"):
        (empty / f"{name}.safetensors").unlink()
    refused(here("evaluate", empty), "holds no weights yet")
    cut = copy("cut")
    (cut / "best.safetensors").write_bytes((run / "best.safetensors").read_bytes()[:-9])
    refused(here("evaluate", cut), "best.safetensors is damaged")
    other = copy("other")
    write_tensors(other / "best.safetensors", {"0.weight": torch.zeros(2)}, {"inner_lr": 0.1})
    refused(here("evaluate", other), "The weights do not fit the network", "0.weight")
    edited = copy("edited")
    config = read_json(run / "config.json")
    for changes, message in (
        ({"settings": {**config["settings"], "ways": "many"}}, "ways='many' is not a whole number"),
        ({"settings": {**config["settings"], "dropout": 1}}, "settings of another version: dropout"),
        ({"learner": {}}, "does not describe a learner"),
    ):
        (edited / "config.json").write_text(json.dumps({**config, **changes}))
        refused(here("evaluate", edited), message)
    (edited / "config.json").write_text("{")
    refused(here("evaluate", edited), "is not valid JSON")


def test_groups_do_not_change_the_score(run, monkeypatch):
    trained = library.find(str(run))
    stream = episodes(replace(trained.settings, queries=1), load("glyphs"), "val")
    whole = evaluate(trained.learner, stream, 7, 2)
    monkeypatch.setattr(evaluation, "GROUP", 3)
    assert evaluate(trained.learner, stream, 7, 2) == whole


def test_the_network_under_another_learner(run):
    """The nearest centroid of the run's own features is what `--learner nearest-centroid` evaluates."""
    found = numbers(run, *FEW, "--learner", "nearest-centroid")
    assert (found["learner"], found["steps"]) == ("nearest-centroid", None)
    trained = library.find(str(run))
    task = episodes(trained.settings, load("glyphs"), "test").batch(range(6))
    (images, labels), (queries, answers) = task.train, task.val
    with torch.no_grad():
        known, asked = trained.learner.representation.episodes(trained.learner.lam, images, queries, training=False)
    centroids = torch.stack([known[k][labels[k] == c].mean(0) for k in range(6) for c in range(3)]).view(6, 3, -1)
    right = torch.cdist(asked, centroids).argmin(2) == answers
    assert found["test"]["accuracy"] == pytest.approx(float(right.double().mean()))


def test_another_learner_that_does_not_fit(run):
    done = here("evaluate", run, *FEW, "--learner", "ridgehead")
    assert done.exit_code == 2 and "ridge-head" in done.output
    done = here("evaluate", run, *FEW, "--set", "penalty=2")
    assert done.exit_code == 2 and "--learner" in done.output


def test_calibrating_changes_the_card_and_nothing_else(run, tmp_path):
    done = here("evaluate", run, *FEW, "--save", tmp_path / "model")
    assert done.exit_code == 0, done.output
    weights, before = (tmp_path / "model.safetensors").read_bytes(), read_json(tmp_path / "model.json")
    found = json.loads(here("calibrate", tmp_path / "model", "--episodes", 3, "--json").stdout)
    card = read_json(tmp_path / "model.json")
    assert card == {**before, "calibrations": found} and card["calibrations"] != before["calibrations"]
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert [(one["ways"], one["shots"]) for one in found] == [(3, 1), (2, 1), (5, 5)]
    assert all(one["episodes"] == 3 and one["batch_norm"] == "support" for one in found)
    said = here("calibrate", run, "--episodes", 2)
    assert said.exit_code == 0 and "5-way 5-shot" in said.stdout, said.output
    assert [one["ways"] for one in library.find(str(run)).calibrations] == [one["ways"] for one in found]
    HyperRepresentation("omniglot-net", (1, 28, 28)).save(tmp_path / "bare")
    for spec, why in ((tmp_path / "bare", "does not say which data"), ("zoo:omniglot-5way-1shot", "with the package")):
        refused = here("calibrate", spec)
        assert refused.exit_code == 2 and why in refused.stderr
