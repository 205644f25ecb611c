"""Scores that are large for pictures of one of the classes, and small for pictures of none of them.

- "distance": −min over classes of ‖φ(x) − mean of φ over the labelled pictures of the class‖ with the representation φ;
- "logit": the largest logit. Noise and pictures of other classes may have large logits too, because a linear classifier
  is only trained to distinguish its classes.

`bilevel.learners.calibration` uses the score that finds more pictures of other classes on meta-validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from bilevel.learners.classifier import FewShotClassifier


def distance(classifier: FewShotClassifier, images: Any) -> Tensor:
    return -classifier.class_distances(images).min(1).values.double()


def logit(classifier: FewShotClassifier, images: Any) -> Tensor:
    return classifier.scores(images).max(1).values.double()


# The scores by name. Cards that name no score use the first one.
BELONGING: dict[str, Callable[[FewShotClassifier, Any], Tensor]] = {"logit": logit, "distance": distance}
