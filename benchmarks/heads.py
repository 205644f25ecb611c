"""Compare heads on a trained representation: `python benchmarks/heads.py [--images N] [--episodes N]`.

The staged model of the zoo computes the features of MiniImagenet's meta-test classes, which are written to a file. Then
the heads of `bilevel heads --features FILE` are compared on the same episodes of these features. Writes HEADS.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from bilevel.learners.features import CachedFeatures, FeatureTrial
from bilevel.learners.library import find
from bilevel.learners.streams import open_data

MODEL = "zoo:miniimagenet-c4l-staged"
# The head with which all other heads are compared.
REFERENCE = "logistic-head"
HEADS = ("hyper-representation", "ridge-head", "svm-head", REFERENCE)
# The number of images that pass through the network together.
GROUP = 100


@torch.no_grad()
def features(images: int) -> CachedFeatures:
    """The features of the first `images` images of every meta-test class."""
    model = find(MODEL)
    learner, data = model.learner, open_data(model.settings)
    rows = np.concatenate([np.flatnonzero(data.labels == one)[:images] for one in data.splits["test"]])
    parts = []
    for group in np.split(rows, range(GROUP, len(rows), GROUP)):
        pictures = torch.from_numpy(data.images[group]).movedim(-1, 1).float() / 255
        # Without the last column, which is the constant feature for the bias.
        parts.append(learner.representation.sets(learner.lam, pictures, pictures[:1], training=False)[0][:, :-1])
    return CachedFeatures.of(torch.cat(parts).numpy(), [data.classes[data.labels[row]] for row in rows])


def interval(values: torch.Tensor) -> float:
    return float(1.96 * values.std() / len(values) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--images", type=int, default=200, help="number of images of every class")
    parser.add_argument("--episodes", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        features(options.images).save(Path(scratch) / "features.npz")
        cached = CachedFeatures.load(Path(scratch) / "features.npz")
    cells: dict[str, list[str]] = {name: [] for name in HEADS}
    for shots in (1, 5):
        scores = FeatureTrial(shots=shots, episodes=options.episodes).compare(cached, HEADS)
        reference = scores[REFERENCE].test.per_episode[:, -1]
        for name, score in scores.items():
            gap = 100 * (score.test.per_episode[:, -1] - reference)
            cells[name] += [f"{score.accuracy:.2%} ± {100 * score.interval:.2f}"]
            cells[name] += ["–" if name == REFERENCE else f"{float(gap.mean()):+.2f} ± {interval(gap):.2f}"]
    head = ["head", *(cell for shots in (1, 5) for cell in (f"5-way {shots}-shot", f"minus `{REFERENCE}`"))]
    rows = [[f"`{name}`", *of] for name, of in cells.items()]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * 4], *rows)]
    count = f"{options.episodes} episodes of ten meta-test classes, {options.images} pictures each"
    text = "\n".join([*lines, "", f"{count}. T and the centre were chosen on the other ten. ± is a 95 % interval.", ""])
    (options.out / "HEADS.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
