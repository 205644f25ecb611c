"""Pretraining on all classes of meta-training: a common baseline, and a stage before the bilevel problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bilevel.learners.catalogue.hyper_representation import HyperRepresentation
from bilevel.learners.class_loss import ClassLoss
from bilevel.learners.settings import TrainingSettings
from bilevel.learners.streams import ImageStream, training_classes

if TYPE_CHECKING:
    from bilevel.data import ImageDataset


class Multiclass(HyperRepresentation):
    """λ is trained on the cross-entropy over all classes of meta-training, with minibatches of images.

    New classes are learned as in `HyperRepresentation`: T steps from zero on the features. Validation uses episodes, so
    that runs can be compared with those of the bilevel problem.

    Attributes:
        precision: "float32", or "bfloat16" for faster convolutions in training (torch's autocast). λ, its gradient and
            batch norm's statistics are always in float32, and so is everything after training.
    """

    strategy: ClassVar[str] = "baseline"
    episodic: ClassVar[bool] = False
    also_uses: ClassVar[frozenset[str]] = HyperRepresentation.also_uses | {"precision"}
    precision: str = "float32"

    @classmethod
    def for_training(cls, settings: Any, data: ImageDataset, module: nn.Module | None = None, **more: Any) -> Self:
        learner = super().for_training(settings, data, module, **more)
        learner.precision = settings.precision
        return learner

    @classmethod
    def class_loss_of(cls, settings: TrainingSettings, data: ImageDataset) -> ClassLoss | None:
        return ClassLoss(training_classes(settings, data), settings.classifier, settings.label_smoothing)

    @classmethod
    def stream(cls, settings: TrainingSettings, data: ImageDataset) -> ImageStream:
        return ImageStream(settings, data)

    def hypergradient(self, episodes: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on labelled images of all classes (`ImageStream.draw`), and its gradient."""
        leaf = next(iter(self.lam.values()))
        images, labels = (x.to(leaf.device) for x in episodes)
        lam = {name: leaf.detach().requires_grad_() for name, leaf in self.lam.items()}
        with torch.enable_grad():
            with torch.autocast(leaf.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
                features = self.representation.of_this_thread().together(lam, images)[:, :-1]
            loss = self.loss(lam, features.to(leaf.dtype), labels)
            # λ may have unused leaves: a cosine classifier does not depend on the length of normalised features.
            grads = torch.autograd.grad(loss, list(lam.values()), allow_unused=True, materialize_grads=True)
        return loss.detach(), dict(zip(lam, grads, strict=True))

    def loss(self, lam: Mapping[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy over all classes."""
        assert self.class_loss is not None
        return self.class_loss(lam, features, labels)
