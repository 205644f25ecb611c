"""Every learner is trained, continued, evaluated and used by the same commands."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from bilevel import learners
from bilevel.cli import build
from bilevel.learners.training import Estimate, FewShotTraining
from bilevel.training.files import read_tensors

TINY = ["glyphs-5way-1shot", "--meta-batch", 2, "--queries", 2, "--validation-episodes", 2, "--validate-every", 1]


def chosen(name):
    """The learner, with two inner steps if it takes any: some take many by default."""
    return ["--learner", name, *(["--steps", 2] if hasattr(learners.get(name).Options(), "steps") else [])]


def call(*arguments):
    return CliRunner().invoke(build(), [*map(str, arguments)])


def quickly(*arguments):
    """The same without measuring its time and without comparing derivatives with differences.

    Both take longer than the trainings of these tests, and the first training of every learner has them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FewShotTraining, "estimate", lambda job: Estimate(0.0, 0.0, 0))
        patch.setattr("bilevel.engine.checks._check_derivatives", lambda *arguments: None)
        return call(*arguments)


@pytest.fixture(scope="module", params=learners.names())
def run(request, tmp_path_factory):
    """A run of one hyperiteration that was continued to two."""
    out = tmp_path_factory.mktemp("learners") / request.param
    given = chosen(request.param)
    done = call("train", *TINY, *given, "--iterations", 1, "--out", out)
    assert done.exit_code == 0, done.output
    done = quickly("train", *TINY, *given, "--iterations", 2, "--out", out, "--resume")
    assert done.exit_code == 0, done.output
    return request.param, out


def test_a_run_that_was_continued_is_one_that_was_not(run, tmp_path):
    name, out = run
    assert quickly("train", *TINY, *chosen(name), "--iterations", 2, "--out", tmp_path / "whole").exit_code == 0
    one, two = (read_tensors(folder / "last.safetensors")[0] for folder in (out, tmp_path / "whole"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_it_is_evaluated_saved_and_listed(run, tmp_path, monkeypatch):
    name, out = run
    monkeypatch.setattr("bilevel.cli._evaluation.GRID", ((2, 1),))  # all of them take ten times as long
    done = call("evaluate", out, "--episodes", 2, "--steps", "1-2", "--json", "--save", tmp_path / "model")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["learner"] == name and 0 <= found["test"]["accuracy"] <= 1
    saved = json.loads(call("evaluate", tmp_path / "model", "--episodes", 2, "--steps", "1-2", "--json").stdout)
    assert {**found, "model": ""} == {**saved, "model": ""}
    listed = json.loads(call("runs", out.parent, "--json").stdout)["runs"]
    assert [one["learner"] for one in listed if one["run"].endswith(f"/{name}")] == [name]


def test_it_classifies_pictures(run, tmp_path):
    name, out = run
    for folder, colour in (("dark", 40), ("light", 220)):
        for place in ("support", "query"):
            (tmp_path / place / folder).mkdir(parents=True)
            Image.new("L", (28, 28), colour).save(tmp_path / place / folder / "one.png")
    done = call("classify", out, "--support", tmp_path / "support", "--query", tmp_path / "query", "--json")
    if getattr(learners.get(name).Options(), "head", "") == "learned":  # for the number of classes of its training
        assert done.exit_code == 2 and "cannot classify 2" in done.stderr
        return
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["predictions"]) == 2


def test_it_is_on_the_page(run, tmp_path):
    name, out = run
    done = call("report", out, "--out", tmp_path / "page.html", "--episodes", 1)
    assert done.exit_code == 0 and f"/{name}" in (tmp_path / "page.html").read_text(encoding="utf-8"), done.output


def test_what_a_learner_cannot_do_is_said_first(tmp_path):
    out = ["--out", tmp_path / "run"]
    for given, message in (
        (
            ["--learner", "mamal"],
            f"There is no learner 'mamal'. The learners are {', '.join(learners.names())}",
        ),
        (["--learner", "prototypical", "--inner-lr", 0.3], "prototypical does not use inner_lr=0.3"),
        (["--learner", "maml", "--set", "hed=zero"], "maml has no setting 'hed'"),
        (["--learner", "maml", "--set", "head_ways=many"], "head_ways is a whole number"),
        (["--learner", "maml", "--set", "head=learned", "--set", "head_ways=7"], "cannot classify 5"),
        (["--learner", "maml", "--batch-norm", "running"], "maml has no batch_norm='running'"),
    ):
        done = call("train", *TINY, *given, *out)
        assert done.exit_code == 2 and message in done.stderr, done.output
        assert not (tmp_path / "run" / "config.json").exists()


def test_settings_are_set(tmp_path):
    given = ["--learner", "maml", "--set", "steps=2", "--set", "head=learned", "--iterations", 0]
    assert call("train", *TINY, *given, "--out", tmp_path / "run").exit_code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["settings"]["options"] == {"head": "learned"}
    assert config["learner"]["name"] == "maml" and config["learner"]["steps"] == 2
    assert "head.weight" in read_tensors(tmp_path / "run" / "best.safetensors")[0]
    refused = call("evaluate", tmp_path / "run", "--ways", 3, "--episodes", 2)
    assert refused.exit_code == 2 and "cannot classify 3" in refused.stderr
