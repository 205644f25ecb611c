"""`bilevel train` on folders of one's own pictures: how they are read, split, and where a training begins."""

import json

import numpy as np
import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from bilevel.cli import build
from bilevel.learners import library

SMALL = ["--iterations", 2, "--meta-batch", 2, "--queries", 2, "--validate-every", 2, "--validation-episodes", 4]


pytestmark = pytest.mark.filterwarnings("ignore:folder.*grayscale")


@pytest.fixture
def pictures(tmp_path):
    """Twenty classes of gray drawings of different sizes, dark on light."""
    for number in range(20):
        folder = tmp_path / "own" / f"c{number:02}"
        folder.mkdir(parents=True)
        for k in range(4):
            side = 40 + 20 * k
            picture = Image.new("L", (side, side), 250)
            points = np.random.default_rng(number).uniform(0.2, 0.8, (4, 2)) * side
            ImageDraw.Draw(picture).line([tuple(point + k) for point in points], fill=10, width=1 + side // 20)
            picture.save(folder / f"{k}.png")
    return tmp_path / "own"


def train(*arguments):
    return CliRunner().invoke(build(), ["train", *map(str, [*arguments, *SMALL])])


def test_twenty_classes_can_be_split_for_five_ways(pictures, tmp_path):
    given = ["--dataset", pictures, "--ways", 5, "--image-size", 28, "--out", tmp_path / "run"]
    failed = train(*given)
    assert failed.exit_code == 2 and "Episodes of the split 'val'" in failed.stderr and "--split" in failed.stderr
    done = train(*given, "--split", "0.5,0.25,0.25", "--channels", "gray", "--invert")
    assert done.exit_code == 0, done.output
    found = library.find(str(tmp_path / "run"))
    assert found.learner.shape == (1, 28, 28) and "5 val" in done.output
    assert found.preparation.plain() == {**found.card["preparation"]} and found.preparation.invert is True
    for wrong in ("0.5,0.5", "a,b,c", "0.5,0.4,0.4", "-1,1,1"):
        failed = train(*given, "--split", wrong)
        assert failed.exit_code == 2 and "three numbers ≥ 0 that sum to 1" in failed.stderr
    failed = train("glyphs-5way-1shot", "--channels", "gray", "--out", tmp_path / "x")
    assert failed.exit_code == 2 and "channels=gray is for folders of pictures" in failed.stderr


def test_a_zoo_model_is_tuned_on_drawings_and_classifies_as_it_was_trained(pictures, tmp_path):
    (pictures / "c00" / "broken.png").write_bytes(b"no picture")
    given = ["--dataset", pictures, "--split", "0.5,0.25,0.25", "--initial", "zoo:omniglot-5way-1shot", "--lr", 1e-5]
    failed = train(*given, "--strict", "--out", tmp_path / "strict")
    assert failed.exit_code == 2 and "broken.png cannot be read" in failed.stderr
    with pytest.warns(match="1 unreadable pictures were left out"):
        done = train(*given, "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "1 unreadable pictures were left out" in done.output
    found, zoo = library.find(str(tmp_path / "run")), library.find("zoo:omniglot-5way-1shot")
    assert found.preparation == zoo.preparation and found.preparation.kind == "drawing"
    assert found.settings.channels == "gray" and found.settings.image_size == 28
    for name, tensor in zoo.learner.lam.items():
        assert (tensor - found.learner.lam[name]).abs().max() < 1e-3
    asked = ["classify", tmp_path / "run", "--support", pictures, "--query", pictures / "c01", "--json"]
    said = json.loads(CliRunner().invoke(build(), list(map(str, asked))).stdout)
    assert said["preparation"]["kind"] == "drawing" and len(said["predictions"]) == 4
