"""Pretraining on all classes: images per second.

As a program: `python -m sections.pretraining NETWORK SIZE ROUNDS`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from harness import probe

if TYPE_CHECKING:
    from harness.figures import Figures
    from harness.section import Bench
    from harness.tables import Table
    from harness.targets import Target

ORDER = 62
TITLE = "Pretraining on photographs"
WHAT = """
A step of SGD with Nesterov's momentum on 256 images of 64 classes, on two threads, in wall-clock time. "Ours" is
`bilevel train --learner multiclass`, with and without `--precision bfloat16`. It samples and augments its images
(mirrored, shifted, other colours), and splits each batch into four parts that share the threads. The "plain loop" is
the same network as an ordinary torch training loop with channels last, in float32 and under autocast. Its images are
already in memory and are not augmented. All four take turns in one process.
"""

IMAGES, CLASSES, THREADS = 256, 64, 2
CASES = (("c4l", 42), ("c4l", 84), ("c4l-64", 84))


@dataclass(frozen=True)
class Rates:
    """Seconds of a step, by round."""

    network: str
    size: int
    ours: list[float]
    ours_bfloat16: list[float]
    plain: list[float]
    plain_bfloat16: list[float]

    @property
    def ratio(self) -> float:
        """The time of the plain loop in float32 divided by that of ours in bfloat16."""
        return _ratio(self.plain, self.ours_bfloat16)


def measure(bench: Bench) -> dict[str, Any]:
    rounds = bench.pick(quick=2, full=12)
    found = []
    for network, size in CASES:
        found.append(Rates(network, size, **probe.ask("pretraining", network, size, rounds)))
        bench.tick(f"pretraining {network}, {size}×{size}", 1 / len(CASES))
    return {"rates": [asdict(row) for row in found]}


def targets(figures: Figures) -> Iterator[Target]:
    from harness.targets import Target

    for row in figures.rows(Rates, "rates"):
        words = f"{row.ratio:.2f}: {_rate(row.ours_bfloat16)} and {_rate(row.plain)} images per second"
        case = f"{row.network}, {row.size}×{row.size}, bfloat16"
        claim = "at least 1.6 times faster than a plain channels-last loop in float32"
        yield Target(claim, case, row.ratio, 1.6, words, at_least=True)


def tables(figures: Figures) -> Iterator[Table]:
    from harness.tables import Table

    rows = [
        [
            row.network,
            f"{row.size}×{row.size}",
            *(_rate(part) for part in (row.ours_bfloat16, row.ours, row.plain_bfloat16, row.plain)),
            f"{row.ratio:.2f}",
            f"{_ratio(row.plain, row.ours):.2f}",
            f"{_ratio(row.plain_bfloat16, row.ours_bfloat16):.2f}",
        ]
        for row in figures.rows(Rates, "rates")
    ]
    columns = ["network", "pixels", "ours, bfloat16", "ours, float32", "plain loop, bfloat16", "plain loop, float32"]
    columns += ["ours in bfloat16 / plain in float32", "both in float32", "both in bfloat16"]
    yield Table("Images per second", columns, rows, "Rates are of the best step. Ratios are medians over rounds.")


def _rate(seconds: list[float]) -> str:
    return f"{IMAGES / min(seconds):,.0f}"


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(slow / fast for slow, fast in zip(theirs, ours, strict=True))


def plain_step(network: str, size: int, bfloat16: bool) -> Any:
    """A step of an ordinary torch training loop."""
    import torch
    from torch import nn

    filters = 64 if network.endswith("64") else 32
    layers: list[nn.Module] = []
    for inputs in (3, filters, filters, filters):
        convolution = nn.Conv2d(inputs, filters, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(filters), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    features = filters * (size // 16) ** 2
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    images = torch.rand(IMAGES, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (IMAGES,))

    def step(iteration: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()

    return step


def our_step(network: str, size: int, bfloat16: bool) -> Any:
    import numpy as np

    from bilevel.cli._allocator import keep_freed_memory
    from bilevel.data import ImageDataset
    from bilevel.learners.settings import TrainingSettings
    from bilevel.learners.training import FewShotTraining

    keep_freed_memory()
    each, classes = 20, CLASSES + 36
    pixels = np.random.default_rng(0).integers(0, 256, (each * classes, size, size, 3), dtype=np.uint8)
    splits = {"train": range(CLASSES), "val": range(CLASSES, 80), "test": range(80, classes)}
    labels = np.repeat(np.arange(classes), each)
    data = ImageDataset("noise", pixels, labels, tuple(map(str, range(classes))), splits)
    settings = TrainingSettings(
        learner="multiclass",
        network=network,
        queries=15,
        images=IMAGES,
        augment="flip,crop,colour",
        optimizer="sgd",
        lr=0.1,
        weight_decay=5e-4,
        batch_norm="running",
        precision="bfloat16" if bfloat16 else "float32",
    )
    return FewShotTraining(settings, data).step


def main() -> None:
    import torch

    network, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(THREADS)
    kinds = {"ours": our_step, "plain": plain_step}
    steps = {
        f"{name}{'_bfloat16' * bfloat16}": build(network, size, bfloat16)
        for name, build in kinds.items()
        for bfloat16 in (True, False)
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for iteration in range(1, rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step(iteration)
            if iteration > 1:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
