"""What a report finds, what it leaves out and says so, and that its numbers are those of the evaluation."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from report_fixtures import metrics, picture, record, result, run
from typer.testing import CliRunner

from bilevel import BilevelError, BilevelWarning
from bilevel.cli import build
from bilevel.learners.library import find
from bilevel.learners.streams import episodes, open_data
from bilevel.report import curves, models, page, read


def call(*arguments):
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


@pytest.fixture
def results(tmp_path):
    result(tmp_path / "results" / "good")
    return tmp_path / "results"


# ----------------------------------------------------------------------------------------------- what is left out


BROKEN = {
    "cut short": json.dumps(record())[:200],
    "empty": "",
    "no object": "[1, 2]",
    "not utf-8": b"\xff\xfe\x00",
    "no tables": json.dumps({"experiment": "x"}),
    "tables of text": json.dumps(record(tables="none")),
    "a table of text": json.dumps(record(tables=["none"])),
    "ragged rows": json.dumps(record(tables=[{"title": "x", "columns": ["a", "b"], "rows": [["1"]]}])),
    "a number for a name": json.dumps(record(experiment=3)),
    "settings of text": json.dumps(record(settings="fast")),
    "minutes of text": json.dumps(record(minutes="long")),
    "a truth for minutes": json.dumps(record(minutes=True)),
    "nested too deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_result_is_left_out_by_name_and_the_page_is_written(results, tmp_path, kind):
    bad = results / "bad"
    bad.mkdir()
    content = BROKEN[kind]
    (bad / "result.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(BilevelWarning, match=r"results.bad.result\.json was left out") as warned:
        report = page.write([results], tmp_path / "page.html", episodes=0)
    assert len(warned) == 1 and report.results == 1 and report.warnings == [str(warned[0].message)]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Ridge regression." in text and "1 thing was left out" in text and "bad/result.json" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"summary": "\ud800"},
        {"command": "a\ud800"},
        {"minutes": 10**400},
        {"seed": 10**400},
        {"settings": {"k": 10**400}},
    ],
    ids=["surrogate", "surrogate in a command", "endless minutes", "endless seed", "endless setting"],
)
def test_odd_values_are_shown_somehow(tmp_path, changes):
    folder = result(tmp_path / "odd", **changes)
    report = page.write([folder], tmp_path / "page.html", episodes=0)
    assert report.results == 1 and not report.warnings


@pytest.mark.parametrize("learner", ["s", [], 3, {"network": "rn"}, {"network": "c4l", "shape": "abc"}])
def test_a_configuration_of_nonsense_leaves_the_rest(world, tmp_path, learner):
    torch.set_default_dtype(torch.float32)
    place = tmp_path / "run"
    run(place, world.settings, world.data, seed=1)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "learner": learner}))
    with pytest.warns(BilevelWarning, match="run: no episodes, filters and certificates"):
        page.write([place], tmp_path / "page.html")


def test_the_page_is_written_even_if_nothing_can_be_read(tmp_path):
    (tmp_path / "result.json").write_text("{")
    with pytest.warns(BilevelWarning, match=r"result\.json"):
        report = page.write([tmp_path / "result.json"], tmp_path / "page.html")
    assert report.results == 0 and "No results were given" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["missing.png", "../good.png", "text.png", "half.png", "", 3, "/etc/hostname", "a\0b", "x" * 5000]
)
def test_a_picture_that_is_none_is_left_out_and_its_result_is_not(tmp_path, name):
    folder = result(tmp_path / "results" / "ridge", pictures=["ridge.png", name])
    picture(tmp_path / "results" / "good.png")
    (folder / "text.png").write_text("no picture")
    (folder / "half.png").write_bytes((folder / "ridge.png").read_bytes()[:-40])
    found = read.gather([folder])
    assert list(found.results[0].pictures) == ["ridge.png"] and len(found.warnings) == 1
    assert str(folder) in found.warnings[0] or str(name) in found.warnings[0]


def test_the_runs_of_a_result_come_with_it_and_missing_ones_are_named(tmp_path):
    folder = result(tmp_path / "few", runs=["runs/one", "runs/none", "../elsewhere"])
    inside = folder / "runs" / "one"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text(json.dumps({"settings": {"kind": "another job"}}))
    (inside / "metrics.jsonl").write_text('{"iteration": 20, "loss": 1.0}\n')
    found = read.gather([folder, folder / "result.json", tmp_path])
    assert len(found.results) == 1 and [one.spec for one in found.runs] == [str(inside)]
    assert found.runs[0].owner is found.results[0] and page.command(found.runs[0]) == "bilevel run ridge --seed 3"
    assert len(found.warnings) == 2 and "runs/none" in found.warnings[0] and "elsewhere" in found.warnings[1]


def test_a_run_of_another_kind_shows_its_curves_and_says_what_it_has_not(tmp_path):
    place = tmp_path / "runs" / "odd"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"settings": {"kind": "another job"}}))
    (place / "metrics.jsonl").write_text('{"iteration": 20, "loss": 1.0}\n{"iteration": 40, "loss": 0.5}\n')
    with pytest.warns(BilevelWarning, match="odd: no episodes, filters and certificates"):
        page.write([tmp_path], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "another job" in text and '"loss": [{' in text


def test_damaged_metrics_and_configurations_are_named_and_left_out(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 20, "loss": 1}\nnonsense\n{"iteration": 40, "loss": 1}\n')
    found = read.gather([tmp_path])
    assert [line["iteration"] for line in found.runs[0].metrics] == [20, 40] and found.runs[0].config == {}
    assert len(found.warnings) == 2 and "config.json" in found.warnings[0] and "line 2 of 3" in found.warnings[1]


def test_a_torn_last_line_is_left_out_and_what_is_no_number_becomes_a_gap(tmp_path):
    (tmp_path / "config.json").write_text("{")
    lines = ['{"iteration": 20, "loss": 1}', '{"iteration": 40, "loss": NaN}', '{"iterat']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = read.gather([tmp_path])
    assert [line["iteration"] for line in found.runs[0].metrics] == [20, 40]
    assert len(found.warnings) == 1 and "config.json" in found.warnings[0]
    with pytest.warns(BilevelWarning):
        page.write([tmp_path], tmp_path / "page.html")
    assert "NaN" not in (tmp_path / "page.html").read_text(encoding="utf-8").split('id="charts">')[1].split("<")[0]


@pytest.mark.parametrize("damage", ["settings", "weights", "learner", "no weights"])
def test_a_damaged_model_leaves_the_curves(world, tmp_path, damage):
    torch.set_default_dtype(torch.float32)
    place = run(tmp_path / "run", world.settings, world.data)
    config = json.loads((place / "config.json").read_text())
    if damage == "settings":
        config["settings"]["unheard of"] = 1
    if damage == "learner":
        config["learner"] = {"network": "omniglot-net", "shape": 3}
    (place / "config.json").write_text(json.dumps(config))
    if damage == "weights":
        (place / "best.safetensors").write_bytes(b"no weights")
    if damage == "no weights":
        (place / "best.safetensors").unlink()
    with pytest.warns(BilevelWarning, match="run: no episodes"):
        report = page.write([place], tmp_path / "page.html")
    assert report.runs == 1 and '"loss": [{' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_missing_data_is_a_sentence_and_no_failure(world, tmp_path):
    torch.set_default_dtype(torch.float32)
    place = run(tmp_path / "run", world.settings, world.data)
    config = json.loads((place / "config.json").read_text())
    config["settings"]["dataset"] = str(tmp_path / "gone")
    (place / "config.json").write_text(json.dumps(config))
    report = page.write([place], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert report.warnings == [] and "No episodes: " in text and "neither a data set nor a folder" in text


def test_other_pictures_than_those_of_the_training_are_not_shown(world, tmp_path):
    torch.set_default_dtype(torch.float32)
    place = run(tmp_path / "run", world.settings, world.data)
    config = json.loads((place / "config.json").read_text())
    config["data"]["fingerprint"] = "another"
    (place / "config.json").write_text(json.dumps(config))
    model = models.Reader(1).read(read.gather([place]).runs[0])
    assert model.episodes == [] and "not those that" in model.missing and len(model.filters) == 64


# ----------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("mode", ["episode", "support"])
def test_the_answers_are_those_that_the_evaluation_counts(world, tmp_path, mode):
    from dataclasses import replace

    torch.set_default_dtype(torch.float32)
    settings = replace(world.settings, batch_norm=mode)
    place = run(tmp_path / "run", settings, world.data)
    model = models.Reader(4).read(read.gather([place]).runs[0])
    learner, stream = find(str(place)).learner, episodes(settings, open_data(settings), "test")
    expected = learner.accuracies(stream.batch(range(4)), learner.steps)[:, -1]
    assert [one.right / len(one.queries) for one in model.episodes] == pytest.approx(expected.tolist())
    assert len({float(share) for share in expected}) > 1
    for episode in model.episodes:
        assert len(episode.classes) == len(episode.support) == 3 and len(episode.queries) == 12
        for query in episode.queries:
            assert sum(query.probabilities) == pytest.approx(1, abs=1e-5)
            assert query.probability == max(query.probabilities)


def test_certificates_hold_with_an_l2_term_and_say_what_is_missing_without(world, tmp_path):
    from dataclasses import replace

    torch.set_default_dtype(torch.float32)
    settings = replace(world.settings, l2=0.1)
    place = run(tmp_path / "run", settings, world.data)
    model = models.Reader(1).read(read.gather([place]).runs[0])
    found, learner = model.certificates[0], model.trained.learner
    # The bound against the truth: the same steps, many more of them.
    stream = episodes(settings, open_data(settings), "test")
    (images, labels), (queries, answers) = (lambda task: (task.train, task.val))(stream.batch([0]))
    features = learner.represent_episodes(learner.lam, images, queries, 3, training=False)
    support, query = (part.double() for part in features)
    problem, w = learner.problem(1, 3), torch.zeros(1, learner.features, 3, dtype=torch.float64)
    for t in range(2000):
        w = learner.dynamics.step(lambda v: problem.inner(v, None, (support, labels)), w, (), t)[0].detach()
        if t == learner.steps - 1:
            at_t = w
    assert float((at_t - w).norm()) <= found.inner_distance * (1 + 1e-6)
    far, near = (float(problem.outer(v, None, (query, answers))) for v in (at_t, w))
    assert abs(far - near) <= found.value_gap * (1 + 1e-6) and found.value == pytest.approx(far)
    losses = [float(problem.inner(v, None, (support, labels))) for v in (at_t, w)]
    assert losses[0] - losses[1] <= model.gaps[0] * (1 + 1e-6) and model.gaps[0] <= losses[0] * (1 + 1e-6)
    assert found.mu == 0.1 and "Theorem 3.2" in model.verdict()
    without = models.Reader(1).read(read.gather([run(tmp_path / "plain", world.settings, world.data)]).runs[0])
    assert without.certificates[0].inner_distance == math.inf
    assert "no distance to one can be certified" in without.verdict()


def test_the_minutes_of_losses_are_interpolated_and_go_on_with_the_speed():
    settings = {"meta_batch": 4, "ways": 5, "shots": 1, "queries": 14}  # 300 images
    lines = [
        {"iteration": 0, "score": 0.2, "interval": 0.1, "minutes": 1.0},
        {"iteration": 10, "loss": 3.0, "images_per_second": 10.0},
        {"iteration": 20, "score": 0.4, "interval": 0.1, "minutes": 3.0},
        {"iteration": 30, "loss": 2.0, "images_per_second": 50.0},
        {"iteration": 40, "loss": 1.0, "images_per_second": 100.0},
    ]
    found = curves.curves(read.FoundRun("x", {"settings": settings}, lines))
    assert found.loss.minutes.tolist() == pytest.approx([2.0, 4.0, 4.5])
    assert found.accuracy.minutes.tolist() == [1.0, 3.0] and found.accuracy.values.tolist() == [0.2, 0.4]
    pretraining = {"learner": "multiclass", "images": 600, **settings}
    slower = curves.curves(read.FoundRun("x", {"settings": pretraining}, lines))
    assert slower.loss.minutes.tolist() == pytest.approx([2.0, 5.0, 6.0])
    unknown = curves.curves(read.FoundRun("x", {}, lines)).loss.minutes
    assert unknown[0] == 2.0 and np.isnan(unknown[1:]).all()


def test_long_runs_are_thinned_out_and_keep_their_means_and_their_best():
    lines = list(metrics(400_000, 0))
    lines[3_001 - 3_001 % 6]["score"] = 0.99
    found = curves.curves(read.FoundRun("x", {}, lines))
    assert len(found.loss) <= curves.MOST and len(found.accuracy) <= curves.MOST + 1
    assert np.mean(found.loss.values) == pytest.approx(np.mean([x["loss"] for x in lines if "loss" in x]), rel=1e-3)
    assert max(found.accuracy.values) == 0.99 and found.accuracy.iterations[-1] == 400_000
    assert len(json.dumps(curves.figures([("x", found)]))) < 200_000


def test_pictures_are_what_they_show():
    grey = torch.zeros(1, 5, 4)
    grey[0, 1, 2] = 1.0
    shown = decoded(models.picture(grey))
    assert shown.size == (4, 5) and shown.getpixel((2, 1)) == 255 and np.asarray(shown).sum() == 255
    assert decoded(models.picture(torch.rand(3, 8, 8))).mode == "RGB"
    weight = torch.tensor([[-1.0, 0.0], [0.5, 1.0]]).reshape(2, 1, 1, 2)
    low, high = (np.asarray(decoded(one)).reshape(-1).tolist() for one in models.filter_pictures(weight))
    assert low == [0, 128] and high == [191, 255]
    assert decoded(models.filter_pictures(torch.randn(2, 3, 3, 3))[0]).mode == "RGB"
    assert decoded(models.filter_pictures(torch.randn(2, 7, 3, 3))[0]).mode == "L"


def decoded(uri):
    import base64
    import io

    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


# ----------------------------------------------------------------------------------------------- the command


def test_the_page_needs_nothing_else(site):
    head = site.text[: site.text.index("plotly.js v")]
    assert "http://" not in head and "https://" not in head and 'src="/' not in site.text
    assert "default-src 'none'" in head and site.text.count("plotly.js v") == 1
    assert site.report.bytes == site.path.stat().st_size < 7e6 and site.report.results == 2 and site.report.runs == 3


def test_the_command_prints_where_the_page_is_and_what_it_holds(results, tmp_path):
    def page(model):
        done = call("report", results, model, "--episodes", 0, "--out", tmp_path / "page.html")
        assert done.exit_code == 0, done.output
        assert f"report: {tmp_path / 'page.html'}" in done.stdout
        assert "1 result(s), 1 run(s) or model(s); " in done.stdout
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    text = page("zoo:omniglot-5way-5shot")
    assert "Ridge regression." in text and "omniglot 5-way 5-shot" in text and "99.5\N{NO-BREAK SPACE}%" in text
    # Without curves there is nothing to draw, and the page is small.
    assert "plotly.js v" not in text and len(text) < 300_000 and "there are no curves" in text
    # Where the zoo's model began is told too.
    assert page("zoo:omniglot-5way-1shot").count("bilevel train omniglot-5way-1shot") >= 3


def test_without_words_it_looks_in_the_usual_places(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [one.experiment for one in read.gather([]).results] == ["ridge"]
    (tmp_path / "docs").mkdir()
    shutil.move(results, tmp_path / "docs" / "results")
    assert [str(one.file) for one in read.gather([]).results] == ["docs/results/good/result.json"]
    (tmp_path / "results").mkdir()
    nothing = call("report")
    assert nothing.exit_code == 2 and "bilevel run ridge --quick" in nothing.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("words", [["nowhere"], ["zoo:nobody"], ["empty"], ["good", "--out", "no/such/page.html"]])
def test_what_does_not_exist_is_an_error_that_names_it(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result(tmp_path / "good")
    failed = call("report", *words)
    assert failed.exit_code == 2 and words[-1].removeprefix("zoo:") in failed.stderr
    assert "Traceback" not in failed.output


def test_senseless_numbers_of_episodes_are_refused(tmp_path):
    with pytest.raises(BilevelError, match="episodes=-1"):
        page.write([tmp_path], episodes=-1)


def test_results_of_one_name_and_runs_of_one_name_can_be_told_apart(tmp_path):
    for place in ("a", "b"):
        result(tmp_path / place / "ridge", runs=["runs/x"])
        (tmp_path / place / "ridge" / "runs" / "x").mkdir(parents=True)
        (tmp_path / place / "ridge" / "runs" / "x" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 1}\n')
    found = read.gather([tmp_path])
    text = page.render(found, [None, None], "x")
    assert 'id="result-ridge"' in text and 'id="result-ridge-2"' in text
    assert page.labels([one.spec for one in found.runs]) == ["a/ridge/x", "b/ridge/x"]
