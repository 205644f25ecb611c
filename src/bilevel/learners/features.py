"""Heads on cached features of any network: few-shot classification without a network of this package.

    x ← ℓ·(φ − c)/‖φ − c‖,   c the mean of some features, ℓ = 6

The centred features take the place of pictures. The network of a head only multiplies them by a factor.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bilevel import learners
from bilevel.errors import BilevelError
from bilevel.learners.base import Learner
from bilevel.learners.classifier import FewShotClassifier
from bilevel.learners.evaluation import FinalScore, choose_and_test
from bilevel.learners.representation import FIRST_LENGTH, SHORTEST
from bilevel.problem import Task

# The learners that need only features of an episode, best known first.
HEADS = (
    *("hyper-representation", "ridge-head", "logistic-head", "svm-head", "proximal-head"),
    *("prototypical", "nearest-centroid"),
)
# How many pictures pass through a network at a time, and the largest size of a file in bytes.
GROUP, MOST_BYTES = 64, 4_000_000_000


class FeatureScale(nn.Module):
    """The representation for cached features: N×F×1×1 → N×F, times a factor that begins at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        return features.flatten(1) * self.log_scale.exp()


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features N×F of pictures, and optionally their labels.

    >>> cached = CachedFeatures.of(np.eye(4), ["a", "a", "b", "b"])
    >>> len(cached.features), cached.labels
    (4, ('a', 'a', 'b', 'b'))
    """

    features: Tensor
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, features: Any, labels: Any = None, name: str = "The features") -> CachedFeatures:
        """From arrays. It raises an error unless they are finite numbers N×F with one label per row."""
        table = np.asarray(features)
        if table.ndim != 2 or not table.size or not np.issubdtype(table.dtype, np.floating):
            raise BilevelError(f"{name} are {table.dtype}{list(table.shape)}; pass floating-point numbers N×F.")
        if not np.isfinite(table).all():
            raise BilevelError(f"{name} hold values that are not finite (NaN or infinity).")
        given = None if labels is None else tuple(str(label) for label in np.asarray(labels).tolist())
        if given is not None and len(given) != len(table):
            raise BilevelError(f"{name} have {len(table)} rows and {len(given)} labels; pass one label per row.")
        return cls(torch.tensor(table, dtype=torch.get_default_dtype()), given)

    @classmethod
    def load(cls, path: str | Path) -> CachedFeatures:
        """From an .npz file with `features` N×F and possibly `labels`. Pickled objects are refused."""
        file = Path(path)
        try:
            if not file.is_file() or file.stat().st_size > MOST_BYTES:
                raise BilevelError(f"{file} must be a file of at most {MOST_BYTES / 1e9:.0f} GB.")
            # Opened here, because numpy does not close a file that is not an archive.
            with file.open("rb") as opened:
                # Without this check numpy would take the file for a pickle, and advise to unpickle it.
                if opened.read(2) != b"PK":
                    raise BilevelError(f"{file} is not an .npz archive; write np.savez(path, features=…, labels=…).")
                opened.seek(0)
                arrays = np.load(opened, allow_pickle=False)
                names = list(arrays)
                archive = zipfile.ZipFile(opened)
                # An entry whose name is damaged would seem to be absent. Opening it compares its two names.
                for member in archive.infolist():
                    archive.open(member).close()
                parts = {name: arrays[name] for name in ("features", "labels") if name in names}
        except (OSError, ValueError, EOFError, MemoryError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, BilevelError):
                raise
            raise BilevelError(f"{file} cannot be read as .npz: {error}.") from error
        if "features" not in parts:
            raise BilevelError(
                f"{file} has no array `features`; write it with np.savez(path, features=…, labels=…). It has "
                f"{', '.join(names) or 'no named arrays'}."
            )
        return cls.of(parts["features"], parts.get("labels"), f"The features in {file}")

    @classmethod
    @torch.no_grad()
    def computed(cls, module: nn.Module, images: Tensor, labels: Any = None) -> CachedFeatures:
        """The outputs of a network in evaluation mode, flattened to N×F. The mode of the module is restored."""
        before = {part: part.training for part in module.modules()}
        like = next(module.parameters(), torch.zeros(()))
        module.eval()
        try:
            parts = [module(group.to(like)).flatten(1).cpu() for group in torch.split(images, GROUP)]
        finally:
            for part, training in before.items():
                part.training = training
        return cls.of(torch.cat(parts).float().numpy(), labels)

    def save(self, path: str | Path) -> None:
        """Write the .npz file that `load` reads."""
        parts: dict[str, Any] = {"features": self.features.numpy()}
        if self.labels is not None:
            parts["labels"] = np.array(self.labels)
        np.savez_compressed(path, **parts)

    @property
    def known(self) -> tuple[str, ...]:
        if self.labels is None:
            raise BilevelError("The features have no labels; write them with np.savez(path, features=…, labels=…).")
        return self.labels

    def centred(self, centre: Tensor) -> Tensor:
        """The features minus a centre, scaled to one length, in the shape of pictures, N×F×1×1."""
        moved = self.features - centre
        length = torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp(min=SHORTEST)
        return (FIRST_LENGTH * moved / length)[:, :, None, None]


@dataclass(frozen=True, eq=False)
class FeatureEpisodes:
    """Episodes of cached features; episode i is a function of the seed and i."""

    images: Tensor
    rows: tuple[NDArray[np.int64], ...]
    ways: int
    shots: int
    queries: int
    seed: int

    def batch(self, numbers: range) -> Task:
        """Stacked episodes."""
        drawn = np.stack([self._draw(number) for number in numbers])
        images = self.images[torch.from_numpy(drawn)]
        labels = torch.arange(self.ways)[None, :, None].expand(drawn.shape)
        support, query = (
            tuple(part[:, :, rows].flatten(1, 2).contiguous() for part in (images, labels))
            for rows in (slice(None, self.shots), slice(self.shots, None))
        )
        return Task(support, query)

    def _draw(self, number: int) -> NDArray[np.int64]:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, number], np.uint64)))
        chosen = random.choice(len(self.rows), self.ways, replace=False)
        count = self.shots + self.queries
        return np.stack([random.choice(self.rows[k], count, replace=False) for k in chosen])


def head(name: str, features: int, **options: Any) -> Learner:
    """The learner of that name for this number of features."""
    if name not in HEADS:
        raise BilevelError(f"{name} cannot be used on cached features. Pass one of the heads {', '.join(HEADS)}.")
    if name == "hyper-representation":  # `step_bound` adapts the step size to the features
        options = {"inner_lr": 1.0, "step_bound": 1.0, "steps": 20, **options}
    return learners.get(name)(FeatureScale(), (features, 1, 1), **{"batch_norm": "support", **options})


def adapt(cached: CachedFeatures, name: str = "ridge-head", **options: Any) -> FeatureClassifier:
    """Train a head on labelled features; return the classifier of new features."""
    centre = cached.features.mean(0)
    learner = head(name, cached.features.shape[1], **options)
    return FeatureClassifier(learner.adapt(cached.centred(centre), cached.known), centre)


@dataclass(frozen=True, eq=False)
class FeatureClassifier:
    """A head that was adapted to labelled features."""

    classifier: FewShotClassifier
    centre: Tensor

    def predict_proba(self, cached: CachedFeatures) -> Tensor:
        if cached.features.shape[1] != len(self.centre):
            raise BilevelError(
                f"The labelled features have {len(self.centre)} columns and the new ones {cached.features.shape[1]}; "
                "compute both with the same network."
            )
        return self.classifier.predict_proba(cached.centred(self.centre))

    def predict(self, cached: CachedFeatures) -> list[str]:
        names = [str(name) for name in self.classifier.classes]
        return [names[k] for k in self.predict_proba(cached).argmax(1).tolist()]


@dataclass(frozen=True)
class FeatureTrial:
    """A comparison of heads on episodes of cached features.

    Half of the classes are used to compute the centre and to choose T, the other half to test.
    """

    ways: int = 5
    shots: int = 1
    queries: int = 15
    episodes: int = 600
    seed: int = 0

    def compare(self, cached: CachedFeatures, names: tuple[str, ...] = HEADS) -> dict[str, FinalScore]:
        """The scores of the heads, all on the same episodes."""
        labels = np.array(cached.known)
        rows = [np.flatnonzero(labels == name) for name in sorted(set(labels.tolist()))]
        rows = [of_class for of_class in rows if len(of_class) >= self.shots + self.queries]
        if len(rows) < 2 * self.ways:
            raise BilevelError(
                f"{self.ways}-way episodes need {2 * self.ways} classes with {self.shots + self.queries} rows each, "
                f"half of them to choose the centre and T; there are {len(rows)}. Pass fewer ways, shots or queries."
            )
        order = np.random.default_rng(self.seed).permutation(len(rows))
        chosen, tested = ([rows[k] for k in half] for half in np.array_split(order, 2))
        images = cached.centred(cached.features[torch.from_numpy(np.concatenate(chosen))].mean(0))
        val = FeatureEpisodes(images, tuple(chosen), self.ways, self.shots, self.queries, 2 * self.seed)
        test = replace(val, rows=tuple(tested), seed=2 * self.seed + 1)
        scores: dict[str, FinalScore] = {}
        for name in names:
            learner: Any = head(name, cached.features.shape[1])
            scores[name] = choose_and_test(learner, val, test, self.episodes, range(1, learner.steps + 1))  # type: ignore[arg-type]
        return scores
