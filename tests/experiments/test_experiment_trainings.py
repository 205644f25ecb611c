"""Table 4 and Figure 6: six variants and four numbers of inner steps, trained for real on a few scripts of Glyphs."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from bilevel import BilevelError
from bilevel.errors import DivergenceError
from bilevel.experiments import _trainings, validate_t, variants
from bilevel.experiments._trainings import EvaluatedTraining, FinishedTraining
from bilevel.experiments.base import reproduce
from bilevel.learners.runs import train_in
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import open_data
from few_scripts import drawn, unchecked_derivatives

SHORT = {"iterations": "20", "looks": "2", "look_episodes": "15", "test_episodes": "40", "step_factors": "1"}
LONGER = {"iterations": "30", "steps": "3,8"}
TINY = {"iterations": "4", "looks": "2", "look_episodes": "4", "validation_episodes": "4", "test_episodes": "4"}
STOPS = {"iterations": "40", "validate_every": "4", "patience": "1", "steps": "1,4", "validation_episodes": "4"}


@pytest.fixture(scope="module", autouse=True)
def glyphs(tmp_path_factory):
    with drawn(tmp_path_factory) as data, unchecked_derivatives():
        yield data


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    return reproduce("variants", SHORT, quick=True, out=tmp_path_factory.mktemp("results"), progress=False)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return reproduce("validate-t", LONGER, quick=True, out=tmp_path_factory.mktemp("results"), progress=False)


def test_every_variant_learns_and_is_evaluated(six):
    result, _ = six
    rows = result.numbers["glyphs"]
    assert list(rows) == list(variants.CHANGES)
    for name, row in rows.items():
        first, best = row["curve"][0][1], max(point[1] for point in row["curve"])
        assert [point[0] for point in row["curve"]] == [0, 10, 20] and 0 < row["interval"] < 0.1
        # A softmax over a hundred classes has hardly begun after 20 steps.
        assert best > first + 0.1 or name.startswith("multiclass")
        assert row["accuracy"] > 0.3  # chance is 0.2
    assert rows["hyper-representation"]["accuracy"] > rows["multiclass"]["accuracy"]


def test_all_start_alike_but_for_what_makes_them_different(six):
    starts = {name: row["curve"][0][1] for name, row in six[0].numbers["glyphs"].items() if "multiclass" not in name}
    assert len(set(starts.values())) == 1
    ends = {name: row["curve"][-1][1:] for name, row in six[0].numbers["glyphs"].items()}
    assert len({tuple(end) for end in ends.values()}) == len(ends)


def test_a_hyperiteration_has_as_many_images_whatever_the_variant():
    for dataset in _trainings.PROBLEMS:
        sizes = set()
        for variant in variants.PRINTED:
            training = variants.training_of(variants.VariantsSettings(), dataset, variant, 100, 0)
            shots = training.train_shots or training.shots
            sizes.add(training.ways * (shots + (training.queries if training.outer == "query" else 0)))
        assert len(sizes) == 1
    wide = variants.training_of(variants.VariantsSettings(), "miniimagenet", "multiclass", 100, 0)
    assert (wide.network, wide.iterations) == ("c4l-64", 30)


def test_the_order_is_said_in_words_and_follows_from_the_numbers(six):
    result, record = six
    first, second = result.tables
    assert [row[0] for row in first.rows] == list(variants.CHANGES) and all(row[1] == "–" for row in first.rows)
    for row in second.rows:
        better, worse = row[0].split(" > ")
        files = (record.folder / "runs" / f"glyphs-{name}" / "meta_test.json" for name in (better, worse))
        one, other = (json.loads(file.read_text())["found"]["per_episode"] for file in files)
        gaps = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
        gap, width = float(gaps.mean()), 1.96 * float(gaps.std()) / len(gaps) ** 0.5
        assert row[2] == f"{100 * gap:+.2f} ± {100 * width:.2f}" and row[3] == variants.verdict(gap, width)
    words = result.notes[0]
    order = words.partition("is ")[2].partition(".")[0].split(" > ")
    accuracies = [result.numbers["glyphs"][name]["accuracy"] for name in order]
    assert accuracies == sorted(accuracies, reverse=True)
    assert "splitting episodes" in words and "the full hypergradient matters is" in words
    written = json.loads((record.folder / "result.json").read_text(encoding="utf-8"))
    assert set(written["times"]["glyphs"]) == set(variants.CHANGES) and "fingerprint" in written["data"]["glyphs"]
    for run in written["runs"]:
        assert (record.folder / run / "config.json").exists()
    assert (record.folder / "variants.png").stat().st_size > 20_000


def test_a_second_run_reads_the_trainings_and_finds_the_same(six, tmp_path, monkeypatch):
    result, record = six
    monkeypatch.setattr(
        "bilevel.learners.training.FewShotTraining.step", lambda *arguments: pytest.fail("it was trained again")
    )
    # A training that was evaluated needs no weights any more.
    for run in (record.folder / "runs").iterdir():
        for file in run.rglob("*.safetensors"):
            file.rename(file.with_suffix(".away"))
    again, _ = reproduce("variants", SHORT, quick=True, out=record.folder.parent, progress=False)
    assert again.numbers == result.numbers
    for file in record.folder.rglob("*.away"):
        file.rename(file.with_suffix(".safetensors"))
    with pytest.raises(BilevelError, match=r"average: 0\.99 there, 0\.5 here"):
        reproduce("variants", SHORT | {"average": "0.5"}, quick=True, out=record.folder.parent, progress=False)


def test_a_run_is_a_function_of_its_settings_and_seed(tmp_path):
    options = TINY | {"variants": "hyper-representation,classic-train"}
    runs = []
    for number, (seed, dtype) in enumerate((("0", torch.float64), ("0", torch.float32), ("1", torch.float64))):
        torch.set_default_dtype(dtype)
        out = tmp_path / str(number)
        runs.append(reproduce("variants", options | {"seed": seed}, quick=True, out=out, progress=False)[0].numbers)
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_a_killed_training_goes_on_and_ends_with_the_same_numbers(tmp_path, monkeypatch):
    options = TINY | {"variants": "hyper-representation"}
    whole = reproduce("variants", options, quick=True, out=tmp_path / "whole", progress=False)[0].numbers
    step = variants.FewShotTraining.step

    def dies(job, iteration, stop):
        if iteration == 3:
            raise KeyboardInterrupt
        return step(job, iteration, stop)

    monkeypatch.setattr(variants.FewShotTraining, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        reproduce("variants", options, quick=True, out=tmp_path / "killed", progress=False)
    monkeypatch.undo()
    again = reproduce("variants", options, quick=True, out=tmp_path / "killed", progress=False)[0].numbers
    assert again == whole


def test_a_result_is_that_of_its_settings_and_not_of_what_lay_there(tmp_path):
    options = TINY | {"variants": "classic-train"}
    reproduce("variants", options, quick=True, out=tmp_path, progress=False)
    path = tmp_path / "variants" / "runs" / "glyphs-classic-train"
    config = json.loads((path / "config.json").read_text())
    assert config["kind"] == "ClassicTraining" and "--set variants=classic-train" in config["command"]
    for change, words in (
        ({"iterations": "2", "looks": "1"}, "has 4 hyperiterations already, which is more than iterations=2"),
        ({"look_episodes": "5"}, "was validated in another way: validation_episodes: 4 there, 5 here"),
    ):
        with pytest.raises(BilevelError, match=words):
            reproduce("variants", options | change, quick=True, out=tmp_path, progress=False)
    # Bilevel-train has the same settings, and must not go on with what Classic began.
    with pytest.raises(BilevelError, match="kind: ClassicTraining there, FewShotTraining here"):
        training = TrainingSettings.of(config["settings"])
        train_in(path, variants.FewShotTraining(training, open_data(training)), "", "x", progress=False)


def test_a_training_that_diverges_is_no_result(tmp_path, monkeypatch):
    def breaks(job, iteration, stop):
        raise DivergenceError("The inner loss is not finite.")

    monkeypatch.setattr(variants.FewShotTraining, "step", breaks)
    with pytest.raises(DivergenceError, match="glyphs-T3: Stopped in hyperiteration 1"):
        reproduce("validate-t", quick=True, out=tmp_path, progress=False)
    assert not (tmp_path / "validate-t" / "result.json").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("variants", "datasets", "mnist"),
        ("variants", "datasets", ""),
        ("variants", "iterations", "3,4"),
        ("variants", "variants", "maml"),
        ("variants", "looks", "100"),
        ("variants", "step_factors", "0"),
        ("variants", "test_episodes", "1"),
        ("variants", "steps", "0"),
        ("validate-t", "steps", "0,1"),
        ("validate-t", "steps", "3,3"),
        ("validate-t", "patience", "0"),
        ("validate-t", "validate_every", "0"),
        ("validate-t", "validation_episodes", "1"),
    ],
)
def test_senseless_settings_are_refused_before_any_work(tmp_path, monkeypatch, name, key, value):
    for module in (variants, validate_t):
        monkeypatch.setattr(module, "open_all", lambda names: pytest.fail("the run began"))
    with pytest.raises(BilevelError, match=f"{key}="):
        reproduce(name, {key: value}, quick=True, out=tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- Figure 6


def test_more_inner_steps_from_one_start(four):
    rows = four[0].numbers["glyphs"]
    assert list(rows) == ["3", "8"]
    for row in rows.values():
        assert row["curve"][-1][0] == row["ended after"] and row["best"] > row["curve"][0][1] + 0.1
        assert row["best"] == max(point[1] for point in row["curve"])
        assert row["stopped early"] == (row["ended after"] < 30)
    assert (four[1].folder / "validate-t.png").stat().st_size > 20_000


def test_early_stopping_ends_a_training_and_the_table_says_where(tmp_path):
    result, _ = reproduce("validate-t", STOPS, quick=True, out=tmp_path, progress=False)
    rows = result.numbers["glyphs"]
    assert any(row["stopped early"] for row in rows.values())
    for row, line in zip(rows.values(), result.tables[0].rows, strict=True):
        assert line[2].startswith(f"{row['ended after']:,}") and ("not stopped" in line[2]) != row["stopped early"]
        if row["stopped early"]:
            assert row["ended after"] == row["best after"] + 4


def test_logs_of_finished_trainings_are_enough(four, tmp_path, monkeypatch):
    first, written = four
    shutil.copytree(written.folder, tmp_path / "validate-t")
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()

    def train(*args):
        raise AssertionError("a finished training is trained again")

    monkeypatch.setattr(validate_t, "train", train)
    again, _ = reproduce("validate-t", LONGER, quick=True, out=tmp_path, progress=False)
    assert again.numbers == first.numbers

    log = tmp_path / "validate-t" / "runs" / "glyphs-T8" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(AssertionError, match="trained again"):
        reproduce("validate-t", LONGER, quick=True, out=tmp_path, progress=False)


def curve(iterations, most, score):
    return _trainings.TrainingCurve(iterations < most, iterations, 2, 0.0, [(0, 0.2, 0.1), (2, score, 0.01)])


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((9, 7, 5), "Larger T stop earlier, as the paper found"),
        ((9, 5, 7), "not every step is downwards"),
        ((5, 7, 9), "unlike in the paper"),
        ((9, 10, 5), "T = 5 were not stopped"),
        ((7, 7, 7), "All stop alike"),
    ],
)
def test_what_the_ends_say(ends, words):
    rows = {steps: curve(end, 10, score) for steps, end, score in zip((3, 5, 8), ends, (0.5, 0.6, 0.595), strict=True)}
    text = validate_t.stopping_note("glyphs", rows)
    assert words in text and "T = 5 is best" in text and "T = 8 came within" in text


# ------------------------------------------------------------------------------------------------- evaluation


def test_the_step_size_is_the_best_on_meta_validation_and_none_diverges(glyphs):
    torch.set_default_dtype(torch.float32)
    settings = replace(_trainings.PROBLEMS["glyphs"], steps=3)
    learner = _trainings.FewShotTraining(settings, glyphs).learner
    trained = FinishedTraining(False, 0, 0, 0.0, [], learner, settings)
    found = {size: _trainings.evaluate_with_steps(trained, glyphs, [size], 10, 4) for size in (1e-4, 0.03, 1e4)}
    both = _trainings.evaluate_with_steps(trained, glyphs, list(found), 10, 4)
    best = max(found, key=lambda size: found[size].validation)
    assert both == found[best] and found[1e4].accuracy > 0.25  # bounded by 1/ν


def test_several_seeds_are_several_trainings(tmp_path):
    options = TINY | {"variants": "hyper-representation,multiclass-today", "seeds": "2"}
    result, record = reproduce("variants", options, quick=True, out=tmp_path, progress=False)
    for row, line in zip(result.numbers["glyphs"].values(), result.tables[0].rows, strict=True):
        one, other = (seed["accuracy"] for seed in row["seeds"])
        assert row["accuracy"] == pytest.approx((one + other) / 2) and len(line[3].split(", ")) == 2
        assert row["interval"] > 1.96 * abs(one - other) / 2
    names = {path.name for path in (record.folder / "runs").iterdir()}
    assert {"glyphs-hyper-representation", "glyphs-hyper-representation-seed1"} <= names
    alone = reproduce("variants", options | {"seeds": "1", "seed": "1"}, quick=True, out=tmp_path / "1", progress=False)
    assert (
        alone[0].numbers["glyphs"]["multiclass-today"]["seeds"][0]
        == (result.numbers["glyphs"]["multiclass-today"]["seeds"][1])
    )


def test_differences_are_taken_within_episodes_and_add_the_spread_of_seeds():
    hard, easy = 0.2, 0.8  # an episode that is hard for one is hard for the other
    one = EvaluatedTraining(0.1, 0.5, (hard + 0.1, easy + 0.1, hard + 0.1), of_seeds=0.03)
    gap, width = _trainings.differ(one, EvaluatedTraining(0.1, 0.5, (hard, easy, hard), of_seeds=0.04))
    assert gap == pytest.approx(0.1) and width == pytest.approx(0.05)
    assert one.interval > 0.3


def test_the_score_of_two_seeds_has_the_spread_of_episodes_and_of_seeds():
    rows = torch.rand(2, 40, generator=torch.Generator().manual_seed(0))
    both = _trainings.over_seeds([EvaluatedTraining(0.1, 0.5, tuple(row.tolist())) for row in rows])
    means = rows.mean(1)
    assert both.accuracy == pytest.approx(float(rows.mean()))
    assert both.of_seeds == pytest.approx(1.96 * float((means[0] - means[1]).abs()) / 2)
    episodes = 1.96 * float(rows.mean(0).std()) / 40**0.5
    assert both.interval == pytest.approx((episodes**2 + both.of_seeds**2) ** 0.5)


@pytest.mark.parametrize("name", ["variants", "validate-t"])
def test_on_real_data(real, shared_cache, tmp_path, monkeypatch, name):
    real("omniglot/images_background.zip", "miniimagenet/images.zip")
    for key, value in list(_trainings.PROBLEMS.items()):
        monkeypatch.setitem(_trainings.PROBLEMS, key, replace(value, meta_batch=1, ways=2))
    monkeypatch.setitem(validate_t.CHANGES, "omniglot", {})
    only = {
        "variants": {**TINY, "looks": "1", "variants": "hyper-representation,multiclass"},
        "validate-t": {"validate_every": "1,1", "steps": "1,2", "validation_episodes": "4"},
    }
    options = {**only[name], "datasets": "omniglot,miniimagenet", "iterations": "2,2"}
    result, _ = reproduce(name, options, quick=True, out=tmp_path, progress=False)
    assert list(result.numbers) == ["omniglot", "miniimagenet"]
    if name == "variants":
        paper = next(table for table in result.tables if table.title.startswith("miniimagenet 2"))
        assert [row[1] for row in paper.rows] == ["47.51", "43.02"]


def test_ctrl_c_saves_the_training_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "bilevel", "run", "variants", "--quick", "--out", str(tmp_path)]
    command += ["--set", "iterations=2000", "--set", "variants=hyper-representation"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "variants" / "runs" / "glyphs-hyper-representation" / "metrics.jsonl"
    while process.poll() is None and not (checkpoints.exists() and '"loss"' in checkpoints.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1]
    assert process.returncode == 130, told
    assert "The training is saved in" in told and "Run the same command to continue it" in told
    assert list((checkpoints.parent / "checkpoints").iterdir())
