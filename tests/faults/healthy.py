"""Healthy inputs, small enough to be broken thousands of times."""

import io
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bilevel import HyperRepresentation
from bilevel.data.arrays import from_arrays
from bilevel.data.preparation import Preparation, prepare
from bilevel.files import write_json
from bilevel.learners import library, recognition
from bilevel.learners.calibration import RATES, Calibration
from bilevel.learners.runs import begin_or_resume, schedule
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from bilevel.training.folder import RunFolder
from bilevel.training.loop import Run

SHAPE = (1, 28, 28)
TINY = TrainingSettings(
    dataset="arrays", ways=2, shots=1, queries=1, steps=2, meta_batch=2, iterations=4, checkpoint_every=2,
    validate_every=2, validation_episodes=2,
)  # fmt: skip


def drawing(kind: int, seed: int, size: int = 28) -> Image.Image:
    """Black strokes on white: class `kind` is a bar, a ring or a cross, somewhere near the middle."""
    draw = np.random.default_rng([kind, seed])
    row, column = np.indices((size, size)) / size - 0.5 - 0.1 * draw.uniform(-1, 1, 2)[:, None, None]
    turned = row * np.cos(kind) + column * np.sin(kind)
    ink = [abs(turned) < 0.05, abs(np.hypot(row, column) - 0.3) < 0.05, abs(row * column) < 0.01][kind % 3]
    return Image.fromarray(np.where(ink & (np.hypot(row, column) < 0.4), 20, 240).astype(np.uint8))


def encoded(picture: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def data():
    """Eight classes of drawings as a data set, split into four, two and two."""
    images = np.stack([np.asarray(drawing(kind, seed)) for kind in range(8) for seed in range(4)])
    made = from_arrays(255 - images, np.repeat(np.arange(8), 4), fractions=(0.5, 0.25, 0.25))
    object.__setattr__(made, "preparation", Preparation("drawing", *SHAPE))
    object.__setattr__(made, "fingerprint", "drawings")
    return made


def calibration() -> dict:
    rates = {f"{rate:g}": 0.1 for rate in RATES}
    return Calibration(2, 1, "support", 2, 10, 0.7, 0.1, 0.05, 0.9, rates, rates, rates).plain()


def learner() -> HyperRepresentation:
    torch.manual_seed(0)
    return HyperRepresentation("omniglot-net", SHAPE, steps=2)


def model(folder: Path) -> Path:
    """A saved learner with a whole card; returns its stem."""
    card = {
        "settings": TINY.plain(),
        "data": {"name": "arrays", "fingerprint": "drawings"},
        "preparation": Preparation("drawing", *SHAPE).plain(),
        "calibrations": [calibration()],
        "training": {"hyperiterations": 4, "images": 16, "minutes": 0.1},
        "curve": [[0, 0.5, 0.1], [2, 0.6, 0.1]],
        "score": {"test": {"accuracy": 0.9, "interval": 0.01, "steps": 2}},
    }
    learner().save(folder / "model", card)
    return folder / "model"


def job() -> FewShotTraining:
    torch.manual_seed(0)
    return FewShotTraining(TINY, data())


def run_of(folder: Path) -> Path:
    """A finished training, with two checkpoints and a calibration; returns its folder."""
    for name, content in _trained().items():
        file = folder / "run" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder / "run"


@cache
def _trained() -> dict[str, bytes]:
    """The files of that training, by their names in its folder."""
    with tempfile.TemporaryDirectory() as scratch:
        _train(Path(scratch))
        files = [file for file in Path(scratch).rglob("*") if file.is_file()]
        return {str(file.relative_to(scratch)): file.read_bytes() for file in files}


def _train(path: Path) -> None:
    place, training = RunFolder(path), job()
    with place.locked():
        begin_or_resume(place, training, "bilevel train")
        Run(training, place, schedule(TINY)).go()
    card = library.find(str(path)).card
    write_json(path / library.CALIBRATION, {"weights": card["weights"], "calibrations": [calibration()]}, sealed=True)


def classifier(folder: Path) -> Path:
    """What `bilevel classify … --save` writes."""
    found = library.find(str(model(folder)))
    made = recognition.adapted(found, labelled(found.preparation), ["bar", "bar", "ring", "ring"])
    made.save(folder / "kept.safetensors", recognition.facts_to_save(found, found.preparation))
    for ending in library.ENDINGS:
        (folder / f"model{ending}").unlink()
    return folder / "kept.safetensors"


def labelled(how: Preparation) -> np.ndarray:
    """Two bars and two rings as a model takes them."""
    pictures = [encoded(drawing(kind, seed), "PNG") for kind in (0, 1) for seed in (0, 1)]
    return np.stack([prepare(picture, "a picture", how).image for picture in pictures])
