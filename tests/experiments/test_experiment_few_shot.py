"""Table 3: which model stands for a row, how it is evaluated, and what is said of rows without one."""

import json
import shutil

import pytest

from bilevel import BilevelError
from bilevel.experiments import few_shot
from bilevel.experiments.base import reproduce
from bilevel.files import write_json
from bilevel.learners import library
from bilevel.learners.evaluation import evaluate
from bilevel.learners.presets import PRESETS, preset
from bilevel.learners.streams import episodes, open_data
from bilevel.training.files import write_tensors

ROWS = "omniglot-5way-1shot,omniglot-20way-5shot,miniimagenet-rn-1shot"


@pytest.fixture
def omniglot(real):
    real("omniglot/images_background.zip")


def a_run(path, name="omniglot-5way-5shot"):
    """The folder of a training whose weights are those of a model in the zoo."""
    found = library.find(f"zoo:{name}")
    settings = found.settings.plain()
    card = {"command": "bilevel train", "settings": settings, "learner": found.learner.settings(), "preset": name}
    path.mkdir(parents=True)
    write_json(path / "config.json", card)
    write_tensors(path / "best.safetensors", found.learner.lam, {"iteration": 30, "score": 0.9})
    lines = [{"iteration": 10 * k, "score": 0.3 * k, "interval": 0.01, "minutes": k} for k in range(4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_rows_are_presets_and_the_zoo_serves_the_small_networks():
    assert set(few_shot.PRINTED) <= set(PRESETS)
    for name in few_shot.PRINTED:
        found = few_shot.find_model(name, library.ZOO / "nowhere")
        assert (found is None) == (name not in library.zoo())
        if found is not None:
            few_shot._check_fits(name, found)
            assert found.stages[-1]["hyperiterations"] > 0 and found.stages[-1]["minutes"] > 0


def test_a_training_of_ones_own_comes_before_the_zoo(tmp_path):
    a_run(tmp_path / "omniglot-5way-1shot")
    found = few_shot.find_model("omniglot-5way-1shot", tmp_path)
    assert found.name == str(tmp_path / "omniglot-5way-1shot")
    (stage,) = found.stages
    assert (stage["hyperiterations"], stage["minutes"], stage["images"]) == (30, 3, 30 * 8 * 5 * 20)
    assert len(found.card["curve"]) == 4
    (tmp_path / "omniglot-5way-1shot" / "best.safetensors").unlink()  # it has just begun
    assert few_shot.find_model("omniglot-5way-1shot", tmp_path).name == "zoo:omniglot-5way-1shot"


def test_the_stages_of_a_training_are_added_up():
    stages = library.find("zoo:omniglot-5way-1shot").stages
    assert [stage["hyperiterations"] for stage in stages] == [8000, 2000, 7000, 1000, 2500]


def test_the_table(omniglot, tmp_path, monkeypatch):
    a_run(tmp_path / "runs" / "omniglot-20way-5shot")
    learner = library.find("zoo:omniglot-5way-5shot").learner
    monkeypatch.setattr(library, "zoo", lambda: {"omniglot-5way-1shot": {}})  # the others are not trained
    options = {"rows": ROWS, "runs": str(tmp_path / "runs"), "episodes": "6", "most_steps": "3"}
    result, record = reproduce("few-shot", options, out=tmp_path / "results", progress=False)
    first, second, third = result.tables[0].rows
    assert first[1] == "98.60" and first[6] == "8,000 + 2,000 + 7,000 + 1,000 + 2,500" and first[9] == "episode"
    assert second[6] == "30" and second[8] == "3" and second[1] == "98.40"
    assert third[1] == "50.54 ± 0.85" and third[2] == "not trained yet" and third[-1].startswith("bilevel train mini")
    assert "disjoint" in result.tables[0].title and any("Not trained yet" in note for note in result.notes)
    numbers = result.numbers["omniglot-20way-5shot"]
    assert (
        numbers["curve"][-1][:2] == [30, pytest.approx(0.9)] and not result.numbers["miniimagenet-rn-1shot"]["trained"]
    )
    assert (record.folder / "few-shot.png").stat().st_size > 20_000
    # The row's own ways and shots, whatever the model was trained with; T by meta-validation alone.
    data, settings = open_data(preset("omniglot-20way-5shot")), preset("omniglot-20way-5shot")
    validation = evaluate(learner, episodes(settings, data, "val"), 6, 3)
    test = evaluate(learner, episodes(settings, data, "test"), 6, validation.best_steps)
    assert numbers["validation for every T"] == pytest.approx(validation.means)
    assert numbers["steps"] == validation.best_steps and numbers["accuracy"] == pytest.approx(test.means[-1])
    again = reproduce("few-shot", options, out=tmp_path / "again", progress=False)[0]
    assert again.numbers == result.numbers


def test_an_earlier_score_of_the_same_model_is_kept(omniglot, tmp_path):
    options = {"rows": "omniglot-5way-1shot,miniimagenet-rn-1shot", "episodes": "4", "most_steps": "2"}
    true = reproduce("few-shot", options, out=tmp_path, progress=False)[0].numbers["omniglot-5way-1shot"]
    file = tmp_path / "few-shot" / "result.json"
    recorded = json.loads(file.read_text())
    recorded["numbers"]["omniglot-5way-1shot"]["accuracy"] = 0.123
    file.write_text(json.dumps(recorded))
    kept = reproduce("few-shot", options, out=tmp_path, progress=False)[0]
    assert kept.numbers["omniglot-5way-1shot"]["accuracy"] == 0.123
    assert kept.tables[0].rows[0][2].startswith("12.30")
    other = reproduce("few-shot", options | {"episodes": "5"}, out=tmp_path, progress=False)[0].numbers
    assert other["omniglot-5way-1shot"]["accuracy"] != 0.123
    again = reproduce("few-shot", options, out=tmp_path, progress=False)[0].numbers
    assert again["omniglot-5way-1shot"] == true


def test_every_row_is_evaluated_on_its_own_split_of_classes(omniglot, tmp_path):
    a_run(tmp_path / "omniglot-5way-5shot")
    config = json.loads((tmp_path / "omniglot-5way-5shot" / "config.json").read_text())
    config["settings"]["seed"] = 1
    write_json(tmp_path / "omniglot-5way-5shot" / "config.json", config)
    options = {"runs": str(tmp_path), "episodes": "4", "most_steps": "2"}
    rows = "omniglot-5way-1shot,omniglot-5way-5shot"
    both = reproduce("few-shot", options | {"rows": rows}, out=tmp_path / "both", progress=False)[0].numbers
    for name in rows.split(","):
        alone = reproduce("few-shot", options | {"rows": name}, out=tmp_path / name, progress=False)[0].numbers
        assert alone[name] == both[name]


def test_quick(omniglot, tmp_path):
    result, _ = reproduce("few-shot", {"episodes": "4", "most_steps": "2"}, quick=True, out=tmp_path, progress=False)
    assert [row[2] == "not trained yet" for row in result.tables[0].rows] == [False, False, True]
    assert result.numbers["omniglot-5way-5shot"]["accuracy"] > 0.95
    assert result.tables[1].rows[-1][0] == "Hyper-representation"


def test_a_model_of_something_else_is_refused(omniglot, tmp_path):
    a_run(tmp_path / "miniimagenet-c4l-1shot")
    with pytest.raises(BilevelError, match="was trained with omniglot-net on omniglot, and the row miniimagenet-c4l"):
        reproduce("few-shot", {"rows": "miniimagenet-c4l-1shot", "runs": str(tmp_path)}, out=tmp_path, progress=False)
    shutil.rmtree(tmp_path / "miniimagenet-c4l-1shot")


@pytest.mark.parametrize(
    ("key", "value"), [("rows", "mnist"), ("rows", ""), ("episodes", "1"), ("most_steps", "0"), ("runs", "nowhere")]
)
def test_senseless_settings_are_refused_before_any_work(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(few_shot, "find_model", lambda *arguments: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=f"{key}="):
        reproduce("few-shot", {key: value}, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_paper_s_own_row_is_the_one_we_compare_with():
    printed = few_shot.OTHERS["Hyper-representation"]
    for name, text in zip(
        ("omniglot-5way-1shot", "omniglot-5way-5shot", "omniglot-20way-1shot", "omniglot-20way-5shot"),
        printed,
        strict=False,
    ):
        assert float(text) == few_shot.PRINTED[name][0]
    assert printed[4:] == ("50.54 ± 0.85", "64.53 ± 0.68")
    rn, implied = few_shot.PRINTED["miniimagenet-rn-5shot"][0], few_shot.PRINTED["miniimagenet-c4l-5shot"][0]
    assert round(rn / 1.042, 2) == implied
    assert {len(values) for values in few_shot.OTHERS.values()} == {6}
