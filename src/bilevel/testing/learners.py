"""The battery that every few-shot learner passes."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel import learners
from bilevel.data import ImageDataset
from bilevel.errors import BilevelError
from bilevel.learners.base import Learner
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.training import FewShotTraining
from bilevel.problem import Task
from bilevel.testing.differences import directions_in_each_leaf, slope_along

SHAPE = (1, 12, 12)
CLASSES = 24
# Scores that differ by less are equal up to rounding, in float64.
ROUNDING = 1e-8


def check_learner(learner: type[Learner] | Learner, *, tolerance: float = 1e-5) -> None:
    """Raise an `AssertionError` that says what is wrong with a learner.

    It checks

    - the hypergradient against central differences in float64;
    - that `adapt` gives the accuracies of validation, and the value of the training objective if that is the
      cross-entropy (`trains_on_cross_entropy`);
    - that saving and loading, and stopping and resuming, change nothing, bit for bit;
    - that the order of the images and the numbers of the classes do not matter;
    - that any number of ways and shots, also a different one for each class, works or is refused by `check_episode`;
    - that the learner is found by its name, and a learner of the package in the file of that name.

    Args:
        learner: a class, which is built with its defaults and a small network, or an instance for images 1×12×12.
        tolerance: allowed relative error of slopes. Inner problems that are solved to a tolerance need a larger one.
    """
    with _double_precision():
        built = small(learner) if inspect.isclass(learner) else copy.deepcopy(learner)
        assert isinstance(built, Learner), f"{learner!r} is no Learner"
        _check_definition(built)
        _check_hypergradient(built, tolerance)
        _check_adapt(built)
        _check_objective(built)
        _check_order(built)
        _check_classes(built)
        _check_shapes(built)
        _check_unbalanced(built)
        _check_files(built)
        if built.trains:
            _check_training(built)


def small(kind: type[Learner], seed: int = 0, **options: Any) -> Learner:
    """The learner with a network that is small enough for differences."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Flatten()
        )
    takes_network = "network" in inspect.signature(kind.Options).parameters
    return kind(module if takes_network else None, SHAPE, seed=seed, **options)


def episodes(count: int = 2, ways: int = 3, shots: int = 2, queries: int = 4, seed: int = 1) -> Task:
    """Stacked episodes of noisy patterns, in which the classes differ."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(count, ways, 1, *SHAPE, generator=generator)

    def images(each: int) -> tuple[Tensor, Tensor]:
        noise = 0.5 * torch.rand(count, ways, each, *SHAPE, generator=generator)
        labels = torch.arange(ways).repeat_interleave(each).expand(count, -1).clone()
        return (patterns + noise).flatten(1, 2), labels

    return Task(images(shots), images(queries))


@contextmanager
def _double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


def _ways(learner: Learner, wanted: int = 3) -> int:
    """A number of classes that the learner takes."""
    for ways in (wanted, *range(2, 21)):
        try:
            learner.check_episode(ways, 2)
            return ways
        except BilevelError:
            continue
    raise AssertionError(f"{learner.name} refuses all episodes with 2 to 20 classes and 2 shots")


def _check_definition(learner: Learner) -> None:
    kind = type(learner)
    assert inspect.getdoc(kind), f"{kind.__name__} has no docstring; its first line is shown by `bilevel list learners`"
    module = inspect.getmodule(kind)
    file = Path(getattr(module, "__file__", None) or "")
    if kind.__module__.startswith("bilevel.learners.catalogue."):
        expected = learner.name.replace("-", "_") + ".py"
        assert file.name == expected, (
            f"{kind.__name__} is in {file.name}; a learner's file is named like it, {expected}"
        )
    assert learners.get(learner.name) is kind, (
        f"the name {learner.name} belongs to another class, so a saved {kind.__name__} could not be loaded; rename it"
    )


def _check_hypergradient(learner: Learner, tolerance: float) -> None:
    if not learner.trains:
        return
    batch: Any = episodes(ways=_ways(learner))
    if not learner.episodic:
        settings, data = _settings(learner), _data()
        learner = type(learner).for_training(settings, data, _module(learner))
        batch = learner.stream(settings, data).draw(range(8))
    value, grads = learner.hypergradient(batch)
    assert grads.keys() == learner.lam.keys(), (
        f"hypergradient returns gradients of {sorted(grads)}, and λ has {sorted(learner.lam)}"
    )
    wrong = [name for name, grad in grads.items() if grad.shape != learner.lam[name].shape]
    assert not wrong, f"the gradient has another shape than λ in {', '.join(wrong)}"
    assert all(bool(grad.isfinite().all()) for grad in grads.values()), "the hypergradient is not finite"
    assert any(bool(grad.any()) for grad in grads.values()), "the hypergradient is zero"
    again, repeated = learner.hypergradient(batch)
    same = torch.equal(value, again) and all(torch.equal(grads[name], repeated[name]) for name in grads)
    assert same, "a second call on the same episodes gives another hypergradient; it must be a function of λ and them"
    if not learner.exact:
        return

    def at(lam: dict[str, Tensor]) -> Tensor:
        with learner.at(lam):
            return learner.hypergradient(batch)[0]

    scale = max(float(grad.norm()) for grad in grads.values())
    for direction in directions_in_each_leaf(learner.lam):
        name = next(key for key, value in direction.items() if bool(value.any()))
        found = float((grads[name] * direction[name]).sum())
        for width in (1e-4, 1e-6):  # the second one where the first crosses a kink of |·|, a ReLU or a maximum
            expected = slope_along(at, learner.lam, direction, width)
            error = abs(found - expected) / max(scale, 1e-12)
            if error <= tolerance:
                break
        assert error <= tolerance, (
            f"along a direction of {name} the hypergradient has the slope {found:.8g}, and differences give "
            f"{expected:.8g}; a first-order learner says exact = False"
        )


def _check_adapt(learner: Learner) -> None:
    """The accuracy of `adapt`, which users call, is the one that training reports."""
    batch = episodes(ways=_ways(learner), seed=3)
    scores = learner.accuracies(batch)
    columns = learner.steps if learner.has_steps else 1
    assert scores.shape == (2, columns), (
        f"accuracies are {list(scores.shape)} for 2 episodes and T = {columns}; they must be episodes × steps"
    )
    for i in range(2):
        (support, labels), (queries, answers) = (tuple(x[i] for x in part) for part in (batch.train, batch.val))
        classifier = learner.adapt(support, labels.tolist())
        right = [label == true for label, true in zip(classifier.predict(queries), answers.tolist(), strict=True)]
        used, reported = sum(right) / len(right), float(scores[i, -1])
        assert abs(used - reported) < 1e-9, (
            f"adapt(…).predict is right in {used:.4f} of an episode's queries, and accuracies says {reported:.4f}"
        )
        sums = classifier.predict_proba(queries).sum(1)
        assert torch.allclose(sums, torch.ones(len(queries))), "the probabilities of a query do not sum to 1"


def _check_objective(learner: Learner) -> None:
    """The value that training minimises is the loss of `adapt` on the queries."""
    if not (learner.trains and learner.episodic and learner.trains_on_cross_entropy):
        return
    if learner.batch_norm == "running":  # training uses the statistics of its batch, and `adapt` running averages
        return
    batch = episodes(ways=_ways(learner), seed=3)
    losses = []
    for support, labels, queries, answers in zip(*batch.train, *batch.val, strict=True):
        losses.append(F.cross_entropy(learner.adapt(support, labels.tolist()).scores(queries), answers))
    trained, used = float(learner.hypergradient(batch)[0]), float(torch.stack(losses).mean())
    assert abs(trained - used) <= ROUNDING * max(1.0, abs(used)), (
        f"the training objective is {trained:.8g}, and the cross-entropy of adapt(…).scores on the same queries "
        f"{used:.8g}; a learner with another objective says trains_on_cross_entropy = False"
    )


def _check_order(learner: Learner) -> None:
    (support, labels), (queries, _) = _one(learner)
    expected = learner.adapt(support, labels.tolist())
    order = torch.randperm(len(support), generator=torch.Generator().manual_seed(4))
    moved = learner.adapt(support[order], labels[order].tolist())
    columns = [moved.classes.index(label) for label in expected.classes]
    error = float((moved.predict_proba(queries)[:, columns] - expected.predict_proba(queries)).abs().max())
    if learner.symmetric:  # otherwise the numbers of the classes, which depend on the order, matter too
        assert error <= ROUNDING, f"another order of the support images changes the probabilities by {error:.2g}"
    flipped = torch.arange(len(queries)).flip(0)
    error = float((expected.predict_proba(queries[flipped]) - expected.predict_proba(queries)[flipped]).abs().max())
    assert error <= ROUNDING, f"another order of the queries changes their probabilities by {error:.2g}"


def _check_classes(learner: Learner) -> None:
    """Permuting the numbers of the classes in an episode must only permute the probabilities."""
    if not learner.symmetric:
        return
    (support, labels), (queries, _) = _one(learner)
    ways = int(labels.max()) + 1
    names = torch.arange(ways).roll(1)
    with torch.no_grad():
        plain = learner.adapted(support, labels, ways, learner.steps)(queries)
        renamed = learner.adapted(support, names[labels], ways, learner.steps)(queries)
    error = float((renamed.softmax(1)[:, names] - plain.softmax(1)).abs().max())
    assert error <= ROUNDING, (
        f"renaming the classes changes the probabilities by {error:.2g}; a learner to which the numbers matter says "
        "symmetric = False"
    )


def _check_shapes(learner: Learner) -> None:
    for ways, shots in ((2, 1), (5, 3), (7, 1)):
        batch = episodes(1, ways, shots, queries=2)
        (support, labels) = (x[0] for x in batch.train)
        try:
            learner.check_episode(ways, shots)
        except BilevelError:
            try:
                learner.adapt(support, labels.tolist())
            except BilevelError:
                continue
            raise AssertionError(f"check_episode refuses {ways} ways and {shots} shots, but adapt does not") from None
        try:
            found = learner.accuracies(batch)
            if learner.trains and learner.episodic:
                learner.hypergradient(batch)
            shape = learner.adapt(support, labels.tolist()).predict_proba(batch.val[0][0]).shape
        except Exception as error:
            raise AssertionError(
                f"{ways} ways and {shots} shots fail with {type(error).__name__}: {error}. A learner with limits "
                "refuses such episodes in check_episode"
            ) from error
        assert bool(found.isfinite().all()) and shape == (2 * ways, ways), f"{ways} ways give {shape}"


def _check_unbalanced(learner: Learner) -> None:
    """`adapt` takes classes with different numbers of images."""
    ways = _ways(learner)
    batch = episodes(1, ways, shots=3)
    (support, labels), queries = (x[0, 1:] for x in batch.train), batch.val[0][0]
    try:
        probabilities = learner.adapt(support, labels.tolist()).predict_proba(queries)
    except Exception as error:
        raise AssertionError(
            f"adapt fails if a class has 2 images and the others 3, with {type(error).__name__}: {error}"
        ) from error
    assert probabilities.shape == (len(queries), ways) and bool(probabilities.isfinite().all()), (
        f"if a class has 2 images and the others 3, adapt(…).predict_proba gives {probabilities}"
    )


def _check_files(learner: Learner) -> None:
    (support, labels), (queries, _) = _one(learner)
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder) / "model")
        again = type(learner).load(Path(folder) / "model", _module(learner))
    assert again.settings() == learner.settings(), f"{learner.settings()} was saved, and {again.settings()} loaded"
    one, two = (known.adapt(support, labels.tolist()).predict_proba(queries) for known in (learner, again))
    assert torch.equal(one, two), "the probabilities after save and load are different; keep all state in λ or options"


def _check_training(learner: Learner) -> None:
    """Two hyperiterations, a checkpoint and two more give the state and the weights of four without a break."""
    settings, data = _settings(learner), _data()

    def job() -> FewShotTraining:
        if learner.episodic:
            return FewShotTraining(settings, data, learner=copy.deepcopy(learner))
        return FewShotTraining(settings, data, learner=type(learner).for_training(settings, data, _module(learner)))

    whole, first, second = job(), job(), job()
    before = {name: leaf.clone() for name, leaf in whole.learner.lam.items()}
    for k in (1, 2, 3, 4):
        whole.step(k)
    changed = [name for name, leaf in whole.learner.lam.items() if not torch.equal(leaf, before[name])]
    assert changed, "four hyperiterations of training do not change λ"
    for k in (1, 2):
        first.step(k)
    second.restore({name: value.clone() for name, value in first.state().items()})
    for k in (3, 4):
        second.step(k)
    one, two = whole.state(), second.state()
    wrong = [name for name in one if not torch.equal(one[name], two[name])]
    assert not wrong, (
        f"training that resumes from a checkpoint differs in {', '.join(wrong[:3])}; keep what training changes in λ"
    )
    assert whole.validate(4) == second.validate(4), "validation after resuming from a checkpoint gives another score"


def _settings(learner: Learner) -> TrainingSettings:
    given = {f: getattr(learner.options, f) for f in ("steps", "inner_lr", "batch_norm") if hasattr(learner.options, f)}
    small: dict[str, Any] = {"shots": 1, "queries": 2, "meta_batch": 2, "images": 8, "validation_episodes": 2}
    return TrainingSettings(learner=learner.name, dataset="patterns", ways=_ways(learner), **small, **given)


def _one(learner: Learner) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    batch = episodes(1, _ways(learner), seed=5)
    (support, labels), (queries, answers) = batch.train, batch.val
    return (support[0], labels[0]), (queries[0], answers[0])


def _module(learner: Learner) -> nn.Module | None:
    return copy.deepcopy(learner.module) if hasattr(learner.options, "network") else None


def _data() -> ImageDataset:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3 * CLASSES), 5)
    patterns = rng.integers(0, 256, (3 * CLASSES, *SHAPE[1:], 1))
    images = np.clip(patterns[labels] + rng.integers(-60, 60, (len(labels), *SHAPE[1:], 1)), 0, 255).astype(np.uint8)
    splits = {name: range(i * CLASSES, (i + 1) * CLASSES) for i, name in enumerate(("train", "val", "test"))}
    names = tuple(f"pattern {i}" for i in range(3 * CLASSES))
    return ImageDataset("patterns", images, labels, names, splits, fingerprint="patterns")
