"""Hyper-representations (Sections 2.2 and 4): λ is the representation, w a linear classifier for every episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from bilevel.dynamics.gradient_descent import GradientDescent
from bilevel.engine.method import Method
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient
from bilevel.learners.base import Learner, LearnerOptions, option
from bilevel.learners.bilevel_learner import METHODS, DescentOptions
from bilevel.learners.class_loss import ClassLoss
from bilevel.learners.settings import TrainingSettings, setting
from bilevel.learners.streams import training_classes
from bilevel.methods.dual_descent import DualDescent
from bilevel.methods.reverse import Reverse
from bilevel.models import heads
from bilevel.models.batch_norm import Mode
from bilevel.problem import Problem, Task
from bilevel.structures.linear_classifiers import LinearClassifiers

if TYPE_CHECKING:
    from bilevel.data import ImageDataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class HyperRepresentationOptions(DescentOptions):
    """The settings of `HyperRepresentation`; see there."""

    step_bound: float = setting(0.0, least=0)
    l2: float = setting(0.0, least=0)
    normalise: bool = False


class HyperRepresentation(Learner):
    """Learns h_λ such that T gradient steps from zero on a few examples give a good linear classifier of its features.

    For an episode with support set S and query set Q

        L(w, λ) = mean over S of cross-entropy(h_λ(x)ᵀw, y) + l2/2 ‖w‖²,   w_0 = 0,   T steps of gradient descent
        E(w, λ) = mean over Q of cross-entropy(h_λ(x)ᵀw, y) [+ class_weight · class_loss(λ, h_λ(Q))]

    and f_T is the mean of E(w_T, λ) over a meta-batch of episodes (Algorithm 1). The features are computed and
    differentiated once (`Problem.encode`), and the classifiers of several episodes take their steps together.

    Args:
        module: h, from images N×C×H×W to features N×F, or the name of one of `bilevel.models`. It is copied. All its
            parameters are leaves of λ. It runs in evaluation mode (without dropout), except that its batch norms
            follow `batch_norm`.
        shape: (C, H, W) of the images.
        steps: T.
        inner_lr: the step size of the inner gradient descent.
        step_bound: bound the step size by step_bound/ν, where ν is the curvature of L at w_0, by scaling the features
            of an episode (see `scale`). Steps converge below 2. With 0, as in the paper, there is no bound.
        l2: the weight of ‖w‖²/2. It makes L strongly convex, as the theory assumes. The paper's experiments have 0.
        batch_norm: "episode", "support" or "running"; see `bilevel.models.batch_norm.MEANING`.
        normalise: whether features are centred and scaled to one length, exp(ℓ)·(φ − c)/‖φ − c‖. c and ℓ are then
            leaves of λ, and `centre` sets c to the mean features of some images.
        mirror: whether features are the mean over an image and its mirror image, which takes twice the time.
        last_relu: whether a network that is given by its name ends with a ReLU.
        class_loss: the loss of one classifier over all classes of meta-training, whose weights are then leaves of λ.
        class_weight: the weight of `class_loss` in E. The `val` of an episode then has a third part, the classes of the
            queries.
        chunk: how many episodes have their features in memory at the same time.
        seed: the seed of the weights, if the module is a name.
        method: how ∇f_T is computed; by default `DualDescent()` if there are at most as many examples as
            features, else `Reverse()`.

    >>> learner = HyperRepresentation("omniglot-net", shape=(1, 28, 28))
    >>> pictures = torch.rand(6, 1, 28, 28, dtype=torch.get_default_dtype())
    >>> classifier = learner.adapt(pictures[:4], ["a", "b", "a", "b"])
    >>> set(classifier.predict(pictures[4:])) <= {"a", "b"}
    True
    """

    Options: ClassVar[type[LearnerOptions]] = HyperRepresentationOptions
    strategy: ClassVar[str] = "representation"
    linear: ClassVar[bool] = True
    features_only: ClassVar[bool] = True
    also_uses: ClassVar[frozenset[str]] = frozenset(
        {"method", "global_loss", "classifier", "label_smoothing", "images"}
    )
    inner_lr = option("inner_lr")
    step_bound = option("step_bound")
    l2 = option("l2")
    network = option("network")
    last_relu = option("last_relu")

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
        mirror: bool = False,
        last_relu: bool = True,
        class_loss: ClassLoss | None = None,
        class_weight: float = 0.0,
        chunk: int = 4,
        method: Method | None = None,
    ) -> None:
        if not class_weight >= 0 or (class_weight and class_loss is None):
            raise BilevelError(f"class_weight={class_weight} must be at least 0, and above 0 it needs a class_loss.")
        self.class_loss, self.class_weight, self._seed, self.method = class_loss, class_weight, seed, method
        super().__init__(
            module,
            shape,
            seed=seed,
            steps=steps,
            inner_lr=inner_lr,
            step_bound=step_bound,
            l2=l2,
            batch_norm=batch_norm,
            normalise=normalise,
            mirror=mirror,
            last_relu=last_relu,
            chunk=chunk,
        )

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.method is None or self.method.exact

    @property
    def trains_on_cross_entropy(self) -> bool:  # type: ignore[override]
        return not self.class_weight

    def build(self) -> None:
        if self.class_loss is not None:
            like = next(iter(self.lam.values()))
            leaves = self.class_loss.new(self.features - 1, self._seed)
            self.lam |= {name: leaf.to(like) for name, leaf in leaves.items()}

    @classmethod
    def for_training(cls, settings: Any, data: ImageDataset, module: nn.Module | None = None, **more: Any) -> Self:
        more |= {"class_loss": cls.class_loss_of(settings, data), "class_weight": settings.global_loss}
        return super().for_training(settings, data, module, method=METHODS[settings.method], **more)

    @classmethod
    def class_loss_of(cls, settings: TrainingSettings, data: ImageDataset) -> ClassLoss | None:
        """The loss over all classes of meta-training; None if the training has none."""
        if not settings.global_loss:
            return None
        return ClassLoss(training_classes(settings, data), settings.classifier, settings.label_smoothing)

    # ------------------------------------------------------------------------------------------- the problem

    @property
    def dynamics(self) -> GradientDescent:
        return GradientDescent(self.inner_lr)

    def represent(self, lam: dict[str, Tensor], images: Tensor) -> Tensor:
        """h_λ of images; the last feature is the constant of the bias."""
        return self.representation.of_this_thread().features(lam, images)

    def represent_sets(self, lam: dict[str, Tensor], support: Tensor, query: Tensor, training: bool) -> Batch:
        """The features of a support and a query set. The batch norm mode defines how the sets affect each other."""
        return self.representation.of_this_thread().sets(lam, support, query, training=training)

    def scale(self, features: Tensor, ways: int) -> Tensor:
        """The factor on the features of every episode that keeps the inner step size below step_bound/ν.

        Gradient descent converges only with steps below 2/ν, and ν, the curvature at w_0, grows with the features. A
        factor s on the features has the effect of a factor s² on the step size, so the step size becomes
        min(inner_lr, step_bound/ν), with a ν for each episode. The factor is part of the representation and is
        differentiated with it, so that larger features have no advantage.
        """
        if not self.step_bound:
            return features.new_ones(())
        # The L2 term adds l2 to the curvature, whatever the factor is.
        largest = self.step_bound / self.inner_lr - self.l2
        if largest <= 0:
            raise BilevelError(
                f"inner_lr={self.inner_lr} is larger than step_bound/l2 = {self.step_bound}/{self.l2}, so no factor on "
                "the features can bound the step. Pass a smaller inner_lr or l2, or a larger step_bound."
            )
        return (largest / heads.curvature(features, ways)).clamp(max=1).sqrt()[:, None, None]

    def represent_episodes(
        self, lam: dict[str, Tensor], images: Tensor, queries: Tensor, ways: int, *, training: bool
    ) -> Batch:
        """The features of stacked episodes, multiplied by `scale`."""
        support, query = self.representation.of_this_thread().episodes(lam, images, queries, training=training)
        if not self.step_bound:
            return support, query
        scale = self.scale(support, ways)
        return support * scale, query * scale

    def problem(self, episodes: int, ways: int) -> Problem:
        """The bilevel problem of stacked episodes: one task, whose w holds a classifier for each episode."""
        return self.kept_problem((episodes, ways), lambda: self._new_problem(episodes, ways))

    def _new_problem(self, episodes: int, ways: int) -> Problem:
        def encode(lam: dict[str, Tensor], task: Task) -> Task:
            (images, labels), (queries, *answers) = task.train, task.val
            support, query = self.represent_episodes(lam, images, queries, ways, training=True)
            return Task((support, labels), (query, *answers))

        def outer(w: Tensor, lam: Any, batch: tuple[Tensor, ...]) -> Tensor:
            loss = LinearClassifiers()(w, lam, (batch[0], batch[1])) / episodes
            if self.class_weight and self.class_loss is not None:  # it does not use the constant feature
                loss = loss + self.class_weight * self.class_loss(lam, batch[0][..., :-1], batch[2])
            return loss

        def init(lam: dict[str, Tensor]) -> Tensor:
            return next(iter(lam.values())).new_zeros(episodes, self.features, ways)

        # The calls of a comparison with differences would enter the running averages.
        encode.keeps_statistics = self.batch_norm == "running"  # type: ignore[attr-defined]
        return Problem(LinearClassifiers(self.l2), outer, init, encode)

    # ------------------------------------------------------------------------------------------- the contract

    def inner_size(self, ways: int) -> int:
        return ways * self.features

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = task.train
        if self.class_weight and len(task.val) < 3:
            raise BilevelError(
                "class_weight > 0 needs the classes of the queries: draw with Episodes(…, with_classes=True), or pass "
                "Task((images, labels), (queries, answers, classes))."
            )
        method = self.method
        if method is None:  # with few examples, their span has a smaller dimension than the features
            method = DualDescent() if images.shape[1] <= self.features else Reverse()
        problem = self.problem(len(images), int(labels.max()) + 1)
        result = hypergradient(problem, self.lam, task, dynamics=self.dynamics, steps=self.steps, method=method)
        return result.value, result.grad

    @torch.no_grad()
    def chunk_accuracies(self, task: Task, steps: int) -> Tensor:
        (images, labels), (queries, answers, *_) = task.train, task.val
        ways = int(labels.max()) + 1
        support, query = self.represent_episodes(self.lam, images, queries, ways, training=False)
        iterates = self.iterates(support, labels, ways, steps)
        return torch.stack([heads.accuracy(w, query, answers) for w in iterates], 1)

    @torch.no_grad()
    def iterates(self, features: Tensor, labels: Tensor, ways: int, steps: int) -> Iterator[Tensor]:
        """w_1, w_2, …, w_steps for stacked features."""
        problem = self.problem(len(features), ways)
        w, state = problem.init(self.lam), ()
        for t in range(1, steps + 1):
            w, state = self.dynamics.step(lambda v: problem.inner(v, None, (features, labels)), w, state, t)
            yield w

    @torch.no_grad()
    def adapted(self, support: Tensor, labels: Tensor, ways: int, steps: int) -> LinearLogits:
        """T steps from zero on an inner objective in which every class has the same weight.

            L(w) = mean over classes of the mean over its images of cross-entropy(h(x)ᵀw, y) + l2/2 ‖w‖²

        If all classes have the same number of images, this is the objective of an episode. Otherwise the plain mean
        would take larger steps for the larger classes, and with a small T the smaller ones would rarely be predicted.
        """
        features = self.represent_sets(self.lam, support, support, training=False)[0]
        counts = torch.bincount(labels, minlength=ways).to(features.dtype)
        # The curvature of the weighted loss is that of the plain loss on features times the roots of the weights.
        weighted = features * (len(labels) / ways / counts[labels]).sqrt()[:, None]
        scale = self.scale(weighted[None], ways).reshape(())
        features = features * scale

        def inner(w: Tensor) -> Tensor:
            # torch divides a weighted loss by the sum of the weights, which is the number of classes here.
            loss = F.cross_entropy(features @ w, labels, weight=1 / counts)
            return loss + self.l2 / 2 * w.square().sum()

        w, state = features.new_zeros(features.shape[1], ways), ()
        for t in range(1, steps + 1):
            w, state = self.dynamics.step(inner, w, state, t)
        return LinearLogits(self, support, w, scale)

    @torch.no_grad()
    def certifiable(self, episodes: Task) -> tuple[Problem, Task]:
        (images, labels), (queries, answers, *_) = self._stacked_episodes(episodes)
        ways = int(labels.max()) + 1
        features = self.represent_episodes(self.lam, images, queries, ways, training=False)
        support, query = (part.double() for part in features)
        problem = self.problem(len(images), ways)
        return Problem(problem.inner, problem.outer, problem.init), Task((support, labels), (query, answers))

    def settings(self) -> dict[str, Any]:
        # Older cards do not have these settings. They are left out if they have their defaults, as before.
        defaults = {"normalise": False, "mirror": False, "last_relu": True}
        settings = super().settings()
        return {name: value for name, value in settings.items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True)
class LinearLogits:
    """The logits h(x)ᵀw_T of queries, with the classifier w_T of a support set.

    Attributes:
        weights: w_T, features × classes; the last feature is the constant 1 of the bias.
        scale: the factor on the features, `learner.scale` for the support set.
    """

    learner: Learner
    support: Tensor
    weights: Tensor
    scale: Tensor

    def __call__(self, queries: Tensor) -> Tensor:
        learner = self.learner
        features = learner.representation.of_this_thread().sets(learner.lam, self.support, queries, training=False)[1]
        return features * self.scale @ self.weights

    @property
    def matrix(self) -> Tensor:
        """The matrix W, features × classes, that gives the logits h(x)ᵀW."""
        return self.scale * self.weights
