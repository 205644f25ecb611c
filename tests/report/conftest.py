"""A small world to report on: pictures, trainings on them, results, and names that bite."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from report_fixtures import BITE, SCRIPT, result, run

from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import open_data
from bilevel.report.page import write


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Settings and data of a 3-way training on folders of noise, one class of which has a name that bites."""
    root = tmp_path_factory.mktemp("world")
    draw = np.random.default_rng(0)
    for number in range(15):
        place = root / "pictures" / f"{number:02} {BITE}"
        place.mkdir(parents=True)
        ground = draw.integers(0, 256, (28, 28, 3))
        for i in range(6):
            pixels = (0.5 * ground + 0.5 * draw.integers(0, 256, (28, 28, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{i}.png")
    settings = TrainingSettings(dataset=str(root / "pictures"), ways=3, shots=1, queries=4, steps=5, iterations=400)
    with cached(root):
        return SimpleNamespace(root=root, settings=settings, data=open_data(settings))


@contextmanager
def cached(root):
    """The pictures' cache, and single precision as in training.

    Not for the whole session: the tests of other folders would draw all of Glyphs again for a cache that lacks it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILEVEL_CACHE", str(root / "cache"))
        torch.set_default_dtype(torch.float32)
        yield
        torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def cache_of_the_world(request, monkeypatch):
    if "world" in request.fixturenames:
        monkeypatch.setenv("BILEVEL_CACHE", str(request.getfixturevalue("world").root / "cache"))


@pytest.fixture(scope="session")
def site(world):
    """The page about two results, one with a training in it, and two trainings, one of them with an L2 term."""
    results, runs = world.root / "results", world.root / "runs"
    result(results / "ridge")
    other = {"experiment": "certificates", "summary": f"Bounds {SCRIPT}.", "paper": BITE, "notes": [BITE, SCRIPT]}
    result(results / "hostile", **other, runs=["runs/inside"], choices={BITE: SCRIPT}, command=f"bilevel run '{BITE}'")
    with cached(world.root):
        run(results / "hostile" / "runs" / "inside", world.settings, world.data, seed=1)
        run(runs / "plain", world.settings, world.data, count=600, seed=2)
        run(runs / BITE, replace(world.settings, l2=0.05), world.data, seed=3)
        report = write([results, runs], world.root / "page.html", episodes=2, title=f"A page {SCRIPT}", progress=False)
    return SimpleNamespace(report=report, path=Path(report.path), text=report.path.read_text(encoding="utf-8"))
