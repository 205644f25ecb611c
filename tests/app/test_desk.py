"""What is on the page of `bilevel app`, without the page: the answers are those of `bilevel classify`."""

import io
import json

import numpy as np
import pytest
import torch
from app_fixtures import circle, cross, lattice, png, saved, taught, zigzag
from PIL import Image
from typer.testing import CliRunner

from bilevel.app import desk as desk_module
from bilevel.app.desk import Desk, DeskLimits
from bilevel.cli import build
from bilevel.errors import BilevelError
from bilevel.learners.library import TrainedLearner


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def desk():
    return Desk()


def test_two_classes_of_one_picture_each_are_told_apart(desk):
    assert desk.state()["ready"] is False and desk.ask(png(circle()))["ranked"] is None
    first, second = taught(desk)
    state = desk.state()
    assert state["ready"] and [one["name"] for one in state["classes"]] == ["circle", "zigzag"]
    for drawing, number in ((circle(0.05), first), (zigzag(0.06), second)):
        answer = desk.ask(png(drawing, size=150))
        assert answer["ranked"][0]["class"] == number and answer["ranked"][0]["probability"] > 0.6
        assert sum(one["probability"] for one in answer["ranked"]) == pytest.approx(1, abs=1e-5)
        assert answer["nearest"][0]["class"] == number and answer["nearest"][0]["distance"] >= -1e-6
        assert answer["nearest"] == sorted(answer["nearest"], key=lambda one: one["distance"])
        assert answer["none"] is False


def test_the_answers_are_those_of_the_command(desk, tmp_path):
    drawings = {"circle": circle, "zigzag": zigzag, "cross": cross}
    for name, shape in drawings.items():
        (tmp_path / "known" / name).mkdir(parents=True)
        number = None
        for k in range(2):
            contents = png(shape(0.04 * k), size=120 + 40 * k)
            (tmp_path / "known" / name / f"{k}.png").write_bytes(contents)
            number = desk.add_class(name, contents) if number is None else desk.add_picture(number, contents)
    new = png(cross(-0.07), size=300, ink=230, paper=20)
    (tmp_path / "new.png").write_bytes(new)
    given = ["--support", tmp_path / "known", "--query", tmp_path / "new.png", "--none", 0.05, "--json"]
    said = CliRunner().invoke(build(), ["classify", *map(str, given)])
    assert said.exit_code == 0, said.output
    found, answer = json.loads(said.stdout), desk.ask(new)
    assert desk.state()["model"]["used"] == found["model"]
    expected = found["predictions"][0]["probabilities"]
    # The command knows its classes by the alphabet, which changes the rounding of sums.
    assert {one["name"]: one["probability"] for one in answer["ranked"]} == pytest.approx(expected, rel=1e-3)
    assert answer["none"] == (found["predictions"][0]["prediction"] == "none of these")


def test_a_picture_of_no_class_is_none_of_these_and_never_where_that_is_not_wanted(desk):
    taught(desk)
    assert desk.ask(lattice())["none"] is True
    assert "false-alarm rate of 5%" in desk.state()["none"]["why"]
    desk.choose(rate=0)
    assert desk.ask(lattice())["none"] is False and desk.state()["none"]["why"] == ""
    with pytest.raises(BilevelError, match=r"one of 0\.01"):
        desk.choose(rate=0.03)


def test_a_model_without_calibration_says_why_it_cannot_say_none(desk, monkeypatch):
    monkeypatch.setattr(TrainedLearner, "calibrations", [])
    taught(desk)
    desk.choose("zoo:miniimagenet-c4l-staged")
    state = desk.state()
    assert state["none"]["why"] == "" and "has calibrated" in state["none"]["why_not"]
    assert state["model"] == {**state["model"], "asked": "zoo:miniimagenet-c4l-staged", "drawings": False, "why": ""}
    assert desk.ask(png(circle()))["none"] is False


def test_photographs_get_a_model_of_photographs(desk):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 60, 3), np.uint8)
    desk.add_class("one", saved(Image.fromarray(pixels[0]), "JPEG"))
    desk.add_class("two", saved(Image.fromarray(pixels[1]), "JPEG"))
    assert desk.state()["model"]["used"].startswith("zoo:miniimagenet")
    assert desk.ask(saved(Image.fromarray(pixels[1])))["ranked"][0]["name"] == "two"


def test_changes_can_be_taken_back(desk):
    first, _ = taught(desk)
    before = desk.state()["classes"]
    desk.remove_class(first)
    assert not desk.state()["ready"]
    desk.undo()
    assert desk.state()["classes"] == before
    desk.rename(first, "  round   thing ")
    assert desk.state()["classes"][0]["name"] == "round thing"
    desk.rename(first, "round  thing")  # the name that it has
    assert desk.state()["classes"][0]["name"] == "round thing"
    desk.remove_picture(before[1]["pictures"][0]["number"])  # the last one of its class
    assert [one["number"] for one in desk.state()["classes"]] == [first]
    desk.clear()
    for _ in range(5):
        desk.undo()
    with pytest.raises(BilevelError, match="nothing to undo"):
        desk.undo()
    assert desk.state()["classes"] == []


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda desk: desk.add_class(" \n", png(circle())), "needs a name"),
        (lambda desk: desk.add_class("a" * 41, png(circle())), "at most 40"),
        (lambda desk: desk.add_class("circle", png(circle())), "already"),
        (lambda desk: desk.add_class("new", b"no picture"), "cannot be read"),
        (lambda desk: desk.add_class("new", b""), "empty"),
        (lambda desk: desk.rename(1, "zigzag"), "already"),
        (lambda desk: desk.add_picture(999, png(circle())), "was removed"),
        (lambda desk: desk.remove_picture(999), "was removed"),
        (lambda desk: desk.ask(b"x" * 12_000_001), "12 MB"),
        (lambda desk: desk.choose("zoo:nothing"), "omniglot-5way-1shot"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(desk, act, message):
    taught(desk)
    before = desk.state()
    with pytest.raises(BilevelError, match=message):
        act(desk)
    assert desk.state() == before


def test_there_are_limits(monkeypatch):
    monkeypatch.setattr(desk_module, "LIMITS", DeskLimits(classes=2, pictures=3, all_bytes=3000))
    desk = Desk()
    first, _ = taught(desk)
    with pytest.raises(BilevelError, match="There are 2 classes, and no more"):
        desk.add_class("third", png(cross()))
    with pytest.raises(BilevelError, match="more than 0 MB"):
        desk.add_picture(first, saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60), np.uint8))))
    desk.add_picture(first, png(circle(0.1), size=40))
    with pytest.raises(BilevelError, match="3 labelled pictures"):
        desk.add_picture(first, png(circle(0.1), size=40))


def test_a_blank_picture_is_called_blank(desk):
    taught(desk)
    answer = desk.ask(saved(Image.new("L", (50, 50), 255)))
    assert answer["blank"] is True and answer["ranked"] is None


def test_what_the_page_saves_the_command_and_the_page_take(desk, tmp_path):
    taught(desk)
    file, new = tmp_path / "my.safetensors", tmp_path / "new.png"
    file.write_bytes(desk.saved())
    new.write_bytes(png(zigzag(0.05)))
    said = CliRunner().invoke(build(), ["classify", str(file), "--query", str(new), "--json"])
    assert said.exit_code == 0, said.output
    expected = json.loads(said.stdout)["predictions"][0]["probabilities"]

    from bilevel.cli._serving import desk as desk_of

    again, _ = desk_of(str(file), None)
    answer = again.ask(new.read_bytes())
    assert {one["name"]: one["probability"] for one in answer["ranked"]} == pytest.approx(expected, rel=1e-4)
    state = again.state()
    assert "kept in my.safetensors" in state["model"]["used"] and state["undo"] == 0
    number = state["classes"][0]["pictures"][0]["number"]
    shown = np.asarray(Image.open(io.BytesIO(again.shown(number, seen=True))))
    assert shown.shape == (28, 28) and np.array_equal(
        shown,
        np.asarray(Image.open(io.BytesIO(desk.shown(desk.state()["classes"][0]["pictures"][0]["number"], seen=True)))),
    )
    with pytest.raises(BilevelError, match="two classes"):
        Desk().saved()
