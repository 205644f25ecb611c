"""Hyper-representations (Sections 2.2 and 4): λ is the representation, w a linear classifier for every episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from bilevel.learners.representation import CENTRE, LENGTH
from bilevel.learners.settings import TrainingSettings
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
# Features of one length begin with this one; learning moves it.
FIRST_LENGTH = 6.0


@dataclass(frozen=True, kw_only=True)
class HyperRepresentationOptions(DescentOptions):
    """The settings of `HyperRepresentation`; see there."""

    step_bound: float = 0.0
    l2: float = 0.0
    normalise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.l2 >= 0 or not self.step_bound >= 0:
            raise BilevelError(f"l2={self.l2} and step_bound={self.step_bound} must be at least 0.")


class HyperRepresentation(Learner):
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
        mirror: whether h's features are the mean over a picture and its mirror image; it takes twice the time.
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

    Options: ClassVar[type[LearnerOptions]] = HyperRepresentationOptions
    strategy: ClassVar[str] = "representation"
    linear: ClassVar[bool] = True
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
        self._problems: dict[tuple[int, int], Problem] = {}
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

    def build(self) -> None:
        like = next(iter(self.lam.values()))
        if self.normalise:
            self.lam[CENTRE] = like.new_zeros(self.features - 1)
            self.lam[LENGTH] = like.new_tensor(FIRST_LENGTH).log()
        if self.class_loss is not None:
            fresh = self.class_loss.new(self.features - 1, self._seed)
            self.lam |= {name: leaf.to(like) for name, leaf in fresh.items()}

    @classmethod
    def for_training(cls, settings: TrainingSettings, data: ImageDataset, module: nn.Module | None = None) -> Self:
        height, width, channels = data.shape
        given = cls.options_of(settings)
        network = given.pop("network") if module is None else module
        given.pop("network", None)
        return cls(
            network,
            (channels, height, width),
            seed=settings.seed,
            class_loss=cls.class_loss_of(settings, data),
            class_weight=settings.global_loss,
            method=METHODS[settings.method],
            **given,
        )

    @classmethod
    def class_loss_of(cls, settings: TrainingSettings, data: ImageDataset) -> ClassLoss | None:
        """The loss over all classes of meta-training, if the training has one."""
        if not settings.global_loss:
            return None
        return ClassLoss(training_classes(settings, data), settings.classifier, settings.label_smoothing)

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
        if method is None:  # with few examples, their span is smaller than the space of features
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
        """T steps from zero on an inner objective where every class counts the same.

            L(w) = mean over classes of the mean over its images of cross-entropy(h(x)ᵀw, y) + l2/2 ‖w‖²

        With as many images of each class this is the objective of an episode. Without, the plain mean would take longer
        steps for the larger classes, and with a small T the smaller ones would hardly ever be predicted.
        """
        features = self.represent_sets(self.lam, support, support, training=False)[0]
        counts = torch.bincount(labels, minlength=ways).to(features.dtype)
        # The curvature of the weighted loss is that of the plain one on features weighted by the root.
        weighted = features * (len(labels) / ways / counts[labels]).sqrt()[:, None]
        scale = self.scale(weighted[None], ways).reshape(())
        features = features * scale

        def inner(w: Tensor) -> Tensor:
            # torch's mean of a weighted loss divides by the sum of the weights, which is the number of classes here.
            loss = F.cross_entropy(features @ w, labels, weight=1 / counts)
            return loss + self.l2 / 2 * w.square().sum()

        w, state = heads.zeros(1, features.shape[1], ways, like=features)[0], ()
        for t in range(1, steps + 1):
            w, state = self.dynamics.step(inner, w, state, t)
        return LinearLogits(self, support, w, scale)

    @torch.no_grad()
    def certifiable(self, episodes: Task) -> tuple[Problem, Task]:
        (images, labels), (queries, answers, *_) = self._here(episodes)
        ways = int(labels.max()) + 1
        features = self.represent_episodes(self.lam, images, queries, ways, training=False)
        support, query = (part.double() for part in features)
        whole = self.problem(len(images), ways)
        return Problem(whole.inner, whole.outer, whole.init), Task((support, labels), (query, answers))

    def settings(self) -> dict[str, Any]:
        # They came later, and are said where they are not what they were before.
        usual = {"normalise": False, "mirror": False, "last_relu": True}
        said = super().settings()
        return {name: value for name, value in said.items() if name not in usual or value != usual[name]}


@dataclass(frozen=True)
class LinearLogits:
    """h(x)ᵀw_T, the logits of queries, by a classifier that was learned from a support set.

    Attributes:
        weights: w_T, features × classes; the last feature is the constant 1 of the bias.
        scale: the factor on the features that `learner.scale` gives for the support set.
    """

    learner: Learner
    support: Tensor
    weights: Tensor
    scale: Tensor

    def __call__(self, queries: Tensor) -> Tensor:
        learner = self.learner
        features = learner.representation.here().sets(learner.lam, self.support, queries, training=False)[1]
        return features * self.scale @ self.weights

    @property
    def matrix(self) -> Tensor:
        """W, features × classes, with the logits h(x)ᵀW."""
        return self.scale * self.weights
