"""A small world to report on: pictures, trainings on them, results, and names that bite."""

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
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILEVEL_CACHE", str(root / "cache"))
        settings = TrainingSettings(dataset=str(root / "pictures"), ways=3, shots=1, queries=4, steps=5, iterations=400)
        data = open_data(settings)
        yield SimpleNamespace(root=root, settings=settings, data=data)
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def site(world):
    """The page about two results, one with a training in it, and two trainings, one of them with an L2 term."""
    results, runs = world.root / "results", world.root / "runs"
    result(results / "ridge")
    other = {"experiment": "certificates", "summary": f"Bounds {SCRIPT}.", "paper": BITE, "notes": [BITE, SCRIPT]}
    result(results / "hostile", **other, runs=["runs/inside"], choices={BITE: SCRIPT}, command=f"bilevel run '{BITE}'")
    torch.set_default_dtype(torch.float32)
    run(results / "hostile" / "runs" / "inside", world.settings, world.data, seed=1)
    run(runs / "plain", world.settings, world.data, count=600, seed=2)
    run(runs / BITE, replace(world.settings, l2=0.05), world.data, seed=3)
    report = write([results, runs], world.root / "page.html", episodes=2, title=f"A page {SCRIPT}", progress=False)
    torch.set_default_dtype(torch.float64)
    return SimpleNamespace(report=report, path=Path(report.path), text=report.path.read_text(encoding="utf-8"))
