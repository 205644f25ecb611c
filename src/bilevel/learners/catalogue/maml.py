"""MAML (Finn, Abbeel and Levine, 2017): λ is the start of T gradient steps on all weights of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bilevel import trees
from bilevel.errors import BilevelError
from bilevel.hypergradients import hypergradient
from bilevel.learners.base import LearnerOptions
from bilevel.learners.bilevel_learner import BilevelLearner, DescentOptions
from bilevel.learners.settings import setting
from bilevel.methods.reverse import Reverse
from bilevel.models.batch_norm import Mode
from bilevel.models.networks import stacked
from bilevel.problem import Problem, Task

# The bytes of support images in one stacked problem. Stacking saves the overhead of small operations, so large images
# do not need it.
TOGETHER_BYTES = 256 * 1024
Weights = Mapping[str, Tensor]
HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class MAMLOptions(DescentOptions):
    """The settings of `MAML`.

    Args:
        head: the start of the last layer: "zero", for any number of classes, or "learned", as in the paper: part of λ,
            and for one number of classes only.
        head_ways: the number of classes of a learned head. In a training it is by default that of the episodes.
        trained_ways: the number of classes for which `inner_lr` is the step size: a class has the weight 1/trained_ways
            in L, whatever the number of classes of a task. In a training it is that of the episodes. 0: L is the mean
            over the classes of the task.
    """

    head: Literal["zero", "learned"] = "zero"
    head_ways: int = setting(5, least=1)
    trained_ways: int = setting(0, least=0)


class MAML(BilevelLearner):
    """Initialisation as a bilevel problem: w is all weights of network and last layer, Φ_0(λ) = λ, T steps.

    With head=zero the start does not depend on the numbering of the classes. It is the only such start: if all classes
    began with another common vector, all logits of an image would change by the same number, which the softmax ignores.

    A task may have another number of classes than the episodes of training. In the mean over 5 classes, the gradient of
    each class is 4 times as large as in the mean over 20, and steps that were learned for 20 classes are then too long.
    Therefore a class has the same weight in L in every task (`trained_ways`).

    Batch norm is the paper's: every set uses its own statistics. The paper takes one step of size 0.4 on Omniglot. The
    default here is 0.1, because training with five steps of 0.4 is slower.
    """

    Options: ClassVar[type[LearnerOptions]] = MAMLOptions
    strategy: ClassVar[str] = "initialisation"
    batch_norm_modes: ClassVar[tuple[Mode, ...]] = ("episode",)

    def build(self) -> None:
        if self.options.head == "learned":
            weight = torch.empty(self.features, self.options.head_ways)
            self.lam[HEAD] = torch.nn.init.xavier_uniform_(weight).to(next(iter(self.lam.values())))

    @classmethod
    def for_training(cls, settings: Any, data: Any, module: nn.Module | None = None, **more: Any) -> Any:
        ways = settings.ways_in_training
        options = {"head_ways": ways, "trained_ways": ways, **settings.options}
        return super().for_training(replace(settings, options=options), data, module, **more)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.options.head == "zero"

    def check_episode(self, ways: int, shots: int) -> None:
        if self.options.head == "learned" and ways != self.options.head_ways:
            raise BilevelError(
                f"This {self.name} has a learned head for {self.options.head_ways} classes and cannot classify {ways}. "
                f"Set head_ways={ways} for a new training, or head=zero for any number of classes."
            )

    def loss_factor(self, ways: int) -> float:
        """What the mean of the classes' losses is multiplied by in L, for this number of classes."""
        return ways / self.options.trained_ways if self.options.trained_ways else 1.0

    @property
    def adapts_network(self) -> bool:
        """Whether w holds the weights of the network too, and not only those of the last layer."""
        return True

    @property
    def stacks(self) -> bool:
        """Whether several episodes are one problem, whose w has a first axis for episodes.

        The episodes remain independent, but their steps are computed together.
        """
        return self.adapts_network

    @property
    def offsets(self) -> bool:
        """Whether w is the difference from λ, with w_0 = 0 and weights λ + w (as in Section 2.2).

        The iterates λ + w_t and f_T are the same. Methods that ignore the dynamics need this form: ∇_λ E(λ + w_T) with
        w_T constant is the first-order approximation of Finn et al.
        """
        return not (self.method or self.default_method).sees_dynamics

    def initial(self, lam: Weights, ways: int) -> dict[str, Tensor]:
        """The weights at the start of an episode."""
        names = self.representation.names if self.adapts_network else []
        zero = next(iter(lam.values())).new_zeros(self.features, ways)
        return {HEAD: lam.get(HEAD, zero), **{name: lam[name] for name in names}}

    def start(self, lam: Weights, ways: int) -> dict[str, Tensor]:
        first = self.initial(lam, ways)
        return {name: torch.zeros_like(value) for name, value in first.items()} if self.offsets else first

    def weights(self, w: Weights, lam: Weights) -> dict[str, Tensor]:
        """The weights of the classifier for a given w."""
        return {name: lam[name] + value if self.offsets and name in lam else value for name, value in w.items()}

    def logits(self, w: Weights, lam: Weights, images: Tensor) -> Tensor:
        weights = self.weights(w, lam)
        features = self.representation.of_this_thread().together(weights, images) if self.adapts_network else images
        return features @ weights[HEAD]

    # ------------------------------------------------------------------------------------------- stacked episodes

    def group_size(self, meta_batch: int) -> int:
        return max(1, min(self.chunk, meta_batch // 2)) if self.stacks else super().group_size(meta_batch)

    def chunk_size(self, count: int) -> int:
        threads = 1 if self.representation.single_threaded() else torch.get_num_threads()
        return min(self.chunk, ceil(count / threads))

    def chunk_hypergradient(self, task: Task) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.stacks:
            return super().chunk_hypergradient(task)
        (images, labels), method = task.train, self.method or self.default_method
        saves_memory = isinstance(method, Reverse) and method.saves_memory
        size = 1 if saves_memory else max(1, TOGETHER_BYTES // images[0].nbytes)
        parts = [torch.split(x, size) for x in (images, labels, *task.val[:2])]
        shares, results = [], []
        for support, classes, queries, answers in zip(*parts, strict=True):
            problem = self._stacked(int(labels.max()) + 1, len(support))
            part = Task((support, classes), (queries, answers))
            results.append(
                hypergradient(problem, self.lam, part, dynamics=self.dynamics, steps=self.steps, method=method)
            )
            shares.append(len(support) / len(images))
        value = _weighted_sum(shares, [result.value for result in results])
        grads = [result.grad for result in results]
        return value, trees.map(lambda *leaves: _weighted_sum(shares, leaves), *grads)

    def _stacked(self, ways: int, count: int) -> Problem:
        """The problem of `count` stacked episodes, whose f_T is the mean over them. It is built once."""
        factor = self.loss_factor(ways)

        def inner(w: Weights, lam: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
            (images, labels), weights = batch, self.weights(w, lam)
            with self.representation.of_this_thread().unfused():
                logits = torch.bmm(self.representation.of_this_thread().networks(weights, images), weights[HEAD])
            return factor * sum_of_balanced_losses(logits, labels)

        def outer(w: Weights, lam: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
            leaves = zip(*map(torch.unbind, w.values()), strict=True)
            episodes = (dict(zip(w, own, strict=True)) for own in leaves)
            logits = [self.logits(own, lam, queries) for own, queries in zip(episodes, batch[0], strict=True)]
            return F.cross_entropy(torch.cat(logits), batch[1].flatten())

        def init(lam: Weights) -> dict[str, Tensor]:
            return {name: stacked(leaf, count) for name, leaf in self.start(lam, ways).items()}

        return self.kept_problem((ways, count, self.method, "together"), lambda: Problem(inner, outer, init))

    def problem(self, ways: int, *, training: bool = True) -> Problem:
        def encode(lam: Weights, task: Task) -> Task:
            (images, labels), (queries, answers) = task.train, task.val
            support, query = self.representation.of_this_thread().sets(lam, images, queries, training=training)
            return Task((support, labels), (query, answers))

        problem, factor = super().problem(ways, training=training), self.loss_factor(ways)

        def inner(w: Weights, lam: Weights, batch: tuple[Tensor, Tensor]) -> Tensor:
            return factor * mean_loss(w, lam, batch)

        mean_loss = problem.inner
        # The calls of a comparison with differences would enter the running averages.
        encode.keeps_statistics = self.batch_norm == "running"  # type: ignore[attr-defined]
        return replace(problem, inner=inner, encode=None if self.adapts_network else encode)


def sum_of_balanced_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ over episodes of the mean over classes of the mean cross-entropy, for logits episodes × images × classes.

    >>> logits, labels = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]]), torch.tensor([[0, 1, 1]])
    >>> round(float(sum_of_balanced_losses(logits, labels)), 4)  # (1.3133 + 0.3133) / 2
    0.8133
    """
    counts = F.one_hot(labels, logits.shape[2]).sum(1)
    weights = 1 / (counts.gather(1, labels) * (counts > 0).sum(1, keepdim=True)).to(logits)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") @ weights.flatten()


def _weighted_sum(weights: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]).sum(0)
