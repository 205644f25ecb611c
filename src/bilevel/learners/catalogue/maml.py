"""MAML (Finn, Abbeel and Levine, 2017): λ is the start from which T steps on all weights make a good classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from bilevel.errors import BilevelError
from bilevel.learners.base import LearnerOptions
from bilevel.learners.bilevel_learner import BilevelLearner, DescentOptions
from bilevel.models.batch_norm import Mode
from bilevel.problem import Problem, Task

Weights = Mapping[str, Tensor]
HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class MAMLOptions(DescentOptions):
    """The settings of `MAML`.

    Args:
        head: how the last layer begins. "zero", for any number of classes; "learned", as in the paper, part of λ and
            for one number of classes only.
        head_ways: the number of classes of a learned head; in a training, by default, that of its episodes.
    """

    head: Literal["zero", "learned"] = "zero"
    head_ways: int = 5


class MAML(BilevelLearner):
    """Initialisation as a bilevel problem: w is all weights of network and last layer, Φ_0(λ) = λ, T steps.

    A last layer that begins with one vector for all classes gives the same logits, up to a shift that a softmax does
    not see, as one that begins at zero. So "zero" is also the start that does not depend on how classes are numbered.

    Batch norm is the paper's: every set by its own statistics. The paper's step size for Omniglot is 0.4, with one
    step; the default here is 0.1, because five steps of 0.4 learn more slowly.
    """

    Options: ClassVar[type[LearnerOptions]] = MAMLOptions
    strategy: ClassVar[str] = "initialisation"
    batch_norm_modes: ClassVar[tuple[Mode, ...]] = ("episode",)

    def __init__(
        self, module: nn.Module | str | None, shape: tuple[int, int, int], *, chunk: int = 1, **options: Any
    ) -> None:
        # Every episode has weights of its own, so episodes share no work, and threads can take one each.
        super().__init__(module, shape, chunk=chunk, **options)

    def build(self) -> None:
        if self.options.head == "learned":
            weight = torch.empty(self.features, self.options.head_ways)
            self.lam[HEAD] = torch.nn.init.xavier_uniform_(weight).to(next(iter(self.lam.values())))

    @classmethod
    def for_training(cls, settings: Any, data: Any, module: nn.Module | None = None) -> Any:
        options = {"head_ways": settings.ways_in_training, **settings.options}
        return super().for_training(replace(settings, options=options), data, module)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.options.head == "zero"

    def check_episode(self, ways: int, shots: int) -> None:
        if self.options.head == "learned" and ways != self.options.head_ways:
            raise BilevelError(
                f"This {self.name} has a learned head for {self.options.head_ways} classes and cannot tell {ways} "
                "apart. "
                f"Set head_ways={ways} for a new training, or head=zero for any number of classes."
            )

    @property
    def adapts_network(self) -> bool:
        """Whether w has the weights of the network, or of the last layer only."""
        return True

    @property
    def offsets(self) -> bool:
        """Whether w stands for what is added to λ, with w_0 = 0 (Section 2.2's w + λ).

        The steps and f_T are the same. It is for methods that ignore the dynamics: ∇_λ E(λ + w_T) with w_T held fixed
        is the first-order approximation of Finn et al.
        """
        return not (self.method or self.default_method).sees_dynamics

    def initial(self, lam: Weights, ways: int) -> dict[str, Tensor]:
        """The weights that an episode begins with."""
        names = self.representation.names if self.adapts_network else []
        zero = next(iter(lam.values())).new_zeros(self.features, ways)
        return {HEAD: lam.get(HEAD, zero), **{name: lam[name] for name in names}}

    def start(self, lam: Weights, ways: int) -> dict[str, Tensor]:
        first = self.initial(lam, ways)
        return {name: torch.zeros_like(value) for name, value in first.items()} if self.offsets else first

    def weights(self, w: Weights, lam: Weights) -> dict[str, Tensor]:
        """The weights that w stands for."""
        return {name: lam[name] + value if self.offsets and name in lam else value for name, value in w.items()}

    def logits(self, w: Weights, lam: Weights, images: Tensor) -> Tensor:
        weights = self.weights(w, lam)
        features = self.representation.here().together(weights, images) if self.adapts_network else images
        return features @ weights[HEAD]

    def problem(self, ways: int, *, training: bool = True) -> Problem:
        def encode(lam: Weights, task: Task) -> Task:
            (images, labels), (queries, answers) = task.train, task.val
            known, asked = self.representation.here().sets(lam, images, queries, training=training)
            return Task((known, labels), (asked, answers))

        problem = super().problem(ways, training=training)
        return problem if self.adapts_network else replace(problem, encode=encode)
