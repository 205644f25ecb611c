"""`bilevel export`: the file says what the library says, the card what goes in and out, and the rest is refused."""

import json
import os
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from bilevel import extras, learners
from bilevel.cli import _exporting, build
from bilevel.data.preparation import Preparation
from bilevel.learners import library
from bilevel.learners.calibration import Calibration
from bilevel.learners.settings import TrainingSettings

SHAPE = (1, 28, 28)


def picture(kind, seed):
    """Dark bars on light paper: across, down, or both."""
    pixels = np.full((40, 40), 235, np.uint8)
    at = 14 + int(np.random.default_rng(seed).integers(0, 6))
    if kind != "down":
        pixels[at : at + 4, 6:-6] = 20
    if kind != "across":
        pixels[6:-6, at : at + 4] = 20
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Saved learners with random weights, labelled pictures of unequal numbers, and new ones."""
    place = tmp_path_factory.mktemp("export")
    for name, kind, options in (
        ("steps", "hyper-representation", {"batch_norm": "episode", "normalise": True, "step_bound": 1.0}),
        ("averages", "hyper-representation", {"batch_norm": "running"}),
        ("ridge", "ridge-head", {"batch_norm": "support"}),
        ("comparing", "matching", {"batch_norm": "support"}),
        ("all-weights", "maml", {}),
    ):
        learner = learners.get(kind)("omniglot-net", SHAPE, **options)
        generator = torch.Generator().manual_seed(2)
        if options.get("batch_norm") == "running":
            for layer in learner.representation.norms.values():
                layer.running_mean.copy_(0.1 * torch.randn(layer.running_mean.shape, generator=generator))
                layer.running_var.copy_(0.5 + torch.rand(layer.running_var.shape, generator=generator))
        if options.get("normalise"):
            learner.lam["normalised.centre"] += 0.1
        mode = options.get("batch_norm", "episode")
        settings = TrainingSettings(dataset="glyphs", learner=kind, batch_norm=mode)
        steps = learner.steps if learner.has_steps else None
        known = Calibration(3, 1, "support", steps, 10, 0.3, 0.1, 0.05, 0.9, {}, {}, {})
        learner.save(place / name, {"settings": settings.plain(), "calibrations": [asdict(known)]})
    for kind, count in (("across", 1), ("both", 3), ("down", 2)):
        for group, first, number in (("known", 0, count), ("new", 10, 2)):
            (place / group / kind).mkdir(parents=True)
            for k in range(number):
                picture(kind, first + k).save(place / group / kind / f"{k}.png")
    return place


def call(*arguments):
    return CliRunner().invoke(build(), list(map(str, arguments)))


def exported(to, file, images):
    """The outputs of the written file, by what would be used elsewhere."""
    if to == "torch":
        return [value.numpy() for value in torch.export.load(file).module()(torch.from_numpy(images))]
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"images": images})


def inputs(card, files):
    """Pictures as the card says that they have to be prepared."""
    how = Preparation.of({key: value for key, value in card["preparation"].items() if key != "meaning"})
    made = np.stack([how(Image.open(file)).image for file in files])
    images = (made.astype(np.float32) / 255).transpose(0, 3, 1, 2)
    assert list(images.shape[1:]) == card["input"]["shape"][1:] and str(images.dtype) == card["input"]["dtype"]
    return images


@pytest.mark.parametrize(("to", "ending", "model"), [("onnx", "onnx", "steps"), ("torch", "pt2", "ridge")])
def test_classifier_says_what_classify_says(place, tmp_path, to, ending, model):
    file, kept = tmp_path / f"a.{ending}", tmp_path / "kept.safetensors"
    done = call("export", place / model, "--to", to, "--support", place / "known", "--out", file, "--json")
    assert done.exit_code == 0, done.output
    card = json.loads(done.stdout)
    assert card == json.loads((tmp_path / f"a.{ending}.json").read_text())
    assert card["classes"] == ["across", "both", "down"] and card["batch_norm"] == "support"
    assert card["temperature"] == 0.3
    assert os.path.dirname(_exporting.__file__).encode() not in file.read_bytes()
    if to == "onnx":
        (taken,) = pytest.importorskip("onnx").load(file).graph.input
        assert [axis.dim_param or axis.dim_value for axis in taken.type.tensor_type.shape.dim] == card["input"]["shape"]
    assert [one["name"] for one in card["outputs"]] == ["features", "logits", "probabilities"]
    shown = call(
        *("classify", place / model, "--support", place / "known", "--query", place / "new", "--json", "--save", kept)
    )
    expected = json.loads(shown.stdout)["predictions"]
    images = inputs(card, [place / "new" / one["picture"] for one in expected])
    features, logits, found = exported(to, file, images)
    for one, row in zip(expected, found, strict=True):
        assert np.allclose(row, [one["probabilities"][name] for name in card["classes"]], atol=1e-5)
    assert np.ptp(found, 0).max() > 1e-3  # the pictures are told apart
    for value, part in zip((features, logits, found), card["outputs"], strict=True):
        assert list(value.shape) == [len(images), *part["shape"][1:]] and str(value.dtype) == part["dtype"]
    alone = exported(to, file, images[:1])  # every picture stands for itself
    assert np.allclose(alone[2], found[:1], atol=1e-5)

    again = call("export", kept, "--to", "torch", "--out", tmp_path / "again.pt2")
    assert again.exit_code == 0 and "Classifier of 3 classes" in again.output, again.output
    assert np.allclose(exported("torch", tmp_path / "again.pt2", images)[2], found, atol=1e-5)


def test_representation_with_the_averages_of_training(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("export", place / "averages", "--to", "torch")
    assert done.exit_code == 0, done.output
    assert "out: features, batch×256 float32" in done.stdout and "Batch norm: running" in done.stdout
    learner = library.find(str(place / "averages")).learner
    images = torch.rand(3, *SHAPE)
    expected = learner.representation.sets(learner.lam, images, images, training=False)[1][:, :-1]
    (found,) = exported("torch", tmp_path / "averages.pt2", images.numpy().astype(np.float32))
    assert np.allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5) and expected.std() > 0.01
    card = json.loads((tmp_path / "averages.pt2.json").read_text())
    assert card["classes"] is None and card["checked"]["largest_differences"].keys() == {f"torch {torch.__version__}"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steps"], "Write --support labelled/"),
        (["steps", "--batch-norm", "episode", "--support", "known"], "Write --batch-norm support --support labelled/."),
        (["steps", "--steps", "3"], "--steps 3 is for a classifier"),
        (["steps", "--out", "a.bin"], "ends in .pt2"),
        (["steps", "--out", "nowhere/a.pt2"], "there is no folder nowhere"),
        (["comparing", "--support", "known"], "is not the representation with a linear head"),
        (["all-weights", "--support", "known"], "maml has no other mode, so it cannot be exported"),
        (["nothing"], "There is no trained model"),
    ],
)
def test_what_cannot_be_exported_is_refused(place, monkeypatch, arguments, said):
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    failed = call("export", *arguments, "--to", "torch")
    assert failed.exit_code == 2 and said in failed.stderr, failed.output
    assert sorted(place.iterdir()) == before


def test_a_kept_classifier_is_taken_as_it_is(place, tmp_path):
    kept, shared = tmp_path / "kept.safetensors", ["--support", place / "known", "--query", place / "new"]
    assert call("classify", place / "steps", *shared, "--batch-norm", "episode", "--save", kept).exit_code == 0
    failed = call("export", kept, "--to", "torch", "--out", tmp_path / "a.pt2")
    assert failed.exit_code == 2 and "--batch-norm support --save" in failed.stderr
    failed = call("export", kept, "--to", "torch", "--out", tmp_path / "a.pt2", "--no-clean")
    assert failed.exit_code == 2 and "Leave --no-clean out" in failed.stderr


@pytest.mark.parametrize("wrong", [1e-2, float("nan")])
def test_a_file_that_differs_from_the_library_is_not_written(place, tmp_path, monkeypatch, wrong):
    forward = _exporting.ExportedModule.forward
    monkeypatch.setattr(
        _exporting.ExportedModule, "forward", lambda self, x: tuple(y + wrong for y in forward(self, x))
    )
    failed = call("export", place / "averages", "--to", "torch", "--out", tmp_path / "a.pt2")
    assert failed.exit_code == 2 and "Nothing was written" in failed.stderr and "features differ" in failed.stderr
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named_or_said(place, tmp_path, monkeypatch):
    here = extras.installed
    monkeypatch.setattr(extras, "installed", lambda name: name != "onnxscript" and here(name))
    arguments = ["export", place / "averages", "--to", "onnx", "--out", tmp_path / "a.onnx"]
    failed = call(*arguments)
    assert failed.exit_code == 2 and 'ONNX needs onnxscript. Write: pip install "bilevel[export]"' in failed.stderr
    monkeypatch.setattr(extras, "installed", lambda name: name != "onnxruntime" and here(name))
    done = call(*arguments)
    assert done.exit_code == 0 and "The ONNX file was not run" in done.stdout, done.output
