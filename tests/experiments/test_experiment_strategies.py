"""Every learner on the same episodes, trained for real on a few scripts of Glyphs."""

import json
from dataclasses import replace

import pytest
import torch

from bilevel import BilevelError, learners
from bilevel.errors import DivergenceError
from bilevel.experiments import few_shot, strategies
from bilevel.experiments._peak_memory import peak_memory
from bilevel.experiments._strategies_notes import COLUMNS, PUBLISHED, UNFINISHED
from bilevel.experiments.base import reproduce
from bilevel.experiments.strategies import PROBLEMS, TABLE_3, StrategiesSettings, StrategyScore
from few_scripts import drawn, unchecked_derivatives

TINY = {"images": "320", "look_episodes": "4", "test_episodes": "4"}
# One hyperiteration of every learner.
ALL = {"images": "160", "look_episodes": "2", "test_episodes": "2"}
TWO = {**TINY, "learners": "hyper-representation,prototypical"}


@pytest.fixture(scope="module", autouse=True)
def glyphs(tmp_path_factory):
    with drawn(tmp_path_factory) as data, unchecked_derivatives():
        yield data


@pytest.fixture(scope="module")
def all_learners(tmp_path_factory):
    return reproduce("strategies", ALL, quick=True, out=tmp_path_factory.mktemp("results"), progress=False)


def test_every_learner_that_is_found_has_a_row(all_learners):
    result, record = all_learners
    rows = result.numbers["glyphs-5way-1shot"]
    assert set(rows) == set(learners.names())
    assert {row[1] for row in result.tables[0].rows} == set(rows)
    for name, row in rows.items():
        assert "failure" not in row, row
        assert row["strategy"] == learners.get(name).strategy and 0 <= row["accuracy"] <= 1
        costs = result.times["glyphs-5way-1shot"][name]
        assert costs["adapting"] > 0 and (costs["training"] > 0) == learners.get(name).trains
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    for run in written["runs"]:
        assert (record.folder / run / "config.json").exists()
    assert (record.folder / "strategies.png").stat().st_size > 20_000


def test_all_learners_see_as_many_images(all_learners):
    rows = all_learners[0].numbers["glyphs-5way-1shot"]
    for name, row in rows.items():
        assert row["images"] == (160 if learners.get(name).trains else 0)
        assert row["curve"][-1][0] == row["images"]


def test_all_learners_are_evaluated_on_the_same_disjoint_episodes(glyphs, all_learners):
    torch.set_default_dtype(torch.float32)
    job = strategies.FewShotTraining(
        replace(PROBLEMS["glyphs-5way-1shot"], learner="pixels", network="omniglot-net"), glyphs
    )
    test = strategies.episodes(PROBLEMS["glyphs-5way-1shot"], glyphs, "test")
    expected = job.learner.accuracies(test.batch(range(2))).mean()
    assert all_learners[0].numbers["glyphs-5way-1shot"]["pixels"]["accuracy"] == pytest.approx(float(expected))
    support, queries = test.batch(range(1)).train[0][0].flatten(1), test.batch(range(1)).val[0][0].flatten(1)
    assert torch.cdist(support, queries).min() > 0


def test_a_second_run_reads_what_is_there(all_learners, monkeypatch):
    result, record = all_learners
    monkeypatch.setattr(strategies.FewShotTraining, "step", lambda *arguments: pytest.fail("it was trained again"))
    monkeypatch.setattr(strategies, "evaluate", lambda *arguments: pytest.fail("it was evaluated again"))
    for weights in record.folder.glob("runs/*/**/*.safetensors"):  # the log and meta_test.json are enough
        weights.unlink()
    again, _ = reproduce("strategies", ALL, quick=True, out=record.folder.parent, progress=False)
    assert again.numbers == result.numbers and again.times == result.times


def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(tmp_path, monkeypatch):
    whole = reproduce("strategies", TWO, quick=True, out=tmp_path / "whole", progress=False)[0].numbers
    step = strategies.FewShotTraining.step

    def dies(job, iteration, stop):
        if job.learner.name == "prototypical" and iteration == 2:
            raise KeyboardInterrupt
        return step(job, iteration, stop)

    monkeypatch.setattr(strategies.FewShotTraining, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        reproduce("strategies", TWO, quick=True, out=tmp_path / "killed", progress=False)
    monkeypatch.undo()
    found, record = reproduce(
        "strategies", {**TWO, "train": "false"}, quick=True, out=tmp_path / "killed", progress=False
    )
    rows = found.numbers["glyphs-5way-1shot"]
    assert rows["hyper-representation"] == whole["glyphs-5way-1shot"]["hyper-representation"]
    assert rows["prototypical"]["failure"] == rows["pixels"]["failure"] == UNFINISHED
    assert "2 of 3 trainings are not finished" in (record.folder / "table.md").read_text(encoding="utf-8")
    assert (record.folder / "strategies.png").exists()
    assert reproduce("strategies", TWO, quick=True, out=tmp_path / "killed", progress=False)[0].numbers == whole


def test_words_without_any_training_are_refused(tmp_path):
    with pytest.raises(BilevelError, match="No training is finished"):
        reproduce("strategies", {**TWO, "train": "false"}, quick=True, out=tmp_path, progress=False)


def test_a_learner_that_diverges_is_a_row_and_a_defect(tmp_path, monkeypatch):
    step = strategies.FewShotTraining.step

    def breaks(job, iteration, stop):
        if job.learner.name == "prototypical":
            raise DivergenceError("The loss is not finite.")
        return step(job, iteration, stop)

    monkeypatch.setattr(strategies.FewShotTraining, "step", breaks)
    result, _ = reproduce("strategies", TWO, quick=True, out=tmp_path, progress=False)
    row = next(row for row in result.tables[0].rows if row[1] == "prototypical")
    assert row[3] == "–" and "diverged" in row[-1]
    assert any("Defect" in note and "prototypical" in note for note in result.notes)


def score(learner, accuracy, trains=True, **more):
    return StrategyScore(learner, "metric", trains, 100, accuracy, 0.01, **more)


def test_a_learner_below_the_pixels_is_a_defect():
    rows = [score("pixels", 0.5, trains=False), score("maml", 0.49), score("siamese", 0.6), score("random", 0.1, False)]
    (told,) = strategies.defects("glyphs-5way-1shot", rows)
    assert "maml" in told and "49.00 ± 1.00" in told and "50.00" in told


@pytest.mark.parametrize(
    ("problem", "best", "words"),
    [
        ("omniglot-20way-1shot", 0.96, "holds here"),  # Table 3 has SNAIL 2.1 points above the paper's own
        ("omniglot-20way-1shot", 0.99, "does not hold here"),
        ("glyphs-5way-1shot", 0.96, "does not hold here"),
        ("glyphs-5way-1shot", 0.94, "holds here"),
    ],
)
def test_what_the_numbers_say_of_the_claim(problem, best, words):
    rows = [score("hyper-representation", 0.94), score("snail", best), score("maml", 0.5), score("pixels", 0.97, False)]
    (told,) = strategies.claim_notes(problem, rows)
    assert words in told and "of 3 trained learners" in told and "Below it: maml." in told
    assert f"number {1 if best < 0.95 else 2} of" in told
    assert ("intervals: snail." in told) == (best > 0.95)


def test_published_numbers_are_those_of_the_table():
    assert next(iter(TABLE_3)) == "omniglot-5way-1shot" and len(TABLE_3) == 6
    assert strategies.published("snail", "miniimagenet-5way-5shot")[0] == few_shot.OTHERS["SNAIL"][5]
    assert strategies.published("hyper-representation", "miniimagenet-5way-1shot")[0] == "47.51"
    assert strategies.published("maml", "glyphs-5way-1shot") == strategies.published("nobody", "omniglot-5way-1shot")
    assert {len(values) for values, _ in PUBLISHED.values()} == {6} and tuple(TABLE_3) == COLUMNS


def test_one_training_is_evaluated_on_every_problem_of_its_data(tmp_path, monkeypatch):
    other = replace(PROBLEMS["glyphs-5way-1shot"], ways=3, shots=2)
    monkeypatch.setitem(strategies.PROBLEMS, "glyphs-3way-2shot", other)
    options = {**TINY, "learners": "prototypical,anil", "problems": "glyphs-5way-1shot,glyphs-3way-2shot"}
    result, record = reproduce("strategies", options, quick=True, out=tmp_path, progress=False)
    for rows in result.numbers.values():
        assert set(rows) == {"prototypical", "anil", "pixels"}
        assert not any("failure" in row for row in rows.values())
    one, two = (rows["prototypical"] for rows in result.numbers.values())
    assert one["curve"] == two["curve"] and one["images"] == two["images"] == 320
    # Files of a version that had fewer settings count, with the defaults of the newer ones.
    for file in (record.folder / "runs").glob("*/meta_test-*.json"):
        known = json.loads(file.read_text())
        assert known["of"]["settings"].pop("precision") == "float32"
        known.pop("checksum", None)
        file.write_text(json.dumps(known))
    again, _ = reproduce("strategies", {**options, "train": "false"}, quick=True, out=tmp_path, progress=False)
    assert again.numbers == result.numbers
    # The head of anil is for the number of classes of its training.
    found = {path.name for path in (record.folder / "runs").iterdir()}
    assert found == {"glyphs-prototypical", "glyphs-anil", "glyphs-anil-3way", "glyphs-pixels"}


def test_the_problems_have_one_network_each():
    for problem, settings in TABLE_3.items():
        photographs = problem.startswith("miniimagenet")
        expected = ("c4l", 42) if photographs else ("omniglot-net", 0)
        assert (settings.network, settings.image_size) == expected
        assert f"{settings.ways}way-{settings.shots}shot" in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("problems", "mnist"),
        ("problems", ""),
        ("learners", "nobody"),
        ("images", "0"),
        ("photographs", "0"),
        ("looks", "0"),
        ("average", "1"),
        ("look_episodes", "1"),
        ("test_episodes", "1"),
    ],
)
def test_senseless_settings_are_refused_before_any_work(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(strategies, "open_data", lambda settings: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=f"{key}="):
        reproduce("strategies", {key: value}, quick=True, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_on_real_data(real, tmp_path):
    real("omniglot/images_background.zip")
    problems = "omniglot-20way-1shot", "glyphs-5way-1shot"
    options = {**TINY, "learners": "prototypical", "problems": ",".join(problems), "looks": "1"}
    result, _ = reproduce("strategies", options, quick=True, out=tmp_path, progress=False)
    overview, omniglot, _ = result.tables
    assert overview.columns == ("learner", *problems) and "omniglot-net" in omniglot.title
    assert {row[1]: row[2] for row in omniglot.rows} == {"prototypical": "96.0", "pixels": "–"}


def test_the_title_says_how_large_photographs_are():
    title = strategies._table(StrategiesSettings(), "miniimagenet-5way-1shot", []).title
    assert "42×42" in title and "600 meta-test episodes" in title


def test_peak_memory_is_that_of_the_call():
    found = peak_memory(lambda: torch.ones(10_000_000, dtype=torch.float64))
    if found is None:
        pytest.skip("the operating system does not say")
    assert 78e6 < found < 100e6  # the kernel counts resident pages in batches
    assert peak_memory(lambda: torch.ones(10)) < 5e6
