"""A training of the Glyphs demonstration, in the files of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import bilevel
from bilevel.data import ImageDataset
from bilevel.files import write_bytes, write_json
from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.settings import TrainingSettings
from bilevel.source_commit import commit
from bilevel.training.files import write_tensors
from bilevel.training.folder import RunFolder


@dataclass(frozen=True)
class Learned:
    """A learner after all hyperiterations, and the lines of its `metrics.jsonl`."""

    learner: HyperRepresentation
    metrics: list[dict[str, float]]

    @property
    def curve(self) -> list[float]:
        """The accuracy on meta-validation, the start included."""
        return [line["score"] for line in self.metrics if "score" in line]


def keep(path: Path, training: TrainingSettings, learned: Learned, steps: int, data: ImageDataset) -> None:
    """Write a training down as `bilevel train` would, with the T that was best on meta-validation: `bilevel evaluate`,
    `bilevel classify` and `bilevel report` take it as one of theirs."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_bytes(folder.metrics, "".join(json.dumps(line) + "\n" for line in learned.metrics).encode())
    weights = learned.learner.with_running(learned.learner.lam)
    write_tensors(folder.last, weights, {"iteration": training.iterations})
    config = {
        "preset": None,
        "settings": training.plain(),
        "learner": {**learned.learner.settings(), "steps": steps},
        "data": {"name": data.name, "fingerprint": data.fingerprint, "classes": len(data.classes)},
        "threads": 1,
        "bilevel": bilevel.__version__,
        "commit": commit(),
    }
    write_json(folder.config_file, config)
