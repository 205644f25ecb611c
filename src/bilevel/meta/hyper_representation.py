"""Hyper-representations (Sections 2.2 and 4): λ is the representation, w a linear classifier for every episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bilevel import trees
from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient
from bilevel.meta.class_loss import ClassLoss
from bilevel.meta.classifier import FewShotClassifier
from bilevel.meta.representation import CENTRE, LENGTH, Representation
from bilevel.meta.saved_learner import SavedLearner
from bilevel.methods.base import Method
from bilevel.methods.dual_descent import DualDescent
from bilevel.methods.reverse import Reverse
from bilevel.models import build, heads
from bilevel.models._allocator import keep_freed_memory
from bilevel.models.batch_norm import MODES, Mode
from bilevel.problem import Problem, Task
from bilevel.structures.linear_classifiers import LinearClassifiers

Batch = tuple[Tensor, Tensor]
# Features of one length begin with this one; learning moves it.
FIRST_LENGTH = 6.0


class HyperRepresentation(SavedLearner):
    """h_λ learned such that T gradient steps from zero on a few examples make a good classifier of its features.

    For an episode with support set S and query set Q

        L(w, λ) = mean over S of cross-entropy(h_λ(x)ᵀw, y) + l2/2 ‖w‖²,   w_0 = 0,   T steps of gradient descent
        E(w, λ) = mean over Q of cross-entropy(h_λ(x)ᵀw, y) [+ class_weight · class_loss(λ, h_λ(Q))]

    and f_T is the mean of E(w_T, λ) over a meta-batch of episodes (Algorithm 1). The features are computed and
    differentiated once (`Problem.encode`), and the classifiers of several episodes take their steps together.

    Args:
        module: h, from images N×C×H×W to features N×F, or the name of one of `bilevel.models`. It is copied. λ is all
            its parameters. Its batch norms follow `batch_norm`; everything else runs as in evaluation, so dropout is
            off.
        shape: (C, H, W) of the images.
        steps: T.
        inner_lr: the step size of the inner gradient descent.
        step_bound: keep the step at or below this over ν, the curvature of L at w_0, by scaling an episode's features
            (see `scale`). Below 2 the steps converge. 0, the paper's way, does nothing.
        l2: makes L strongly convex, as the theory asks; the paper's experiments have 0.
        batch_norm: "episode", "support" or "running"; see `bilevel.models.batch_norm.MEANING`.
        normalise: whether h's features are centred and of one length, exp(ℓ)·(φ − c)/‖φ − c‖; c and ℓ are then part
            of λ, and `centre` starts c at the mean of some images' features.
        last_relu: whether a network that is given by its name ends with a ReLU.
        class_loss: the loss of one classifier over all classes of meta-training, whose leaves are then part of λ.
        class_weight: how much of it is added to E; the queries' classes are then a third part of an episode's `val`.
        chunk: episodes whose features are in memory at once.
        seed: of the weights, when the module is a name.
        method: how ∇f_T is computed; by default `DualDescent()` where examples are fewer than features, else
            `Reverse()`.

    >>> learner = HyperRepresentation("omniglot-net", shape=(1, 28, 28))
    >>> pictures = torch.rand(6, 1, 28, 28, dtype=torch.get_default_dtype())
    >>> classifier = learner.adapt(pictures[:4], ["a", "b", "a", "b"])
    >>> set(classifier.predict(pictures[4:])) <= {"a", "b"}
    True
    """

    def __init__(
        self,
        module: nn.Module | str,
        shape: tuple[int, int, int],
        *,
        seed: int = 0,
        steps: int = 5,
        inner_lr: float = 0.1,
        step_bound: float = 0.0,
        l2: float = 0.0,
        batch_norm: Mode = "episode",
        normalise: bool = False,
        last_relu: bool = True,
        class_loss: ClassLoss | None = None,
        class_weight: float = 0.0,
        chunk: int = 4,
        method: Method | None = None,
    ) -> None:
        if batch_norm not in MODES:
            raise BilevelError(f"batch_norm={batch_norm!r} is unknown; pass one of {', '.join(map(repr, MODES))}.")
        if not all(isinstance(number, int) and number >= 1 for number in (steps, chunk)):
            raise BilevelError(f"steps={steps} and chunk={chunk} must be whole numbers ≥ 1.")
        if len(shape) != 3:
            raise BilevelError(f"shape={shape} must be (channels, height, width), (1, 28, 28) for example.")
        if not inner_lr > 0 or not l2 >= 0 or not step_bound >= 0:
            raise BilevelError(f"inner_lr={inner_lr} must be positive, l2={l2} and step_bound={step_bound} at least 0.")
        if not class_weight >= 0 or (class_weight and class_loss is None):
            raise BilevelError(f"class_weight={class_weight} must be at least 0, and above 0 it needs a class_loss.")
        self.network, self.last_relu = (module if isinstance(module, str) else None), last_relu
        module = build(module, shape[0], seed, last_relu) if isinstance(module, str) else module
        self.representation = Representation(module, batch_norm, normalise)
        self.shape, self.steps, self.chunk = tuple(shape), steps, chunk
        self.inner_lr, self.step_bound, self.l2 = inner_lr, step_bound, l2
        self.method = method
        self.lam = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        if not self.lam:
            raise BilevelError("The module has no parameters, so there is no representation to learn.")
        self.features = self._count_features()
        like = next(iter(self.lam.values()))
        if normalise:
            self.lam[CENTRE] = like.new_zeros(self.features - 1)
            self.lam[LENGTH] = like.new_tensor(FIRST_LENGTH).log()
        self.class_loss, self.class_weight = class_loss, class_weight
        if class_loss is not None:
            self.lam |= {name: leaf.to(like) for name, leaf in class_loss.new(self.features - 1, seed).items()}
        self._problems: dict[tuple[int, int], Problem] = {}

    # ------------------------------------------------------------------------------------------- the problem

    @property
    def dynamics(self) -> GradientDescent:
        return GradientDescent(self.inner_lr)

    def represent(self, lam: dict[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images, with the constant feature of the bias at the end."""
        return self.representation.here().features(lam, images)

    def represent_sets(self, lam: dict[str, Tensor], support: Tensor, query: Tensor, training: bool) -> Batch:
        """The features of a support and a query set; batch norm decides what one may know of the other."""
        return self.representation.here().sets(lam, support, query, training=training)

    def scale(self, features: Tensor, ways: int) -> Tensor:
        """The factor on every episode's features that keeps the inner step short enough for them.

        Gradient descent converges with steps below 2/ν only, and ν, the curvature at w_0, grows with the features. A
        factor s on the features is a factor s² on the step, so this is the step min(inner_lr, step_bound/ν), with a ν
        of each episode's own. It is part of the representation and differentiated like it: features that grow gain
        nothing.
        """
        if not self.step_bound:
            return features.new_ones(())
        # An L2 term adds to the curvature and does not shrink with the features.
        room = self.step_bound / self.inner_lr - self.l2
        if room <= 0:
            raise BilevelError(
                f"l2={self.l2} alone makes inner_lr={self.inner_lr} longer than step_bound={self.step_bound} over the "
                "curvature; take a smaller step."
            )
        return (room / heads.curvature(features, ways)).clamp(max=1).sqrt()[:, None, None]

    def represent_episodes(
        self, lam: dict[str, Tensor], images: Tensor, queries: Tensor, ways: int, *, training: bool
    ) -> Batch:
        """The features of stacked episodes, with their factors."""
        support, query = self.representation.here().episodes(lam, images, queries, training=training)
        if not self.step_bound:
            return support, query
        scale = self.scale(support, ways)
        return support * scale, query * scale

    def problem(self, episodes: int, ways: int) -> Problem:
        """The bilevel problem of so many episodes, stacked: one task whose w holds a classifier for each."""
        if (episodes, ways) not in self._problems:  # kept, because a problem remembers that it has been checked
            self._problems[episodes, ways] = self._new_problem(episodes, ways)
        return self._problems[episodes, ways]

    def __getstate__(self) -> dict[str, Any]:
        # The problems are functions of this learner; a copy makes its own.
        return {**self.__dict__, "_problems": {}}

    def _new_problem(self, episodes: int, ways: int) -> Problem:

        def encode(lam: dict[str, Tensor], task: Task) -> Task:
            (images, labels), (queries, *answers) = task.train, task.val
            support, query = self.represent_episodes(lam, images, queries, ways, training=True)
            return Task((support, labels), (query, *answers))

        def outer(w: Tensor, lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
            loss = LinearClassifiers()(w, lam, (batch[0], batch[1])) / episodes
            return loss + self._beside(lam, batch[0], batch[2]) if self.class_weight else loss

        def init(lam: dict[str, Tensor]) -> Tensor:
            return heads.zeros(episodes, self.features, ways, like=next(iter(lam.values())))

        return Problem(LinearClassifiers(self.l2), outer, init, encode)

    def _beside(self, lam: Mapping[str, Tensor], features: Tensor, classes: Tensor) -> Tensor:
        """The part of E that knows all classes; the constant feature is not the classifier's."""
        assert self.class_loss is not None
        return self.class_weight * self.class_loss(lam, features[..., :-1], classes)

    # ------------------------------------------------------------------------------------------- learning

    def hypergradient(self, episodes: Task | Sequence[Task]) -> tuple[Tensor, dict[str, Tensor]]:
        """f_T(λ) and ∇f_T(λ), means over the episodes: stacked tensors (`Episodes.batch`) or a list of tasks."""
        keep_freed_memory()
        chunks = self._chunks(episodes)
        if self.class_weight and len(chunks[0].val) < 3:
            raise BilevelError(
                "class_weight > 0 needs the classes of the queries: draw with Episodes(…, with_classes=True), or pass "
                "Task((images, labels), (queries, answers, classes))."
            )
        count, total = sum(len(chunk.train[0]) for chunk in chunks), None
        value = next(iter(self.lam.values())).new_zeros(())
        with closing(self.representation.each(self._of_chunk, chunks)) as results:
            for chunk, (one, grads) in zip(chunks, results, strict=True):
                share = len(chunk.train[0]) / count
                value = value + share * one
                if total is None:
                    total = {name: share * g for name, g in grads.items()}
                else:
                    for name, g in grads.items():
                        total[name].add_(g, alpha=share)
        assert total is not None
        return value, total

    def _here(self, episodes: Task | Sequence[Task]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        device = next(iter(self.lam.values())).device
        task = episodes
        if not isinstance(task, Task):
            task = trees.map(lambda *parts: torch.stack(parts), *task)
        (images, labels), (queries, *answers) = task.train, task.val
        if images.shape[2:] != self.shape or queries.shape[2:] != self.shape:
            wanted = " × ".join(map(str, self.shape))
            raise BilevelError(
                f"The images are {list(images.shape)} and {list(queries.shape)}; this learner takes stacked episodes, "
                f"episodes × images × {wanted}, as Episodes.batch gives them, or a list of tasks."
            )
        return (images.to(device), labels.to(device)), (queries.to(device), *(x.to(device) for x in answers))

    def _chunks(self, episodes: Task | Sequence[Task]) -> list[Task]:
        known, asked = self._here(episodes)
        parts = [list(zip(*(torch.split(x, self.chunk) for x in part), strict=True)) for part in (known, asked)]
        if asked[0] is known[0]:  # one tensor that is both sets stays one
            parts[1] = [(images, *answers) for (images, _), (_, *answers) in zip(*parts, strict=True)]
        return [Task(*pair) for pair in zip(*parts, strict=True)]

    def _of_chunk(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = task.train
        method = self.method
        if method is None:  # with few examples, their span is smaller than the space of features
            method = DualDescent() if images.shape[1] <= self.features else Reverse()
        problem = self.problem(len(images), int(labels.max()) + 1)
        result = hypergradient(problem, self.lam, task, dynamics=self.dynamics, steps=self.steps, method=method)
        return result.value, result.grad

    def adapt(self, images: Any, labels: Any, steps: int | None = None) -> FewShotClassifier:
        """A classifier from a few labelled images, by the T steps that the representation was learned for.

        Args:
            images: floats N×C×H×W in [0, 1], or bytes N×H×W×C.
            labels: one per image, of any kind; as many classes as there are different ones.
            steps: inner steps, if not the learner's own.
        """
        return FewShotClassifier(self, images, labels, steps)

    def accuracies(self, episodes: Task | Sequence[Task], steps: int) -> Tensor:
        """Accuracy on the query set after 1…steps inner steps: episodes × steps."""
        keep_freed_memory()
        return torch.cat(list(self.representation.each(partial(self._accuracies, steps=steps), self._chunks(episodes))))

    @torch.no_grad()
    def _accuracies(self, task: Task, steps: int) -> Tensor:
        (images, labels), (queries, answers, *_) = task.train, task.val
        ways = int(labels.max()) + 1
        support, query = self.represent_episodes(self.lam, images, queries, ways, training=False)
        iterates = self.iterates(support, labels, ways, steps)
        return torch.stack([heads.accuracy(w, query, answers) for w in iterates], 1)

    @torch.no_grad()
    def iterates(self, features: Tensor, labels: Tensor, ways: int, steps: int) -> Any:
        """w_1, w_2, …, w_steps for stacked features."""
        problem = self.problem(len(features), ways)
        w, state = problem.init(self.lam), ()
        for t in range(1, steps + 1):
            w, state = self.dynamics.step(lambda v: problem.inner(v, None, (features, labels)), w, state, t)
            yield w

    def _count_features(self) -> int:
        with torch.no_grad():
            images = next(iter(self.lam.values())).new_zeros((2, *self.shape))
            features = self.representation.raw(self.lam, images)
        if features.ndim != 2:
            raise BilevelError(
                f"The module maps images {list(images.shape)} to {list(features.shape)}; it must return N×F features. "
                "End it with nn.Flatten()."
            )
        return features.shape[1] + 1  # the constant of the bias
