"""`bilevel classify`."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.cli._classification import ClassifyOptions, classify
from bilevel.cli._classification_picture import worst_first
from bilevel.cli._user_pictures import printable
from bilevel.learners import library
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.settings import TrainingSettings

LOOKS = {"rows": (0, 12, 24), "column": (24,), "two": (12, 36)}


def drawing(kind, seed, size=(48, 48), ink=20, paper=235):
    """Dark bars on light paper, a little different for every seed: three across, one down, or two down."""
    random = np.random.default_rng(seed)
    pixels = np.full(size[::-1], paper, np.uint8)
    for place in LOOKS[kind]:
        at = place + 4 + int(random.integers(0, 4))
        if kind == "rows":
            pixels[at : at + 4, 6:-6] = ink
        else:
            pixels[6:-6, at : at + 4] = ink
    return Image.fromarray(pixels)


def save(picture, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Untrained learners: bars are told apart by almost any features."""
    folder = tmp_path_factory.mktemp("models")
    for name, channels, dataset, mode in (
        ("ink", 1, "glyphs", "episode"),
        ("photos", 3, "miniimagenet", "episode"),
        ("averages", 1, "glyphs", "running"),
    ):
        learner = HyperRepresentation("omniglot-net", (channels, 28, 28), steps=5, inner_lr=0.05, batch_norm=mode)
        learner.save(folder / name, {"settings": TrainingSettings(dataset=dataset, batch_norm=mode).plain()})
    return folder


@pytest.fixture
def user(tmp_path):
    """What a user brings: class folders with unequal numbers, and new pictures in folders of the same names."""
    for kind, count in (("rows", 1), ("column", 2), ("two", 3)):
        for k in range(count):
            save(drawing(kind, k), tmp_path / "known" / kind / f"{k}.png")
        for k in range(3):
            save(drawing(kind, 10 + k), tmp_path / "new" / kind / f"{k}.png")
    return tmp_path


@pytest.fixture
def call(models, user):
    def run(*arguments, model="ink", support="known", query="new"):
        given = ["--support", user / support, "--query", user / query, *arguments]
        return CliRunner().invoke(build(), ["classify", str(models / model), *map(str, given)])

    return run


def answer(done):
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_table_accuracy_and_what_it_rests_on(call):
    done = call()
    assert done.exit_code == 0, done.output
    for text in (
        "prediction",
        "runner-up",
        "column/2.png",
        "Accuracy 100.0%: 9 of 9 pictures.",
        "9 pictures: 3 column, 3 rows, 3 two.",
        "1–3 labelled pictures in each of 3 classes",
        "trained on glyphs, 5-way 1-shot), T = 5",
        "Batch norm: support, the query set by the support set's statistics",
        "15 of 15 pictures were scaled to 28×28.",
        "15 of 15 pictures were inverted because their ink is darker than the paper",
    ):
        assert text in done.stdout, (text, done.stdout)
    assert "runner-up" not in call("--top", 1).stdout and "no. 3" in call("--top", 3).stdout


def test_json_and_csv_hold_the_same_probabilities_and_the_picture_is_drawn(call, user):
    found = answer(call("--json", "--csv", user / "out.csv", "--picture", user / "out.png"))
    assert found["classes"] == {"column": 2, "rows": 1, "two": 3} and found["batch_norm"] == "support"
    assert found["accuracy"] == {"right": 9, "of": 9, "accuracy": 1.0}
    with (user / "out.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    for line, said in zip(lines, found["predictions"], strict=True):
        assert sum(said["probabilities"].values()) == pytest.approx(1)
        assert said["probability"] == max(said["probabilities"].values())
        assert (line["picture"], line["prediction"], line["truth"]) == (
            said["picture"],
            said["prediction"],
            said["truth"],
        )
        for name, p in said["probabilities"].items():
            assert float(line[f"p({name})"]) == pytest.approx(p, abs=1e-6)
    with Image.open(user / "out.png") as picture:
        assert picture.width > 800 and len(picture.convert("RGB").getcolors(10**7)) > 20


def test_the_picture_begins_with_mistakes_and_doubts(models, user, monkeypatch):
    save(drawing("two", 40), user / "new" / "rows" / "mistake.png")  # in the folder of another class
    torch.set_default_dtype(torch.float32)
    result = classify(str(models / "ink"), user / "known", user / "new", ClassifyOptions())
    order = worst_first(result)
    assert sorted(order) == list(range(10)) and result.query.names[order[0]] == "rows/mistake.png"
    certain = [result.ranked(index)[0][1] for index in order[1:]]
    assert certain == sorted(certain) and certain[0] < certain[-1]
    ranked, asked = type(result).ranked, []
    monkeypatch.setattr(type(result), "ranked", lambda self, index: asked.append(index) or ranked(self, index))
    worst_first(result)
    assert len(asked) == 10  # a picture is not ranked again for every other one


def test_class_names_of_any_script_and_length_can_be_drawn(call, user):
    for before, after in (("rows", "漢字"), ("column", "$a_very_long_name_without_a_space$")):
        for folder in ("known", "new"):
            (user / folder / before).rename(user / folder / after)
    found = answer(call("--json", "--picture", user / "out.png"))
    assert found["accuracy"]["accuracy"] == 1 and "漢字" in found["classes"] and (user / "out.png").exists()


def test_a_query_is_answered_alone_as_among_others_unless_asked_otherwise(call):
    alone = answer(call("--json", query="new/rows/1.png"))
    among = answer(call("--json"))
    said = next(line for line in among["predictions"] if line["picture"] == "rows/1.png")
    assert alone["predictions"][0]["picture"] == "1.png" and alone["predictions"][0]["truth"] is None
    assert alone["accuracy"] is None
    assert alone["predictions"][0]["probabilities"] == pytest.approx(said["probabilities"], rel=1e-6)
    together = answer(call("--json", "--batch-norm", "episode"))
    assert together["batch_norm"] == "episode" and "transductive" in together["batch_norm_meaning"]
    assert answer(call("--json", model="averages"))["batch_norm"] == "running"


def test_steps_can_be_given(call):
    assert answer(call("--json"))["steps"] == 5 and answer(call("--json", "--steps", 2))["steps"] == 2


def test_light_on_dark_and_dark_on_light_end_up_the_same(call, user):
    expected = answer(call("--json"))
    for file in (user / "known" / "rows" / "0.png", user / "new" / "two" / "0.png"):
        with Image.open(file) as picture:
            negative = Image.fromarray(255 - np.asarray(picture))
        negative.save(file)
    mixed = answer(call("--json"))
    assert any("13 of 15 pictures were inverted" in note for note in mixed["notes"])
    for one, other in zip(expected["predictions"], mixed["predictions"], strict=True):
        # Scaling rounds light and dark differently.
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=2e-3)
    assert any("0 of 15 pictures were inverted." in note for note in answer(call("--json", "--no-invert"))["notes"])
    assert any("15 of 15 pictures were inverted." in note for note in answer(call("--json", "--invert"))["notes"])


def test_pictures_of_every_kind_are_converted_and_it_is_said(call, user):
    new = user / "new"
    gray = drawing("rows", 30)
    save(gray.convert("RGB"), new / "rows" / "colour.jpg")
    save(gray.convert("P"), new / "rows" / "palette.gif")
    save(Image.fromarray(np.asarray(gray).astype(np.uint16) * 257), new / "rows" / "deep.png")
    opaque = Image.fromarray(np.where(np.asarray(gray) < 99, 255, 0).astype(np.uint8))
    clear = Image.merge("LA", (Image.new("L", gray.size, 0), opaque))
    save(clear, new / "rows" / "clear.png")
    save(drawing("rows", 31, size=(96, 48)), new / "rows" / "wide.png")
    found = answer(call("--json"))
    notes = "\n".join(found["notes"])
    for text in (
        "1 of 20 pictures were 16-bit and were converted to 8-bit gray",
        "1 of 20 pictures were transparent (onto white)",
        "1 of 20 pictures were colour",
        "1 of 20 pictures were palette",
        "20 of 20 pictures were scaled to 28×28, 1 of them filled up at the sides with paper.",
    ):
        assert text in notes, (text, notes)
    said = {line["picture"]: line["prediction"] for line in found["predictions"]}
    assert [said[f"rows/{name}"] for name in ("colour.jpg", "palette.gif", "deep.png", "clear.png")] == ["rows"] * 4


def test_gray_pictures_for_a_model_of_colour_pictures(call):
    found = answer(call("--json", model="photos"))
    assert "15 of 15 pictures were grayscale and were converted to 8-bit colour." in found["notes"]
    assert not any("inverted" in note or "ink" in note for note in found["notes"])


def test_what_is_left_out_blank_or_known_already_is_said(call, user):
    (user / "known" / "rows" / "notes.txt").write_text("not a picture")
    (user / "new" / ".DS_Store").write_text("hidden")
    save(drawing("rows", 3), user / "known" / "stray.png")
    save(Image.new("L", (40, 40), 255), user / "new" / "blank.png")
    (user / "new" / "again.png").write_bytes((user / "known" / "two" / "1.png").read_bytes())
    found = answer(call("--json"))
    notes = {note.split(":")[0].split(" (")[0]: note for note in found["notes"]}
    for name in ("notes.txt", ".DS_Store", "stray.png"):
        assert name in notes["Left out"]
    assert "3: hidden, no pictures, or not directly" in notes["Left out"]
    assert "blank.png" in notes["Blank, so their predictions are meaningless"]
    assert "again.png" in notes["Also among the labelled pictures, so they do not test the classifier"]
    assert found["accuracy"]["of"] == 9 and "9 of 9 pictures whose folder names a class" in call().stdout


def test_unreadable_pictures_are_left_out_and_named_or_stop_everything(call, user):
    (user / "known" / "two" / "1.png").write_bytes(b"no picture")
    (user / "new" / "rows" / "0.png").write_bytes(b"")
    found = answer(call("--json"))
    assert found["classes"]["two"] == 2 and found["accuracy"]["of"] == 8
    left_out = next(note for note in found["notes"] if "left out (2; --strict: stop instead)" in note)
    assert "1.png" in left_out and "The first: " in left_out and "cannot be read" in left_out
    failed = call("--strict", "--csv", user / "out.csv", "--picture", user / "out.png")
    assert failed.exit_code == 2 and failed.stdout == "" and failed.stderr.startswith("Error: ")
    assert "1.png cannot be read" in failed.stderr and "0.png cannot be read: the file is empty" in failed.stderr
    assert not (user / "out.csv").exists() and not (user / "out.png").exists()
    (user / "known" / "rows" / "0.png").write_bytes(b"")
    nothing = call()
    assert nothing.exit_code == 2 and "No picture of the class rows can be read" in nothing.stderr


def test_a_drawing_in_a_corner_is_found_unless_asked_not_to(call, user):
    for number, file in enumerate(sorted(user.rglob("*.png"))):
        with Image.open(file) as picture:
            page = Image.new("L", (200, 200), 235)
            page.paste(picture, ((5, 140), (140, 10), (30, 20))[number % 3])
        page.save(file)
    found = answer(call("--json", "--picture", user / "out.png"))
    assert found["accuracy"]["accuracy"] >= 8 / 9 and found["preparation"]["clean"]
    assert any("15 of 15 pictures had their ink far from the middle" in note for note in found["notes"])
    left = answer(call("--json", "--no-clean"))
    assert not left["preparation"]["clean"] and left["accuracy"]["accuracy"] < found["accuracy"]["accuracy"]


def test_a_learner_that_was_only_saved_is_taken(models, user):
    learner = HyperRepresentation("omniglot-net", (3, 28, 28), steps=5, inner_lr=0.05)
    learner.save(user / "model")
    for spec in ("model", "model.safetensors", "model.json"):
        given = ["classify", user / spec, "--support", user / "known", "--query", user / "new", "--json"]
        assert answer(CliRunner().invoke(build(), list(map(str, given))))["accuracy"]["of"] == 9


def test_a_saved_learner_prepares_pictures_as_the_model_that_it_was(user):
    learner = library.find("zoo:omniglot-5way-1shot").learner
    HyperRepresentation.load(library.ZOO / "omniglot-5way-1shot").save(user / "loaded")
    learner.save(user / "model")
    given = ["--support", str(user / "known"), "--query", str(user / "new"), "--json"]
    zoo, *saved = (
        answer(CliRunner().invoke(build(), ["classify", spec, *given]))
        for spec in ("zoo:omniglot-5way-1shot", str(user / "model"), str(user / "loaded"))
    )
    for found in saved:
        assert found["preparation"] == zoo["preparation"] and found["accuracy"] == zoo["accuracy"]
    learner.preparation = None
    learner.save(user / "silent")
    found = answer(CliRunner().invoke(build(), ["classify", str(user / "silent"), *given]))
    assert found["preparation"] == zoo["preparation"]
    assert "silent does not say how its pictures are prepared. 6 of 6 pictures look like" in found["notes"][0]


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (None, {"support": "nowhere"}, "is not a folder; pass one that has a folder of pictures for each class"),
        (None, {"support": "known/rows"}, "holds no folders; put the images of each class"),
        (None, {"query": "nowhere"}, "neither a folder nor a picture"),
        (None, {"model": "nothing"}, "There is no trained model"),
        ("empty", {"query": "empty"}, "There are no pictures"),
        ("known/empty", {}, "empty holds no images"),
        ("one/alone", {"support": "one"}, "has one class only, alone; a classifier needs at least two"),
    ],
)
def test_bad_input_is_one_message(call, user, prepare, options, message):
    if prepare:
        (user / prepare).mkdir(parents=True)
    save(drawing("rows", 0), user / "one" / "alone" / "a.png")
    failed = call(**options)
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ") and message in failed.stderr
    assert "Traceback" not in failed.output and failed.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-norm", "mine"], "--batch-norm mine is unknown; write one of episode, support, running"),
        (["--batch-norm", "running"], "needs running averages"),
        (["--picture", "out.pdf"], "ends in .png"),
        (["--csv", "no/such/out.csv"], "there is no folder"),
        (["--csv", "new"], "it is a folder"),
        (["--picture", "new/rows/0.png"], "is one of the pictures to be read"),
    ],
)
def test_options_that_cannot_work(call, user, monkeypatch, arguments, message):
    monkeypatch.chdir(user)
    before = (user / "new" / "rows" / "0.png").read_bytes()
    failed = call(*arguments)
    assert failed.exit_code == 2 and message in failed.stderr
    assert (user / "new" / "rows" / "0.png").read_bytes() == before


def test_a_run_whose_description_is_incomplete(models, user):
    (user / "run").mkdir()
    (user / "run" / "config.json").write_text(json.dumps({"settings": TrainingSettings().plain()}))
    for name in ("best", "last"):
        (user / "run" / f"{name}.safetensors").write_bytes((models / "ink.safetensors").read_bytes())
    given = ["classify", user / "run", "--support", user / "known", "--query", user / "new"]
    failed = CliRunner().invoke(build(), list(map(str, given)))
    assert failed.exit_code == 2 and failed.stderr.startswith("Error: ")


def test_names_that_terminals_cannot_show():
    assert printable("ä b.png") == "ä b.png" and printable("a\nb\x1b\udcff") == r"a\nb\x1b\udcff"


def test_help_needs_no_torch():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bilevel", "classify", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert "--support" in shown.stdout
    assert not {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()} & {"torch", "numpy"}


def test_a_classifier_is_kept_and_used_without_its_pictures(call, user, models):
    save(drawing("rows", 7), user / "known" / "rows" / "7.png")
    first = answer(call("--json", "--save", user / "my.safetensors", "--none", 0.2))
    for file in (user / "known").rglob("*.png"):
        file.unlink()
    kept = ["classify", user / "my.safetensors", "--query", user / "new", "--json", "--none", 0.2]
    again = answer(CliRunner().invoke(build(), list(map(str, kept))))
    assert again["predictions"] == first["predictions"] and again["accuracy"] == first["accuracy"]
    for wrong, message in (
        (["--steps", 3], "is adapted already. Leave --steps out"),
        (["--none", 2], "is not a rate"),
        (["--save", "x.pt"], "ends in .safetensors"),
    ):
        failed = CliRunner().invoke(build(), [*map(str, kept), *map(str, wrong)])
        assert failed.exit_code == 2 and message in failed.stderr, failed.output
    failed = CliRunner().invoke(build(), ["classify", str(models / "ink"), "--query", str(user / "new")])
    assert failed.exit_code == 2 and "--support is missing" in failed.stderr


def test_none_of_these_needs_enough_to_go_by(call):
    failed = call("--none", 0.05)
    assert failed.exit_code == 2 and "`bilevel evaluate` has calibrated" in failed.stderr


def test_without_a_model_one_is_chosen_and_it_is_said_why(user):
    given = ["classify", "--support", user / "known", "--query", user / "new", "--json"]
    found = answer(CliRunner().invoke(build(), list(map(str, given))))
    assert found["model"].startswith("zoo:omniglot") and "look like drawings" in found["notes"][0]


def test_the_model_is_chosen_by_the_labelled_pictures_whatever_the_queries_are(user):
    noise = np.random.default_rng(0).integers(0, 256, (30, 100, 100, 3)).astype(np.uint8)
    for number, picture in enumerate(noise):
        Image.fromarray(picture).save(user / "new" / f"noise-{number}.png")
    given = ["classify", "--support", user / "known", "--query", user / "new", "--json"]
    assert answer(CliRunner().invoke(build(), list(map(str, given))))["model"].startswith("zoo:omniglot")


def test_class_names_that_spreadsheets_would_run_are_text_in_the_csv(call, user):
    for folder in ("known", "new"):
        (user / folder / "two").rename(user / folder / "=1+1")
    found = answer(call("--json", "--csv", user / "out.csv"))
    with (user / "out.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["truth"] for line in lines} == {"'=1+1", "rows", "column"}
    assert all(not text.startswith("=") for line in lines for text in (*line, *line.values()))
    assert "=1+1" in found["classes"]


def test_a_fifo_among_the_pictures_is_left_out_and_named(call, user):
    for place in ("known", "new"):
        os.mkfifo(user / place / "rows" / "x.png")
    found = answer(call("--json"))
    assert len(found["predictions"]) == 9 and any("x.png" in note for note in found["notes"])
