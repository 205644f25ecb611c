"""Heads on features that were computed before, by any network: few-shot classification without a network of ours.

    x ← ℓ·(φ − c)/‖φ − c‖,   c the mean of some features, ℓ = 6

The centred features take the place of pictures, and every head works on them as it does on those of its own network.
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
from bilevel.learners.evaluation import Final, choose_and_test
from bilevel.learners.linear_head import FIRST_LENGTH
from bilevel.learners.representation import SHORTEST
from bilevel.problem import Task

# The learners whose episodes need features only, best known first.
HEADS = (
    *("hyper-representation", "ridge-head", "logistic-head", "svm-head", "proximal-head"),
    *("prototypical", "nearest-centroid"),
)
# Pictures that pass through a network at a time, and most bytes of a file.
GROUP, MOST_BYTES = 64, 4_000_000_000


class FeatureScale(nn.Module):
    """N×F×1×1 → N×F, times a factor that begins at 1: the representation of features that are there already."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        return features.flatten(1) * self.log_scale.exp()


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features N×F of pictures, and their labels if they are known.

    >>> cached = CachedFeatures.of(np.eye(4), ["a", "a", "b", "b"])
    >>> len(cached.features), cached.labels
    (4, ('a', 'a', 'b', 'b'))
    """

    features: Tensor
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, features: Any, labels: Any = None, name: str = "The features") -> CachedFeatures:
        """From arrays; what is no table of finite numbers with one label per row is an error."""
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
        """From an .npz file with `features` N×F and possibly `labels`; nothing in it is unpickled."""
        file = Path(path)
        try:
            if not file.is_file() or file.stat().st_size > MOST_BYTES:
                raise BilevelError(f"{file} is no file of at most {MOST_BYTES / 1e9:.0f} GB.")
            # Opened here, because numpy leaves a file open that is no archive.
            with file.open("rb") as opened:
                found = np.load(opened, allow_pickle=False)
                if not isinstance(found, np.lib.npyio.NpzFile):
                    raise BilevelError(f"{file} holds one array; write np.savez(path, features=…, labels=…).")
                names = list(found)
                archive = zipfile.ZipFile(opened)
                for member in archive.infolist():  # also those that are not read: one may be damaged labels
                    archive.open(member).close()
                parts = {name: found[name] for name in ("features", "labels") if name in names}
        except (OSError, ValueError, EOFError, MemoryError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, BilevelError):
                raise
            raise BilevelError(f"{file} cannot be read as .npz: {error}.") from error
        if "features" not in parts:
            raise BilevelError(
                f"{file} has no array `features`; write it with np.savez(path, features=…, labels=…). It has "
                f"{', '.join(names) or 'no arrays by name'}."
            )
        return cls.of(parts["features"], parts.get("labels"), f"The features in {file}")

    @classmethod
    @torch.no_grad()
    def computed(cls, module: nn.Module, images: Tensor, labels: Any = None) -> CachedFeatures:
        """By any network, in evaluation mode; what it returns is flattened to N×F. The module is left as it was."""
        before = {part: part.training for part in module.modules()}
        like = next(module.parameters(), torch.zeros(()))
        module.eval()
        try:
            parts = [module(some.to(like)).flatten(1).cpu() for some in torch.split(images, GROUP)]
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
        """The features less a centre and of one length, in the shape of pictures, N×F×1×1."""
        moved = self.features - centre
        length = torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp(min=SHORTEST)
        return (FIRST_LENGTH * moved / length)[:, :, None, None]


@dataclass(frozen=True, eq=False)
class FeatureEpisodes:
    """Episodes of some classes; episode i is a function of the seed and i."""

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
        known, asked = slice(None, self.shots), slice(self.shots, None)
        support, query = (
            tuple(part[:, :, some].flatten(1, 2).contiguous() for part in (images, labels)) for some in (known, asked)
        )
        return Task(support, query)

    def _draw(self, number: int) -> NDArray[np.int64]:
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed, number], np.uint64)))
        chosen = random.choice(len(self.rows), self.ways, replace=False)
        each = self.shots + self.queries
        return np.stack([random.choice(self.rows[k], each, replace=False) for k in chosen])


def head(name: str, features: int, **options: Any) -> Learner:
    """The learner of that name on so many features."""
    if name not in HEADS:
        raise BilevelError(f"{name} cannot work on cached features; the heads are {', '.join(HEADS)}.")
    if name == "hyper-representation":  # its step is kept below the curvature, which depends on the features
        options = {"inner_lr": 1.0, "step_bound": 1.0, "steps": 20, **options}
    return learners.get(name)(FeatureScale(), (features, 1, 1), **{"batch_norm": "support", **options})


def adapt(cached: CachedFeatures, name: str = "ridge-head", **options: Any) -> FeatureClassifier:
    """A classifier of other features from labelled ones: one head, solved or stepped for these examples."""
    centre = cached.features.mean(0)
    learner = head(name, cached.features.shape[1], **options)
    return FeatureClassifier(learner.adapt(cached.centred(centre), cached.known), centre)


@dataclass(frozen=True, eq=False)
class FeatureClassifier:
    """A head on cached features, adapted."""

    classifier: FewShotClassifier
    centre: Tensor

    def predict_proba(self, cached: CachedFeatures) -> Tensor:
        if cached.features.shape[1] != len(self.centre):
            raise BilevelError(
                f"The labelled features have {len(self.centre)} columns and the new ones {cached.features.shape[1]}; "
                "compute both with one network."
            )
        return self.classifier.predict_proba(cached.centred(self.centre))

    def predict(self, cached: CachedFeatures) -> list[str]:
        names = [str(name) for name in self.classifier.classes]
        return [names[k] for k in self.predict_proba(cached).argmax(1).tolist()]


@dataclass(frozen=True)
class FeatureTrial:
    """How episodes are drawn from cached features: half of the classes choose the centre and T, the others test."""

    ways: int = 5
    shots: int = 1
    queries: int = 15
    episodes: int = 600
    seed: int = 0

    def compare(self, cached: CachedFeatures, names: tuple[str, ...] = HEADS) -> dict[str, Final]:
        """The scores of heads on the same episodes."""
        labels = np.array(cached.known)
        rows = [np.flatnonzero(labels == name) for name in sorted(set(labels.tolist()))]
        rows = [some for some in rows if len(some) >= self.shots + self.queries]
        if len(rows) < 2 * self.ways:
            raise BilevelError(
                f"{self.ways}-way episodes need {2 * self.ways} classes with {self.shots + self.queries} rows, half of "
                f"them to choose the centre and T; there are {len(rows)}. Pass fewer ways, shots or queries."
            )
        order = np.random.default_rng(self.seed).permutation(len(rows))
        chosen, tested = ([rows[k] for k in some] for some in np.array_split(order, 2))
        images = cached.centred(cached.features[torch.from_numpy(np.concatenate(chosen))].mean(0))
        val = FeatureEpisodes(images, tuple(chosen), self.ways, self.shots, self.queries, 2 * self.seed)
        test = replace(val, rows=tuple(tested), seed=2 * self.seed + 1)
        scores: dict[str, Final] = {}
        for name in names:
            learner: Any = head(name, cached.features.shape[1])
            scores[name] = choose_and_test(learner, val, test, self.episodes, range(1, learner.steps + 1))  # type: ignore[arg-type]
        return scores
